"""Mamba (Gu and Dao 2023, arXiv 2312.00752): a state space model whose step, input and readout are functions of the token.

    [u, z] = W_in x,  u = SiLU(conv(u)),  [d, B, C] = W_x u,  dt = softplus(W_dt d + b_dt),  A = -exp(A_log)
    h_t = exp(dt_t A) h_(t-1) + dt_t u_t B_t,    y_t = C_t h_t + D u_t,    out = W_out (y SiLU(z))
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
from ops.norm import rms_norm
from ops.positions import Positions
from ops.scan import scan
from ops.shift import short_conv


@dataclass(kw_only=True)
class MambaOptions:
    """By the paper's names."""

    d_state: int = 16
    """numbers that a channel remembers"""
    d_conv: int = 4
    """inputs that the short convolution sees, the token's own included"""
    expand: int = 2
    """channels of the scan, in widths of the residual stream"""
    dt_rank: int | None = None
    """rank of the steps' projection (None: a sixteenth of n_embd, rounded up)"""
    norms: bool = False
    """RMSNorm on the steps' low-rank input and on B and C, which keeps large models stable (Jamba, arXiv 2403.19887)"""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("d_state", "d_conv", "expand", "dt_rank"):
            check_range(self, name, above=0)


def inverse_softplus_of_steps(n: int, low: float = 1e-3, high: float = 1e-1) -> Tensor:
    """(n,): what softplus makes steps of, even in the logarithm at random between low and high; the start of both Mambas."""
    dt = torch.empty(n).uniform_(math.log(low), math.log(high)).exp()
    return dt + (-(-dt).expm1()).log()


def short_conv_weights(channels: int, K: int) -> tuple[Tensor, Tensor]:
    """weight (channels, K) and bias (channels,) as nn.Conv1d starts them."""
    return torch.empty(channels, K).uniform_(-K**-0.5, K**-0.5), torch.empty(channels).uniform_(-K**-0.5, K**-0.5)


class Mamba(Mixer):
    """Its state is the scan's, N numbers a channel in float32, and the last d_conv - 1 inputs of the convolution, whatever came before.

    Starts as the paper's: A = -1 ... -N in every channel, D = 1, steps from 0.001 to 0.1, W_dt uniform in +-1/sqrt(rank), the
    convolution as nn.Conv1d. None of A_log, D and b_dt decays.
    """

    Options = MambaOptions

    def __init__(self, cfg: GPTConfig, options: MambaOptions):
        super().__init__()
        self.E, self.N, self.K = options.expand * cfg.n_embd, options.d_state, options.d_conv
        self.R, self.norms = options.dt_rank or -(-cfg.n_embd // 16), options.norms
        self.inp = nn.Linear(cfg.n_embd, 2 * self.E, bias=cfg.bias)                            # rows: all u, all z
        self.inp.parts = [self.E, self.E]   # type: ignore[assignment] # two matrices to Muon
        self.conv, self.conv_bias = map(nn.Parameter, short_conv_weights(self.E, self.K))
        self.select = nn.Linear(self.E, self.R + 2 * self.N, bias=False)                       # rows: d, B, C
        self.select.parts = [self.R, self.N, self.N]   # type: ignore[assignment]
        if self.norms:
            self.dt_norm, self.B_norm, self.C_norm = (nn.RMSNorm(n, eps=cfg.norm_eps) for n in (self.R, self.N, self.N))
        self.dt = nn.Parameter(torch.empty(self.E, self.R).uniform_(-self.R**-0.5, self.R**-0.5))
        self.dt_bias = nn.Parameter(inverse_softplus_of_steps(self.E))
        self.A_log = nn.Parameter(torch.arange(1.0, self.N + 1).log().repeat(self.E, 1))
        self.A_log.no_decay = True   # type: ignore[attr-defined] # a matrix by its shape alone
        self.D = nn.Parameter(torch.ones(self.E))
        self.out = nn.Linear(self.E, cfg.n_embd, bias=cfg.bias)

    def forward(self, x: Tensor, at: Positions, state: dict[str, Tensor] | None = None) -> Tensor:
        u, z = self.inp(x).chunk(2, -1)
        u, tail = short_conv(u, self.conv, self.conv_bias, at, None if state is None else state["conv"])
        u = F.silu(u)
        d, B, C = self.select(u).split([self.R, self.N, self.N], -1)
        if self.norms:
            d, B, C = (rms_norm(t, norm).type_as(t) for t, norm in ((d, self.dt_norm), (B, self.B_norm), (C, self.C_norm)))
        dt = F.softplus(F.linear(d, self.dt.type_as(d)).float() + self.dt_bias.float())
        y, h = scan(u, dt, -self.A_log.float().exp(), B, C, at, None if state is None else state["h"])
        if state is not None:
            state["conv"].copy_(tail)
            state["h"].copy_(h)
        return self.out((y + self.D.float() * u).type_as(z) * F.silu(z))

    def init_state(self, B: int, max_len: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        return {"conv": torch.zeros(B, self.K - 1, self.E, dtype=dtype, device=device),
                "h": torch.zeros(B, self.N, self.E, device=device)}

    def flops(self, T: int) -> float:
        """Of a channel: W_dt, the convolution, and for each number of its state the decay's exponent, its exp, the decay, the input
        and the readout, of which three are multiplied and added."""
        return self.E * (2 * self.R + 2 * self.K + 7 * self.N)
