"""Linformer's idea (Wang et al. 2020, arXiv 2006.04768), made causal by segments: a learned projection along time reduces what came
before to a few rows of keys and values. Linformer itself projects all positions, later ones too, so that no mask makes it causal
(ops/linformer.py has it as a function); here each finished segment is projected by itself, as in Long-Short Transformers (Zhu et al.
2021, arXiv 2107.02192), and the running one is read as it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import GPTConfig
from config.check import check_range
from mixers.attention import Attention, AttentionOptions, RotaryOptions
from ops.positions import Positions
from ops.units import all_rows, attend_units, behind, block_of, of_length, own, taken


@dataclass(kw_only=True)
class LowRankOptions(RotaryOptions):
    segment: int = 128
    """tokens of a segment, counted from the document's start"""
    rank: int = 16
    """rows of keys and values that a finished segment is reduced to"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "segment", least=1)
        check_range(self, "rank", least=1, most=self.segment)


class LowRank(Attention):
    """One softmax over the rows of the document's finished segments and the tokens of the query's own, up to itself:

        K_m = E k[m c : (m + 1) c]        V_m = F v[m c : (m + 1) c]        c = segment; E, F (rank, c), for each key/value head its own

    Keys are rotated before they are projected. E and F start as means of c / rank neighbours; with rank = segment that is the
    identity, and the whole is full attention. Cost: T (c + rank T / c). State: rank rows a finished segment, and the last c - 1 tokens.
    """

    Options = LowRankOptions  # type: ignore[assignment]

    def __init__(self, cfg: GPTConfig, options: LowRankOptions):
        super().__init__(cfg, AttentionOptions(window=0, sinks=0, **options.of(RotaryOptions)))
        if cfg.position == "alibi" or cfg.attn_softcap:
            raise ValueError("layers: lowrank has no ALiBi and no attn_softcap; leave them off")
        self.segment, self.rank = options.segment, options.rank
        means = F.adaptive_avg_pool1d(torch.eye(self.segment), self.rank).mT                 # (rank, segment), rows of sum 1
        self.project_k, self.project_v = (nn.Parameter(means.repeat(self.G, 1, 1)) for _ in "kv")

    def forward(self, x: Tensor, at: Positions, state: dict[str, Tensor] | None = None) -> Tensor:
        (B, T, _), c, past = x.shape, self.segment, 0
        q, k, v = self.heads(x, at)
        u = at.once(("segments", c), lambda: of_length(at, c))
        tokens, (N, old) = [k, v], (u.end.shape[1], None if state is None else [state["row_k"], state["row_v"]])
        if state is not None:
            lined, ring = behind(at, [state["k"], state["v"]], tokens)
            tokens, past = (tokens, 0) if at.plain else (lined, ring)
        if at.plain:
            parts = [t[:, :, :N * c].unflatten(2, (N, c)) for t in tokens]                  # (B, G, N, c, D)
        else:
            index = at.once(("in segments", c), lambda: past + u.end[..., None] + torch.arange(1 - c, 1, device=x.device))
            parts = [taken(t, index) for t in tokens]
        made = [(E[:, None] @ t.to(E.dtype)).type_as(v).flatten(2, 3) for E, t in zip((self.project_k, self.project_v), parts)]
        rows, seen = all_rows(at, u, old, made, c, self.rank)
        block = block_of(T, c, rows[0].shape[2])
        y = attend_units(q, [(tokens[0], tokens[1]), (rows[0], rows[1])], [own(at, u, c, block, past, at.plain), seen], at,
                         ("lowrank", c, self.rank), block, self.cfg.attn_dropout if self.training else 0.0)
        return self.out(y.transpose(1, 2).reshape(B, T, self.H * self.D))

    def init_state(self, B: int, max_len: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """One slot more each, for what need not be kept."""
        lengths = {"": max(1, self.segment - 1), "row_": max_len // self.segment * self.rank}
        return {name + kv: torch.zeros(B, self.G, n + 1, self.D, dtype=dtype, device=device) for name, n in lengths.items() for kv in "kv"}

    def endless(self, max_len: int) -> bool:
        return False

    def cuts(self) -> bool:
        return False

    def flops(self, T: int) -> float:
        """What is attended to, and the rows, to each of which a token gives once."""
        keys = min(T, self.segment) + T // self.segment * self.rank
        return 4 * self.H * self.D * keys + 4 * self.G * self.D * self.rank

    def backend(self, device: str, dtype: torch.dtype, training: bool) -> str:
        return "sdpa"
