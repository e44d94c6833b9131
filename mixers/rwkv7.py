"""RWKV-7 "Goose" (Peng et al. 2025, arXiv 2503.14456), its time mix: a state of D x D numbers a head that decays by channel, and from
which each token takes out some of what its key had stored before it writes its value. Order is in the decay and the token shift; its
models have position="none", norm="layernorm" and mlp="rwkv7". What they also have, a norm of the embeddings (`ln0`), is not here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import GPTConfig
from config.check import check_fields, check_range
from mixers.mixer import Mixer
from ops import fla
from ops.positions import Positions
from ops.rwkv7 import rwkv7
from ops.shift import shift


@dataclass(kw_only=True)
class RWKV7Options:
    """Inner widths of its small two-matrix maps. None: as the paper's models have them, a multiple of 32 that grows with the width."""

    decay_rank: int | None = None
    """of the decay (64 at 768 channels)"""
    rate_rank: int | None = None
    """of the rate at which the state unlearns (64)"""
    value_rank: int | None = None
    """of the mix with the first layer's values (32)"""
    gate_rank: int | None = None
    """of the output gate (128)"""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("decay_rank", "rate_rank", "value_rank", "gate_rank"):
            check_range(self, name, above=0)


class LowRank(nn.Module):
    """x (..., C) -> two matrices with a nonlinearity between (..., A)."""

    def __init__(self, C: int, rank: int, A: int, act: Callable[[Tensor], Tensor] = lambda x: x):
        super().__init__()
        self.narrow, self.wide, self.act = nn.Linear(C, rank, bias=False), nn.Linear(rank, A, bias=False), act

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.act(self.narrow(x)))


class RWKV7(Mixer):
    """Its state is h (B, H, D, D) in float32 and the last input. H is n_head; n_kv_head means nothing here.

    The values of the first layer of this kind, whatever others stand before and between, are mixed into those of all later ones: they
    are handed on by `at.memo`, which lives as long as the call. The vectors start as in the paper's code, by channel and depth.
    """

    Options = RWKV7Options
    backend = fla.backend

    def __init__(self, cfg: GPTConfig, options: RWKV7Options):
        super().__init__()
        C = cfg.n_embd
        self.cfg, self.options, self.H, self.D = cfg, options, cfg.n_head, cfg.head_dim or C // cfg.n_head
        A = self.A = self.H * self.D
        rank = lambda given, scale, power=0.5: given or max(32, round(scale * C**power / 32) * 32)
        self.value_rank, self.first = rank(options.value_rank, 1.3), True
        self.mix = nn.Parameter(torch.empty(6 * C))                   # how much of the shifted input is in that of r, w, k, v, a, g
        self.r, self.k, self.v = (nn.Linear(C, A, bias=cfg.bias) for _ in "rkv")
        self.decay = LowRank(C, rank(options.decay_rank, 1.8), A, torch.tanh)
        self.rate = LowRank(C, rank(options.rate_rank, 1.8), A)
        self.gate = LowRank(C, rank(options.gate_rank, 0.6, 0.8), A, torch.sigmoid)
        self.decay_bias, self.rate_bias = nn.Parameter(torch.empty(A)), nn.Parameter(torch.zeros(A))
        self.unlearn = nn.Parameter(torch.full((A,), 0.85))           # xi: which channels of a key are taken out
        self.damp = nn.Parameter(torch.ones(A))                       # how much the rate counts in what is written
        self.bonus = nn.Parameter(torch.zeros(A))                     # what a token's own value counts
        self.norm = nn.GroupNorm(self.H, A, eps=64e-5)
        self.out = nn.Linear(A, C, bias=cfg.bias)
        self.start(0)

    @torch.no_grad()
    def start(self, layer: int) -> None:
        L, C, A = self.cfg.n_layer, self.cfg.n_embd, self.A
        depth, rest, c = layer / max(1, L - 1), 1 - layer / L, torch.arange(C) / C
        r, w, k, v, a, g = (1 - c ** (power * rest) for power in (0.2, 0.9, 0.9, 0.4, 0.9, 0.2))
        self.mix.copy_(torch.cat([r, w, k - 0.4 * depth, v - 0.6 * depth, a, g]))
        self.decay_bias.copy_(-6.5 + 5 * (torch.arange(A) / max(1, A - 1)) ** (0.85 + depth**0.5))

    def place(self, layer: int, before: list[Mixer]) -> None:
        self.start(layer)
        self.first = not any(isinstance(m, RWKV7) for m in before)
        if not self.first:
            self.value, self.value_bias = LowRank(self.cfg.n_embd, self.value_rank, self.A), nn.Parameter(torch.ones(self.A))

    # The loop over chunks would be unrolled. As a break in the middle of a graph it made torch 2.13 crash now and then: views of what the
    # graph had computed, handed over the break, had sizes that were garbage (AOT autograd's replay of aliases, under dynamic shapes).
    @torch.compiler.disable
    def forward(self, x: Tensor, at: Positions, state: dict[str, Tensor] | None = None) -> Tensor:
        (x, before), tail = shift(x, 1, at, None if state is None else state["shift"])
        x_r, x_w, x_k, x_v, x_a, x_g = (x + (before - x) * mu for mu in self.mix.view(6, -1))
        r, k, v = self.r(x_r), self.k(x_k), self.v(x_v)
        if self.first:
            at.memo["rwkv7 values"] = v
        else:
            v = v + (at.memo["rwkv7 values"] - v) * (self.value(x_v) + self.value_bias).sigmoid()
        log_w = -math.exp(-0.5) * (self.decay(x_w).float() + self.decay_bias.float()).sigmoid()
        rate = (self.rate(x_a).float() + self.rate_bias.float()).sigmoid()
        r, k, v = r.float(), k.float(), v.float()
        kappa = F.normalize((k * self.unlearn.float()).unflatten(-1, (self.H, self.D)), dim=-1).flatten(-2)
        k = k * (1 + (rate - 1) * self.damp.float())
        bonus = (r * k * self.bonus.float()).unflatten(-1, (self.H, self.D)).sum(-1, keepdim=True) * v.unflatten(-1, (self.H, self.D))
        heads = [t.unflatten(-1, (self.H, self.D)).transpose(1, 2) for t in (r, log_w, k, v, -kappa, kappa * rate)]
        y, h = rwkv7(*heads, at, None if state is None else state["h"])  # type: ignore[call-arg,arg-type]
        if state is not None:
            state["shift"].copy_(tail)
            state["h"].copy_(h)
        y = F.group_norm(y.transpose(1, 2).reshape(-1, self.A), self.H, self.norm.weight.float(), self.norm.bias.float(), self.norm.eps)
        y = y.view_as(v) + bonus.flatten(-2)
        return self.out(y.type_as(x) * self.gate(x_g))

    def init_state(self, B: int, max_len: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        return {"shift": torch.zeros(B, 1, self.cfg.n_embd, dtype=dtype, device=device),
                "h": torch.zeros(B, self.H, self.D, self.D, device=device)}

    def flops(self, T: int) -> float:
        """Of the recurrence: four products with the state, for what a reads, what b and k write, and what r reads."""
        return 8 * self.H * self.D**2
