"""Attention in one softmax to the tokens of a query's own unit and to rows that stand for closed units: lowrank's segments,
hierarchical's sentences and paragraphs. Time and memory go with what is seen: no query is held against all tokens.

A unit is so many tokens of a document in a row. It closes at its last token, and what follows sees its row in the tokens' place. Who
sees what is an interval everywhere: a query's own tokens, and the rows that it sees, lie next to each other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.attend import How, fused, opened
from ops.nsa import exact
from ops.positions import Positions, lined_up, write

BLOCK = 64   # queries a block at least: below, the overhead of a block outweighs the keys that a longer one masks


# where units close

class Units(NamedTuple):
    """Of T tokens and the units that they close, N at most."""

    since: Tensor    # (B, T): tokens of its unit before each token
    number: Tensor   # (B, T): units of its document closed before each token
    closes: Tensor   # (B, T) bool: whether its unit closes with it
    before: Tensor   # (B, T): units closed by this call's tokens before it
    made: Tensor     # (B, N) bool: whether there is an Nth
    end: Tensor      # (B, N): the index of its last token


def units(since: Tensor, number: Tensor, closes: Tensor, N: int) -> Units:
    upto = closes.cumsum(1)
    t = torch.arange(since.shape[1], device=since.device)
    end = since.new_zeros(since.shape[0], N + 1).scatter(1, torch.where(closes, upto - 1, N), t.expand_as(since))[:, :N]
    made = torch.arange(N, device=since.device) < upto[:, -1:]
    return Units(since, number, closes, upto - closes.long(), made, end)


def of_length(at: Positions, length: int) -> Units:
    """Units of so many tokens each, counted from the document's start."""
    T = at.pos.shape[1]
    since, number = at.pos % length, at.pos.clamp(min=0) // length
    return units(since, number, (at.pos >= 0) & (since == length - 1), T // length if at.plain else -(-T // length))


@torch.compiler.disable     # inductor 2.13 on a CPU puts each gather of gathers into the next: minutes, and wrong numbers
def at_ends(at: Positions, ends: Tensor, shortest: int, longest: int, open: Tensor) -> Units:
    """Units that close with the first token for which `ends` (B, T) is true, from their `shortest`th token on, or with their `longest`th.
    open (B, 2): tokens in the unit that the state left open, units closed before it.

    Where a unit ends depends on where it began, and so on every one before it. Each token is asked where the next unit begins if one
    begins there, for all at once; then from the units known to begin, that step is taken 1, 2, 4, ... times: log2(T) gathers.
    """
    pos, T = at.pos, at.pos.shape[1]
    t = torch.arange(T, device=pos.device).expand_as(pos)
    goes_on = (t == at.first[:, None]) & (pos > 0)
    had, first = torch.where(goes_on, open[:, :1], 0), goes_on | (pos == 0)

    def next_at(found: Tensor) -> Tensor:                                                   # (B, T + 1): the first from here on, or T
        return F.pad(torch.where(found, t, T), (0, 1), value=T).flip(1).cummin(1).values.flip(1)

    end = next_at(ends).gather(1, torch.maximum(t, t + shortest - 1 - had).clamp(max=T))
    end = torch.minimum(end, t + longest - 1 - had)
    jump = F.pad(torch.minimum(end + 1, next_at(pos <= 0)[:, 1:]), (0, 1), value=T)         # the next document begins a unit too
    begins = F.pad(first, (0, 1))
    for _ in range(T.bit_length()):
        begins = begins | torch.zeros_like(begins).scatter(1, torch.where(begins, jump, T), True)
        jump = jump.gather(1, jump)
    start = torch.where(begins[:, :T], t, 0).cummax(1).values
    since, closes = t - start + had.gather(1, start), (pos >= 0) & (t == end.gather(1, start))
    before = closes.cumsum(1) - closes.long()
    number = before - torch.where(pos == 0, before, 0).cummax(1).values + torch.where(at.doc == 0, open[:, 1:], 0)
    return units(torch.where(pos >= 0, since, 0), number, closes, -(-T // shortest))


def latest(at: Positions, u: Units) -> Tensor:
    """(B, N): whether a unit is of the row's last document, the only one that a state remembers."""
    return u.made & (at.doc.gather(1, u.end) == at.doc.gather(1, (at.end[:, None] - 1).clamp(min=0)))


# rows

def taken(t: Tensor, index: Tensor) -> Tensor:
    """t (B, G, R, D) at index (B, N, W) -> (B, G, N, W, D). An embedding, whose gradient is quicker than gather's."""
    B, G, R, D = t.shape
    index = index.clamp(0, R - 1) + torch.arange(B, device=t.device)[:, None, None] * R
    return F.embedding(index, t.transpose(1, 2).reshape(B * R, G * D)).unflatten(-1, (G, D)).movedim(3, 1)


def pool(kv: list[Tensor], u: Tensor, size: Tensor | None = None) -> list[Tensor]:
    """k and v (B, G, N, W, D), a learned query u (G, D) -> rows (B, G, N, D): sums weighted by the softmax of u . k / sqrt(D), plus the
    log of how many tokens each of the W stands for, size (B, N, W): 0 for none, None where all stand for as many."""
    s = (exact(kv[0]) @ exact(u)[:, None, :, None])[..., 0] * u.shape[-1] ** -0.5           # (B, G, N, W)
    w = (s if size is None else s + size[:, None].to(s.dtype).log()).softmax(-1)[..., None, :].type_as(kv[1])
    return [(w @ t)[..., 0, :] for t in kv]


# attention

class Seen(NamedTuple):
    """What queries see of some keys, in order of time: query t those from lo (B, T) up to hi (B, T), without it."""

    lo: Tensor
    hi: Tensor
    width: int = 0                       # keys that a block of queries sees at most (0: any)
    aligned: bool = False                # block n's are keys n width to (n + 1) width
    size: int | Tensor = 1               # (B, R): how many tokens a key stands for; the log is added to its scores


def block_of(T: int, unit: int, rows: int) -> int:
    """Queries a block, so many units of them that the keys every block copies, its own and all `rows`, are about 5 T in all, and the
    keys it masks add at most a quarter to the time."""
    return min(T, unit * max(1, -(-max(BLOCK, rows // 4) // unit)))


def attend_units(q: Tensor, keys: list[tuple[Tensor, Tensor]], seen: list[Seen], at: Positions, name: tuple, block: int,
                 dropout: float = 0.0) -> Tensor:
    """q (B, H, T, D), keys: pairs of k and v (B, G, R, D), each with its Seen -> (B, H, T, D); a query that sees nothing gives 0.
    `name`: what is derived from `seen` is remembered under it, for the layers of a call."""
    B, T, L = q.shape[0], q.shape[2], block
    N = -(-T // L)
    fill = N * L - T

    def make() -> tuple[list[Tensor | None], Tensor, Tensor]:
        places: list[Tensor | None] = []
        masks, sizes = [], []
        for (k, _), see in zip(keys, seen):
            R = k.shape[2]
            lo, hi = (F.pad(t, (0, fill)).unflatten(1, (N, L)) for t in (see.lo, see.hi))                  # (B, N, L)
            i = torch.arange(N * see.width if see.aligned else min(see.width, R) if see.width else R, device=q.device)
            if see.width and not see.aligned:
                i = torch.where(lo < hi, lo, R).amin(-1)[..., None] + i                                    # (B, N, W)
                places.append(i)
            else:
                i = i.view(1, N if see.aligned else 1, -1).expand(B, N, -1)
                places.append(None)
            masks.append((i[:, :, None] >= lo[..., None]) & (i[:, :, None] < hi[..., None]))               # (B, N, L, W)
            size = see.size
            size = size.gather(1, i.flatten(1).clamp(max=R - 1)).view_as(i) if isinstance(size, Tensor) else torch.full_like(i, size)
            sizes.append(size.to(exact(q).dtype).clamp(min=1).log()[:, :, None])
        biased = any(isinstance(see.size, Tensor) or see.size > 1 for see in seen)
        mask = torch.cat(masks, -1).flatten(0, 1)[:, None]                                                 # (B N, 1, L, K)
        bias = torch.cat(sizes, -1).flatten(0, 1)[:, None] if biased else None
        return places, *opened(mask, bias, q.dtype)

    places, mask, empty = at.once(("units", name, q.dtype), make)

    def shown(t: Tensor, see: Seen, place: Tensor | None) -> Tensor:                                       # (B, N, G, W, D)
        if place is not None:
            return taken(t, place).transpose(1, 2)
        if not see.width:
            return t[:, None].expand(B, N, *t.shape[1:])
        return F.pad(t, (0, 0, 0, N * see.width - t.shape[2])).unflatten(2, (N, see.width)).transpose(1, 2)

    k, v = (torch.cat([shown(pair[i], see, place) for pair, see, place in zip(keys, seen, places)], 3).flatten(0, 1) for i in (0, 1))
    q = F.pad(q, (0, 0, 0, fill)).unflatten(2, (N, L)).transpose(1, 2).flatten(0, 1)                       # (B N, H, L, D)
    y = fused(q, k, v, mask, How(dropout=dropout))
    y = y.masked_fill(empty, 0) if at.given else y                                                         # only padding sees nothing
    return y.unflatten(0, (B, N)).transpose(1, 2).flatten(2, 3)[:, :, :T]


# the past

def own(at: Positions, u: Units, length: int, block: int, past: int, aligned: bool) -> Seen:
    """A query's own unit of at most `length` tokens, among the call's tokens behind `past` others. aligned: a block begins a unit."""
    T = at.pos.shape[1]
    t, real = torch.arange(past, past + T, device=at.pos.device), at.pos >= 0
    return Seen(torch.where(real, t - u.since, 0), torch.where(real, t + 1, 0), block if aligned else block + length - 1, aligned)


def behind(at: Positions, old: list[Tensor], new: list[Tensor]) -> tuple[list[Tensor], int]:
    """The last tokens that a state holds, old (B, G, slots + 1, D), right before the new (B, G, T, D), which are written to it; and how
    many they are."""
    ring = old[0].shape[2] - 1
    both = [lined_up(a, b, ring, ring, at.before, at.first) for a, b in zip(old, new)]
    write(at.once(("slot", ring, 0), lambda: at.slot(ring, 0)), *zip(old, new))
    return both, ring


def all_rows(at: Positions, u: Units, old: list[Tensor] | None, new: list[Tensor], length: int, per: int = 1) -> tuple[list[Tensor], Seen]:
    """Rows that every later query of the document sees, `per` of them a unit of at least `length` tokens: those of a state,
    old (B, G, slots + 1, D), and the new (B, G, N per, D), which are written to it."""
    if old is None:
        return new, Seen((u.before - u.number) * per, u.before * per)
    M, T = (old[0].shape[2] - 1) // per, at.pos.shape[1]
    slot = torch.where(latest(at, u), u.number.gather(1, u.end), M)[..., None] * per + torch.arange(per, device=at.pos.device)
    slot = slot.flatten(1).clamp(max=M * per)
    if T == 1 or not at.given:          # rows are never overwritten in their document: no copy
        write(slot, *zip(old, new))
        n = min(M, (at.past + T) // length) * per
        return [a[:, :, :n].type_as(b) for a, b in zip(old, new)], Seen(torch.zeros_like(u.number), u.number * per)
    n = min(M, at.past // length) * per
    had = u.number.gather(1, at.first.clamp(max=T - 1)[:, None])[:, 0] * per
    both = [lined_up(a, b, n, max(1, M * per), had, torch.zeros_like(had)) for a, b in zip(old, new)]
    write(slot, *zip(old, new))
    return both, Seen(n + (u.before - u.number) * per, n + u.before * per)
