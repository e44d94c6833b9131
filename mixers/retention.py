"""Retention (RetNet, Sun et al. 2023, arXiv 2307.08621): a past that fades at a pace of each head's own, queries and keys rotated.

    o_t = sum over s <= t of gamma^(t-s) (q_t . k_s) v_s / sqrt(K)        gamma_h = 1 - 2^(-5-h), h = 0, 1, ...
    y = (swish(W_g x) * GroupNorm(o)) W_o, each head a group, without weights
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from config import GPTConfig
from config.check import check_fields, check_range
from mixers.linear import Fading, head_width
from ops.positions import Positions
from ops.rope import angles, rotate, widest


@dataclass
class RetentionOptions:
    expand_v: int = 2
    """width of a head's values, in those of its keys; 2 as in the paper, which narrows its feed-forward for it"""
    rope: bool = True
    """whether queries and keys are rotated, whatever the model's position: order is told by decay too"""

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "expand_v", above=0)


class Retention(Fading):
    """Angles are the paper's code's, not RoPE's: rope_theta^(-i / (K/2 - 1)) a position, of channels 2i and 2i + 1, without xPos's
    growing and shrinking, which would be a decay the more. The norm takes the place of the paper's two divisors, which it undoes."""

    Options = RetentionOptions

    def __init__(self, cfg: GPTConfig, options: RetentionOptions):
        D = head_width(cfg)
        super().__init__(cfg, D, options.expand_v * D, gate=True)
        self.rope = options.rope
        if self.rope and D % 2:
            raise ValueError(f"layers: retention(rope=True) turns pairs of channels, and head_dim={D} is odd")

    def forward(self, x: Tensor, at: Positions, state: dict[str, Tensor] | None = None) -> Tensor:
        q, k, v, gate = self.heads(x)
        if self.rope:
            cos, sin = at.once(("retention", self.K, self.cfg.rope_theta), lambda: self.table(at))
            q, k = (rotate(t, cos, sin, "interleaved") for t in (q, k))
        log_decay = at.once(("retention", self.G), lambda: torch.log1p(-torch.exp2(-5.0 - torch.arange(self.G, device=x.device))))
        y = self.read(q.float() * self.K**-0.5, k, v, log_decay, at, state)
        y = F.layer_norm(y, (self.V,), eps=self.cfg.norm_eps)
        return self.out(F.silu(gate) * self.joined(y).type_as(x))

    def table(self, at: Positions) -> tuple[Tensor, Tensor]:
        pos = at.pos[:1] if at.plain else at.pos         # plain rows are alike
        i = torch.linspace(0, 1, self.K // 2, device=pos.device, dtype=widest(pos.device))
        return angles(pos, self.cfg.rope_theta ** -i)
