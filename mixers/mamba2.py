"""Mamba-2 (state space duality, Dao and Gu 2024, arXiv 2405.21060): heads of P channels whose state of N x P fades by one number a token.

    [z, u, B, C, d] = W_in x,  [u, B, C] = SiLU(conv([u, B, C])),  dt = softplus(d + b_dt),  A = -exp(A_log)
    h_t = exp(dt_t A) h_(t-1) + B_t (dt_t u_t)^T,    y_t = C_t h_t + D u_t,    out = W_out RMSNorm(y SiLU(z))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import GPTConfig
from config.check import check_fields, check_range
from mixers.mamba import inverse_softplus_of_steps, short_conv_weights
from mixers.mixer import Mixer
from ops import fla
from ops.positions import Positions
from ops.recurrence import CHUNK, recurrence
from ops.shift import short_conv


@dataclass(kw_only=True)
class Mamba2Options:
    """By the paper's names."""

    d_state: int = 128
    """rows of a head's state: width of B and C"""
    head_dim: int = 64
    """channels of a head"""
    n_groups: int = 1
    """of heads; those of one share B and C, and are normalised together"""
    d_conv: int = 4
    """inputs that the short convolution sees, the token's own included"""
    expand: int = 2
    """channels of all heads, in widths of the residual stream"""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("d_state", "head_dim", "n_groups", "d_conv", "expand"):
            check_range(self, name, above=0)


class Mamba2(Mixer):
    """Its state is the heads' in float32, and the last d_conv - 1 inputs of the convolution, whatever came before.

    Starts as the paper's: A between -16 and -1 at random, D = 1, steps from 0.001 to 0.1, the convolution as nn.Conv1d. None of A_log,
    D and b_dt decays, as no vector does.
    """

    Options = Mamba2Options
    backend = fla.backend

    def __init__(self, cfg: GPTConfig, options: Mamba2Options):
        super().__init__()
        self.E, self.N, self.K = options.expand * cfg.n_embd, options.d_state, options.d_conv
        self.P, self.G = options.head_dim, options.n_groups
        if self.E % self.P:
            raise ValueError(f"layers: mamba2: {self.E} channels (expand times n_embd) are no multiple of head_dim={self.P}")
        self.H = self.E // self.P
        if self.H % self.G:
            raise ValueError(f"layers: mamba2: {self.H} heads (of {self.P} of {self.E} channels) are no multiple of n_groups={self.G}")
        self.mixed = [self.E, self.G * self.N, self.G * self.N]                                # what the convolution sees: u, B, C
        parts = [self.E, *self.mixed, self.H]                                                  # rows: z, u, B, C, d
        self.inp = nn.Linear(cfg.n_embd, sum(parts), bias=cfg.bias)
        self.inp.parts = parts   # type: ignore[assignment] # as many matrices to Muon
        self.conv, self.conv_bias = map(nn.Parameter, short_conv_weights(sum(self.mixed), self.K))
        self.dt_bias = nn.Parameter(inverse_softplus_of_steps(self.H))
        self.A_log = nn.Parameter(torch.empty(self.H).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(self.H))
        self.norm = nn.RMSNorm(self.E, eps=cfg.norm_eps)
        self.out = nn.Linear(self.E, cfg.n_embd, bias=cfg.bias)

    def forward(self, x: Tensor, at: Positions, state: dict[str, Tensor] | None = None) -> Tensor:
        z, u, d = self.inp(x).split([self.E, sum(self.mixed), self.H], -1)
        u, tail = short_conv(u, self.conv, self.conv_bias, at, None if state is None else state["conv"])
        u, B, C = (t.unflatten(-1, (n, -1)).transpose(1, 2) for t, n in zip(F.silu(u).split(self.mixed, -1), (self.H, self.G, self.G)))
        dt = F.softplus(d.float() + self.dt_bias.float()).mT                                   # (B, H, T)
        a = dt * -self.A_log.float().exp()[:, None]
        y, h = recurrence(C, B, u * dt[..., None], a, at, h=None if state is None else state["h"])
        if state is not None:
            state["conv"].copy_(tail)
            state["h"].copy_(h)
        y = (y + self.D.float()[:, None, None] * u).transpose(1, 2).flatten(2)
        return self.out(self.normed(y * F.silu(z.float())).type_as(z))

    def normed(self, y: Tensor) -> Tensor:
        """y (B, T, E) float32, each group of heads by its own root mean square."""
        grouped = F.rms_norm(y.unflatten(-1, (self.G, -1)), (self.E // self.G,), eps=self.norm.eps)
        return grouped.flatten(2) * self.norm.weight.float()

    def init_state(self, B: int, max_len: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        return {"conv": torch.zeros(B, self.K - 1, sum(self.mixed), dtype=dtype, device=device),
                "h": torch.zeros(B, self.H, self.N, self.P, device=device)}

    def flops(self, T: int) -> float:
        """The state read and written, a chunk's scores and what they weigh, and the convolution."""
        return 4 * self.E * self.N + 2 * min(T, CHUNK) * (self.G * self.N + self.E) + 2 * self.K * sum(self.mixed)
