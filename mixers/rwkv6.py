"""RWKV-6 "Finch" (Peng et al. 2024, arXiv 2404.05892), its time mix: linear attention whose state of D x D numbers a head decays by
channel, as the data say. Order is in the decay and the token shift; its models have position="none", norm="layernorm" and mlp="rwkv6".
What they also have, a norm of the embeddings (`ln0`), is not here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import GPTConfig
from config.check import check_fields, check_range
from mixers.mixer import Mixer
from mixers.rwkv7 import LowRank
from ops import fla
from ops.positions import Positions
from ops.recurrence import recurrence
from ops.shift import shift


@dataclass(kw_only=True)
class RWKV6Options:
    """Inner widths of its small two-matrix maps, as in the paper's models of up to 3 B; those of 7 B have twice as much."""

    mix_rank: int = 32
    """of what the data add to each of the five mixes with the input before"""
    decay_rank: int = 64
    """of the decay"""

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "mix_rank", above=0)
        check_range(self, "decay_rank", above=0)


class RWKV6(Mixer):
    """Its state is h (B, H, D, D) in float32 and the last input. H is n_head; n_kv_head means nothing here. The vectors start as in the
    paper's code, by channel and depth."""

    Options = RWKV6Options
    backend = fla.backend

    def __init__(self, cfg: GPTConfig, options: RWKV6Options):
        super().__init__()
        C = cfg.n_embd
        self.cfg, self.options, self.H, self.D = cfg, options, cfg.n_head, cfg.head_dim or C // cfg.n_head
        A = self.A = self.H * self.D
        self.mix = nn.Parameter(torch.empty(6 * C))                  # shares of the shifted input: for the mixes, for w, k, v, r, g
        self.mix_in = nn.Linear(C, 5 * options.mix_rank, bias=False)
        self.mix_in.parts = [options.mix_rank] * 5   # type: ignore[assignment] # as many matrices to Muon
        self.mix_up = nn.ModuleList(nn.Linear(options.mix_rank, C, bias=False) for _ in "wkvrg")
        self.k, self.v, self.r, self.gate = (nn.Linear(C, A, bias=cfg.bias) for _ in "kvrg")
        self.decay, self.decay_bias = LowRank(C, options.decay_rank, A, torch.tanh), nn.Parameter(torch.empty(A))
        self.bonus = nn.Parameter(torch.empty(A))                    # u: what a token's own value counts in place of a decay
        self.norm = nn.GroupNorm(self.H, A, eps=64e-5)
        self.out = nn.Linear(A, C, bias=cfg.bias)
        self.place(0, [])

    @torch.no_grad()
    def place(self, layer: int, before: list[Mixer]) -> None:
        L, C, A = self.cfg.n_layer, self.cfg.n_embd, self.A
        depth, rest, c, i = layer / max(1, L - 1), 1 - layer / L, torch.arange(C) / C, torch.arange(A)
        one, half = 1 - c**rest, 1 - c ** (rest / 2)
        self.mix.copy_(torch.cat([one, one, one, one - 0.3 * depth, half, half]))
        self.decay_bias.copy_(-6 + 5 * (i / max(1, A - 1)) ** (0.7 + 1.3 * depth))
        self.bonus.copy_(depth * (1 - i / max(1, A - 1)) + 0.1 * ((i + 1) % 3 - 1))

    def forward(self, x: Tensor, at: Positions, state: dict[str, Tensor] | None = None) -> Tensor:
        (x, before), tail = shift(x, 1, at, None if state is None else state["shift"])
        change = before - x
        own, *mixes = self.mix.view(6, -1)
        added = self.mix_in(x + change * own).tanh().chunk(5, -1)
        x_w, x_k, x_v, x_r, x_g = (x + change * (mu + up(m)) for mu, up, m in zip(mixes, self.mix_up, added))
        log_w = -(self.decay(x_w).float() + self.decay_bias.float()).clamp(max=8).exp()               # exp(-exp(8)) is 0 already
        r, k, v, log_w = (t.unflatten(-1, (self.H, self.D)).transpose(1, 2) for t in (self.r(x_r), self.k(x_k), self.v(x_v), log_w))
        y, h = recurrence(r, k, v, log_w, at, self.bonus.view(self.H, self.D), None if state is None else state["h"])
        if state is not None:
            state["shift"].copy_(tail)
            state["h"].copy_(h)
        y = F.group_norm(y.transpose(1, 2).reshape(-1, self.A), self.H, self.norm.weight.float(), self.norm.bias.float(), self.norm.eps)
        return self.out(y.view(*x.shape[:2], self.A).type_as(x) * F.silu(self.gate(x_g)))

    def init_state(self, B: int, max_len: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        return {"shift": torch.zeros(B, 1, self.cfg.n_embd, dtype=dtype, device=device),
                "h": torch.zeros(B, self.H, self.D, self.D, device=device)}

    def flops(self, T: int) -> float:
        """Of the recurrence: a token's write into the state and its read of it."""
        return 4 * self.H * self.D**2
