"""DeltaNet (Schlag et al. 2021, arXiv 2102.11174; Yang et al. 2024, arXiv 2406.06484): linear attention by the delta rule, which takes
out what the state holds for a key before it writes the key's value. The rule is ops/delta_rule.py.

    q, k, v = SiLU(short convolution of W x)     q = q / |q| / sqrt(K), k = k / |k|     beta = sigmoid(w x)     y = W_O RMSNorm(o)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import GPTConfig
from config.check import check_fields, check_range
from mixers.mixer import Mixer
from ops import fla
from ops.delta_rule import CHUNK, delta_rule
from ops.positions import Positions
from ops.shift import short_conv


@dataclass
class DeltaOptions:
    """Shared by deltanet, gated_deltanet and kda."""

    heads: int | None = None
    """heads of values, each with a state of its own (None: n_head)"""
    key_heads: int | None = None
    """heads of queries and keys, which as many value heads each share (None: heads; Qwen3-Next has half)"""
    key_dim: int | None = None
    """channels of a head's queries and keys (None: head_dim)"""
    value_dim: int | None = None
    """channels of a head's values (None: head_dim)"""
    conv: int = 4
    """inputs that the short convolution weighs, the newest included (1: each channel is scaled only)"""
    negative: bool = False
    """beta up to 2 instead of 1: a key's share of the state may change its sign (Grazzi et al. 2024, arXiv 2411.12537)"""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("heads", "key_heads", "key_dim", "value_dim", "conv"):
            check_range(self, name, above=0)


class DeltaNet(Mixer):
    """Its state is h (B, H, K, V) in float32 and the convolution's last inputs. `n_kv_head`, `qk_norm` and `position` say nothing here.

    A word like it overrides `log_decay` and `gate`.
    """

    Options = DeltaOptions
    backend = fla.backend

    def __init__(self, cfg: GPTConfig, options: DeltaOptions):
        super().__init__()
        D = cfg.head_dim or cfg.n_embd // cfg.n_head
        self.cfg, self.H, self.K, self.V = cfg, options.heads or cfg.n_head, options.key_dim or D, options.value_dim or D
        self.G, self.most = options.key_heads or self.H, 2 if options.negative else 1
        if self.H % self.G:
            raise ValueError(f"layers: key_heads={self.G} must divide heads={self.H}")
        self.widths = [self.G * self.K, self.G * self.K, self.H * self.V]
        self.qkv = nn.Linear(cfg.n_embd, sum(self.widths), bias=cfg.bias)
        self.qkv.parts = self.widths   # type: ignore[assignment] # as many matrices to Muon
        self.conv = nn.Parameter(torch.empty(sum(self.widths), options.conv).uniform_(-1, 1) * options.conv**-0.5)    # as nn.Conv1d's
        self.beta = nn.Linear(cfg.n_embd, self.H, bias=cfg.bias)
        self.norm = nn.RMSNorm(self.V, eps=cfg.norm_eps)
        self.out = nn.Linear(self.H * self.V, cfg.n_embd, bias=cfg.bias)

    def forward(self, x: Tensor, at: Positions, state: dict[str, Tensor] | None = None) -> Tensor:
        qkv, tail = short_conv(self.qkv(x), self.conv, None, at, None if state is None else state["conv"])
        q, k, v = (heads(t, n) for t, n in zip(F.silu(qkv).split(self.widths, -1), (self.G, self.G, self.H)))
        q, k = unit(q) * self.K**-0.5, unit(k)
        beta = self.most * self.beta(x).float().sigmoid().mT                             # (B, H, T)
        y, h = delta_rule(q, k, v, beta, self.log_decay(x), at, None if state is None else state["h"])
        if state is not None:
            state["conv"].copy_(tail)
            state["h"].copy_(h)
        y = F.rms_norm(y, (self.V,), self.norm.weight.to(y.dtype), self.norm.eps)
        gate = self.gate(x)
        y = y if gate is None else y * heads(gate, self.H)
        return self.out(y.transpose(1, 2).flatten(2).type_as(x))

    def log_decay(self, x: Tensor) -> Tensor | None:
        """x (B, T, C) -> at most 0, (B, H, T) or (B, H, T, K), in float32."""
        return None

    def gate(self, x: Tensor) -> Tensor | None:
        """x (B, T, C) -> what each channel of the output is multiplied by, (B, T, H V), in float32."""
        return None

    def init_state(self, B: int, max_len: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        return {"conv": torch.zeros(B, self.conv.shape[1] - 1, sum(self.widths), dtype=dtype, device=device),
                "h": torch.zeros(B, self.H, self.K, self.V, device=device)}

    def flops(self, T: int) -> float:
        """Three products with the state, and within the chunk both scores, the triangle's solution, and the sum of what was written."""
        return self.H * (6 * self.K * self.V + min(CHUNK, T) * (5 * self.K + 3 * self.V))


def heads(x: Tensor, n: int) -> Tensor:
    """(B, T, n D) -> (B, n, T, D)"""
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


def unit(x: Tensor) -> Tensor:
    """Of length 1 along the last dimension, in float32; nearly 0 where x is."""
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def decay_start(heads: int, channels: int, least: float) -> tuple[nn.Parameter, nn.Parameter]:
    """A_log (heads,) and dt_bias (channels,): rates A uniform from `least` to 16, and steps softplus(dt_bias) log-uniform from 0.001 to
    0.1, as in Mamba-2 (arXiv 2405.21060)."""
    dt = torch.empty(channels).uniform_(math.log(1e-3), math.log(1e-1)).exp()
    return nn.Parameter(torch.empty(heads).uniform_(least, 16).log()), nn.Parameter(dt + (-torch.expm1(-dt)).log())   # softplus inverted
