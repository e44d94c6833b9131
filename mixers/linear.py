"""Linear attention (Katharopoulos et al. 2020, arXiv 2006.16236): a kernel phi(q) . phi(k) in place of softmax's exponential, so that the
past is one matrix. And what mixers/retention.py and mixers/gla.py share with it, whose past fades."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import GPTConfig
from config.check import check_fields
from mixers.mixer import Mixer
from ops import fla
from ops.positions import Positions
from ops.recurrence import recurrence
from ops.rope import Rotation, rotate

FEATURES = {"elu": lambda x: F.elu(x) + 1, "relu": F.relu, "silu": F.silu, "identity": lambda x: x}
EPS = 1e-6        # added to the sum of weights, as in the authors' own fast-transformers


@dataclass
class LinearOptions:
    feature: Literal["elu", "relu", "silu", "identity"] = "elu"
    """phi, of queries and keys: elu is elu(x) + 1"""
    normalize: bool = True
    """divide by the sum of the weights phi(q) . phi(k), which must not be negative (elu, relu); otherwise the output of each head is
    normalised to a mean square of 1 (Qin et al. 2022, arXiv 2210.10340)"""
    rope: bool | None = None
    """whether phi(q) and phi(k) are rotated (None: where the model's position is rope); weights in the divisor never are, as in RoFormer
    (arXiv 2104.09864, eq. 19)"""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.normalize and self.feature not in ("elu", "relu"):
            raise ValueError(f"feature={self.feature!r} gives weights below 0, which sum to nothing to divide by: set normalize=False")


class Fading(Mixer):
    """H heads of queries over G states h (K, V): its state is (B, G, K, V) in float32, whatever the context. n_kv_head shares keys,
    values, decays and so states; window, sinks, qk_norm, dropout and soft-cap of attention say nothing here."""

    backend = fla.backend

    def __init__(self, cfg: GPTConfig, K: int, V: int, gate: bool):
        super().__init__()
        self.cfg, self.H, self.G, self.K, self.V = cfg, cfg.n_head, cfg.n_kv_head or cfg.n_head, K, V
        self.rows = [self.H * K, self.G * K, self.G * V] + [self.H * V] * gate                 # all q, all k, all v, all gates
        self.qkv = nn.Linear(cfg.n_embd, sum(self.rows), bias=cfg.bias)
        self.qkv.parts = self.rows   # type: ignore[assignment] # as many matrices to Muon
        self.out = nn.Linear(self.H * V, cfg.n_embd, bias=cfg.bias)

    def heads(self, x: Tensor) -> list[Tensor]:
        """x (B, T, C) -> q (B, H, T, K), k (B, G, T, K), v (B, G, T, V), and where there is a gate its (B, T, H V)."""
        q, k, v, *gate = self.qkv(x).split(self.rows, -1)
        return [t.unflatten(-1, (-1, n)).transpose(1, 2) for t, n in ((q, self.K), (k, self.K), (v, self.V))] + gate

    def read(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, at: Positions, state: dict[str, Tensor] | None,
             name: str = "h") -> Tensor:
        """-> (B, H, T, V) in float32; where there is a state, that of this name goes on."""
        y, h = recurrence(q, k, v, log_decay, at, h=None if state is None else state[name])
        if state is not None:
            state[name].copy_(h)
        return y

    def joined(self, y: Tensor) -> Tensor:
        """(B, H, T, V) -> (B, T, H V)"""
        return y.transpose(1, 2).flatten(2)

    def init_state(self, B: int, max_len: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        return {"h": torch.zeros(B, self.G, self.K, self.V, device=device)}

    def flops(self, T: int) -> float:
        """k v^T into the states, q h out of them."""
        return 2 * (self.G + self.H) * self.K * self.V


def head_width(cfg: GPTConfig) -> int:
    return cfg.head_dim or cfg.n_embd // cfg.n_head


class Linear(Fading):
    """y_t = phi(q_t) h_t / phi(q_t) . z_t, h the sum of phi(k) v^T and z that of phi(k): its state is h and, if normalised, z (B, G, K, 1).
    Where nothing is rotated, all that it knows of order is what came before."""

    Options = LinearOptions

    def __init__(self, cfg: GPTConfig, options: LinearOptions):
        super().__init__(cfg, head_width(cfg), head_width(cfg), gate=False)
        self.phi, self.normalize = FEATURES[options.feature], options.normalize
        rope = cfg.position == "rope" if options.rope is None else options.rope
        if rope and self.K % 2:
            raise ValueError(f"layers: linear(rope=True) turns pairs of channels, and head_dim={self.K} is odd")
        if cfg.position == "alibi":
            raise ValueError("layers: linear has no ALiBi: set position to rope or none")
        self.turn = Rotation(self.K, cfg.rope_theta, cfg.rope_scaling) if rope else None

    def forward(self, x: Tensor, at: Positions, state: dict[str, Tensor] | None = None) -> Tensor:
        q, k, v = self.heads(x)
        q, k = self.phi(q.float()) * self.K**-0.5, self.phi(k.float())
        z = None
        if self.normalize:
            z = self.read(q, k, v.new_ones(*v.shape[:3], 1), None, at, state, "z") + EPS         # (B, H, T, 1)
        if self.turn:
            cos, sin = self.turn.table(at)
            q, k = (rotate(t, cos, sin, self.cfg.rope_layout) for t in (q, k))
        y = self.read(q, k, v, None, at, state)
        y = F.rms_norm(y, (self.V,), eps=self.cfg.norm_eps) if z is None else y / z
        return self.out(self.joined(y).type_as(x))

    def init_state(self, B: int, max_len: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        state = super().init_state(B, max_len, dtype, device)
        return state | ({"z": torch.zeros(B, self.G, self.K, 1, device=device)} if self.normalize else {})
