"""Gated linear attention (Yang et al. 2023, arXiv 2312.06635): each channel of the state fades by what the token says.

    h_t = diag(alpha_t) h_(t-1) + k_t v_t^T,   alpha = sigmoid(W_2 W_1 x + b)^(1/16),   o_t = q_t h_t / sqrt(K)
    y = (swish(W_r x) * RMSNorm(o)) W_o, each head normalised by itself

decay="lightning" is Lightning Attention (Qin et al. 2024, arXiv 2401.04658) as in MiniMax-01 (arXiv 2501.08313): head h fades by
exp(-slope 2^(-8h/H)) a token, queries, keys and values go through SiLU, the gate is a sigmoid, and the norm is over all heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import GPTConfig
from config.check import check_fields, check_range
from mixers.linear import Fading, head_width
from ops.norm import rms_norm
from ops.positions import Positions
from ops.rope import alibi_slopes


@dataclass
class GLAOptions:
    decay: Literal["gated", "lightning"] = "gated"
    """by channel, as the token says; or a head's constant"""
    expand_k: float | None = None
    """width of a head's queries and keys, in head_dim (None: 1/2 where gated, as in the paper, and 1 for lightning)"""
    expand_v: float = 1.0
    """width of a head's values, in head_dim"""
    gate_rank: int = 16
    """width between W_1 and W_2"""
    gate_root: float = 16.0
    """which root of the sigmoid is the decay: at first a state lives for gate_root / ln 2 tokens"""
    slope: float = 1.0
    """lightning's pace; MiniMax's layer l of L has 1 - l / (L - 1)"""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("expand_k", "expand_v", "gate_rank", "gate_root"):
            check_range(self, name, above=0)
        check_range(self, "slope", least=0)


class GLA(Fading):
    """The model's position says nothing here: decay tells order, as in the paper."""

    Options = GLAOptions

    def __init__(self, cfg: GPTConfig, options: GLAOptions):
        D, self.lightning = head_width(cfg), options.decay == "lightning"
        expand_k = options.expand_k or (1.0 if self.lightning else 0.5)
        super().__init__(cfg, max(1, int(D * expand_k)), max(1, int(D * options.expand_v)), gate=True)
        self.slope, self.root = options.slope, options.gate_root
        if not self.lightning:
            self.decay_in = nn.Linear(cfg.n_embd, options.gate_rank, bias=False)
            self.decay_out = nn.Linear(options.gate_rank, self.G * self.K, bias=True)
        self.norm = nn.RMSNorm(self.H * self.V if self.lightning else self.V, eps=cfg.norm_eps)

    def forward(self, x: Tensor, at: Positions, state: dict[str, Tensor] | None = None) -> Tensor:
        q, k, v, gate = self.heads(x)
        if self.lightning:
            q, k, v = (F.silu(t) for t in (q, k, v))
            log_decay = -self.slope * at.once(("lightning", self.G), lambda: torch.tensor(alibi_slopes(self.G), device=x.device))
        else:
            q = q.float() * self.K**-0.5
            log_decay = F.logsigmoid(self.decay_out(self.decay_in(x)).float()) / self.root                 # (B, T, G K)
            log_decay = log_decay.unflatten(-1, (self.G, self.K)).transpose(1, 2)
        y = self.read(q, k, v, log_decay, at, state)
        y = rms_norm(self.joined(y), self.norm) if self.lightning else self.joined(rms_norm(y, self.norm))
        return self.out((gate.sigmoid() if self.lightning else F.silu(gate)) * y.type_as(x))
