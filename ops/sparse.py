"""Attention along a pattern (ops/patterns.py), in time and memory that grow with the keys seen.

Queries are cut into blocks, the keys that a block can see are gathered, and a mask says which query sees which of them. The
terms of a union are gathered apart, because what is near for one (a window) is far for another (every 64th key); they share
one softmax, for which exponentials and their sums are simply added up.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ops.attend import How, attend, choose
from ops.patterns import Alternate, Columns, Pattern, RandomBlock
from ops.positions import Keys, Positions

BLOCK = 32    # queries a block, at least: fewer make products too small for what surrounds them
ROWS = 256    # queries at once where masks are dense


def sparse(q: Tensor, k: Tensor, v: Tensor, at: Positions, pattern: Pattern, *, keys: Keys | None = None, backend: str = "auto",
           slopes: Tensor | None = None, softcap: float = 0.0, sink_logit: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """ops.attend.attend, where `pattern` lets a query see a key: q (B, H, T, D), k (B, G, S, D), v (B, G, S, V) -> (B, H, T, V).

    Keys are gathered for rows of one document from 0; other rows have masks over all keys, a block of queries at a time.
    flex, where it runs, skips what is not seen in either.
    """
    T, plain = q.shape[2], at.plain and keys is None
    how = How(keep=pattern, slopes=slopes, softcap=softcap, sink_logit=sink_logit, dropout=dropout)
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    whole = backend == "reference" or choose(backend, q.device.type, q.dtype, q.shape[3], how, plain, grad) == "flex"
    if not whole and plain and pairs(pattern, T) < T * T / (4 if T <= ROWS else 2):     # else masks are faster
        return gathered(q, k, v, at, pattern, how)

    def run(q: Tensor, k: Tensor, v: Tensor, at: Positions, keys: Keys | None) -> Tensor:
        return attend(q, k, v, at, keys=keys, backend=backend, keep=pattern, slopes=slopes, softcap=softcap, sink_logit=sink_logit,
                      dropout=dropout)

    def run_part(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, doc: Tensor) -> Tensor:
        part = Positions(len(q), q.shape[2], q.device, pos)
        part.once("doc", lambda: doc)                     # counted on the whole row
        return run(q, k, v, part, keys)

    if whole or T <= ROWS:
        return run(q, k, v, at, keys)
    keys, out = keys or at.keys_new(), []
    for some in zip(*(t.split(ROWS, d) for t, d in ((q, 2), (at.pos, 1), (at.doc, 1)))):
        args = some[0], k, v, *some[1:]
        out.append(checkpoint(run_part, *args, use_reentrant=False) if grad else run_part(*args))     # no mask is kept for backward
    return torch.cat(out, 2)


class Plan(NamedTuple):
    """How a term is gathered: queries in `step` classes of equal remainder, a class in N blocks of L, and M keys for a block.

    Those are, from the block's first key on, `per` in every `period`. local(64), T = 1024: 1 class, 16 blocks of 64, 127 keys each;
    strided(16): 16 classes of one block of 64, for which every 16th key is gathered, 64 in all.
    """

    step: int
    N: int
    L: int
    M: int
    period: int
    per: int
    runs: list[Pattern]     # those that say where a block's keys begin


def plan(term: tuple[Pattern, ...], T: int) -> Plan:
    step = max(p.step for p in term)
    n = -(-T // step)
    grains, drawn = [p.grain for p in term if p.grain], [p.block for p in term if isinstance(p, RandomBlock)]
    L = min(n, max(BLOCK, min(grains, default=T) // step))
    if drawn and math.gcd(*drawn) >= step:             # a drawn block says where keys are for the queries of one block alone
        L = math.gcd(*drawn) // step
    span = (L - 1) * step + 1
    widths = [p.width(span, p.block > 0 and p.block % (L * step) == 0) for p in term]
    width = min(*widths, T)
    runs = [p for p, w in zip(term, widths) if w < math.inf] if width < T else []
    columns = next((p for p in term if isinstance(p, Columns) and step == 1), None)
    period, per = (columns.size, columns.summary) if columns else (step, 1)
    count = -(-int(width) // period) + (columns is not None and width < T)     # a run may begin within a period
    return Plan(step, -(-n // L), L, count * per, period, per, runs)


def pairs(pattern: Pattern, T: int) -> float:
    """Queries times the keys gathered for them, in a row and head: what its cost grows with."""
    if isinstance(pattern, Alternate):
        return sum(pairs(kind, T) for kind in pattern.kinds) / len(pattern.kinds)
    plans = [plan(term, T) for term in pattern.terms()]
    return sum(p.step * p.N * p.L * p.M for p in plans)


class Part(NamedTuple):
    """What is gathered for one term, for h heads, or for 1 where all are alike; N blocks of all classes."""

    plan: Plan
    queries: Tensor     # (N, L): positions, some beyond the row's end
    keys: Tensor        # (h, N, M): positions, which are indices of the row
    mask: Tensor        # (h, N, L, M) bool


def make_parts(pattern: Pattern, T: int, heads: Tensor) -> list[Part]:
    terms, parts = pattern.terms(), []
    for i, term in enumerate(terms):
        p = plan(term, T)
        queries = cut(torch.arange(p.step * p.N * p.L, device=heads.device)[:, None], p)[..., 0]
        keys = block_keys(term, p, queries[:, 0], heads[:, None])
        q, k, head = queries[:, :, None], keys[:, :, None], heads[:, None, None, None]
        mask = (k >= 0) & (k < T) & (k <= q) & all_see(term, q, k, head)
        for earlier in terms[:i]:                                      # no pair counts twice
            mask = mask & ~all_see(earlier, q, k, head)
        parts.append(Part(p, queries, keys.clamp(0, T - 1), mask))
    return parts


def all_see(term: tuple[Pattern, ...], q: Tensor, k: Tensor, head: Tensor) -> Tensor:
    return reduce(torch.logical_and, [p.see(q, k, head) for p in term])


def block_keys(term: tuple[Pattern, ...], p: Plan, low: Tensor, head: Tensor) -> Tensor:
    """low (N,), the first query of each block, and head (H, 1) -> (H or 1, N, M) positions of keys, some outside the row."""
    start = torch.zeros_like(low)
    for run in p.runs:
        start = torch.maximum(start, run.start(low, head))
    if p.step > 1:
        start = start + (low - start) % p.step
    elif p.period > 1:
        start = start // p.period * p.period + p.period - p.per
    offsets = torch.arange(p.M, device=low.device)
    return start.view(-1, len(low), 1) + offsets // p.per * p.period + offsets % p.per


def cut(t: Tensor, p: Plan) -> Tensor:
    """(..., T, D) -> (..., N, L, D): queries by blocks."""
    t = F.pad(t, (0, 0, 0, p.step * p.N * p.L - t.shape[-2]))
    return t.unflatten(-2, (-1, p.L, p.step)).transpose(-2, -3).flatten(-4, -3)


def join(t: Tensor, p: Plan, T: int) -> Tensor:
    """The inverse of `cut`."""
    return t.unflatten(-3, (-1, p.step)).transpose(-2, -3).flatten(-4, -2)[..., :T, :]


def gathered(q: Tensor, k: Tensor, v: Tensor, at: Positions, pattern: Pattern, how: How) -> Tensor:
    """Heads of a kind together; several kinds take turns."""
    kinds, T, H = pattern.kinds if isinstance(pattern, Alternate) else (pattern,), q.shape[2], q.shape[1]
    out = []
    for i, kind in enumerate(kinds):
        heads = torch.arange(i, H, len(kinds), device=q.device)
        parts = at.once(("parts", kind, i, len(kinds), H), lambda: make_parts(kind, T, heads))     # noqa: B023
        out.append(softmax_over(parts, q[:, i::len(kinds)], k, v, heads, heads * k.shape[1] // H, how))
    return torch.stack(out, 2).flatten(1, 2)


def softmax_over(parts: list[Part], q: Tensor, k: Tensor, v: Tensor, heads: Tensor, groups: Tensor, how: How) -> Tensor:
    """q (B, h, T, D), the heads' numbers and their key/value heads (h,) -> (B, h, T, V)."""
    (B, _, T, D), G = q.shape, k.shape[1]
    begin = (torch.arange(B, device=q.device)[:, None] * G + groups)[:, :, None, None] * T       # (B, h, 1, 1): of a head's keys

    def pick(t: Tensor, part: Part) -> Tensor:                                                 # (B, h, N, M, D)
        index = begin + part.keys
        return t.reshape(B * G * T, -1).index_select(0, index.flatten()).view(*index.shape, -1)

    def score(part: Part) -> Tensor:                                                           # (B, h, N, L, M) float32
        s = (cut(q * D ** -0.5, part.plan) @ pick(k, part).mT).float()
        if how.softcap:
            s = how.softcap * torch.tanh(s / how.softcap)
        if how.slopes is not None:
            distance = part.queries[:, :, None] - part.keys[:, :, None]
            s = s - how.slopes[heads][:, None, None, None] * distance
        return s.masked_fill_(~part.mask, -torch.inf)

    scores = [score(part) for part in parts]
    with torch.no_grad():
        top = torch.stack([join(s.amax(-1, keepdim=True), part.plan, T) for s, part in zip(scores, parts)]).amax(0)   # (B, h, T, 1)
        top = top.masked_fill(top == -torch.inf, 0)
        if how.sink_logit is not None:
            top = torch.maximum(top, how.sink_logit[heads][:, None, None])
    weights = [s.sub_(cut(top, part.plan)).exp_() for s, part in zip(scores, parts)]
    total = torch.stack([join(w.sum(-1, keepdim=True), part.plan, T) for w, part in zip(weights, parts)]).sum(0)
    if how.sink_logit is not None:
        total = total + (how.sink_logit[heads][:, None, None] - top).exp()
    y = torch.stack([join(F.dropout(w, how.dropout).type_as(v) @ pick(v, part), part.plan, T) for w, part in zip(weights, parts)]).sum(0)
    return (y / total.masked_fill(total == 0, 1)).type_as(q)                                   # who sees nothing has 0
