"""Attention to compressed blocks, the choice of blocks by it, and attention to the chosen ones: the two branches of Native Sparse
Attention (Yuan et al. 2025, arXiv 2502.11089) beside its window. Work and memory, forward and backward, go with what is attended.

r = H / G query heads share a key/value head, and with it the chosen blocks. A block is so many positions of a document, counted
from its start. Keys are handed over so that each document lies in one piece: its position u at index start + u.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SCORES = 1 << 21   # scores held at once: 8 MB in float32
PAIRS = 1 << 17    # (query, block) pairs whose partial outputs are held at once: 128 MB where r D = 256
TILE = 64          # pairs of one block that are multiplied together


class Sizes(NamedTuple):
    """Row i stands for positions [i stride, i stride + compress); block j is positions [j select, (j + 1) select)."""

    compress: int
    stride: int
    select: int
    blocks: int   # how many a query reads

    def rows(self, n):
        """How many rows are complete after n tokens, a number or a tensor."""
        done = (n - self.compress) // self.stride + 1
        return done.clamp(min=0) if isinstance(done, Tensor) else max(0, done)


def exact(t: Tensor) -> Tensor:
    """Scores and their statistics are never in half precision."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def grouped(q: Tensor, G: int) -> Tensor:
    """(B, H, T, D) -> (B, G, T, r, D), scaled."""
    return (q.unflatten(1, (G, -1)).transpose(2, 3) * q.shape[3] ** -0.5).contiguous()


# the rows, and the choice

@torch.compiler.disable     # how much there is to do depends on the data
def compressed(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, first: Tensor | None, sizes: Sizes, past: int) -> tuple[Tensor, Tensor]:
    """q (B, H, T, D) over complete rows k, v (B, G, N, D) -> (B, H, T, D), 0 where there are none, and blocks (B, G, T, n) int64.

    `first` (B, T): the index of row 0 of each query's document (None: 0). `past`: a bound on the tokens before the T.

    The blocks are those with the largest importance: the weights of the rows, summed over the r heads, each row giving to a
    block in proportion to the positions they share (the paper's sum, where the block is a multiple of the stride). Always among
    them: the first block, the query's own and the one before it. Importances are compared in float32 to 12 significant bits,
    and of equals the later block wins: what only rounding sets apart is (but for a value at the edge of two) chosen alike, whole or
    token by token. Fewer than n: the rest is -1. The choice has no gradient; the rows learn from their own output.
    """
    q, k, v = exact(q), exact(k), exact(v)
    with torch.autocast(q.device.type, enabled=False):
        y, blocks = Compressed.apply(grouped(q, k.shape[1]), k, v, pos, first, sizes, past)
    return y.transpose(2, 3).flatten(1, 2), blocks


class Compressed(torch.autograd.Function):
    """Softmax over the rows for queries (B, G, T, r, D), a chunk of them at a time; backward makes the weights again."""

    @staticmethod
    def chunks(q: Tensor, k: Tensor, first: Tensor | None, count: Tensor, sizes: Sizes, past: int) -> Iterator[tuple]:
        """Which queries, how many rows they can reach, the queries (B G, c r, D) and their weights (B G, c r, n); uniform where
        no row is complete."""
        (B, G, T, r, _), N = q.shape, k.shape[2]
        c = max(16, SCORES // (B * G * r * N))
        for a in range(0, T, c):
            t = slice(a, min(a + c, T))
            n = min(N, max(1, sizes.rows(past) - (-t.stop // sizes.stride)))
            qc, upto = q[:, :, t].flatten(2, 3).flatten(0, 1), count[:, t, None]            # (B, c, 1)
            w = qc @ k[:, :, :n].flatten(0, 1).mT
            all_see = int(upto.min()) if first is None else 0                               # so many rows: no mask on those
            i = torch.arange(all_see, n, device=q.device) - (0 if first is None else first[:, t, None])
            hidden = ((i < 0) | (i >= upto)) & (upto > 0)                                   # (B, c, n - all_see)
            w.view(B, G, -1, r, n)[..., all_see:].masked_fill_(hidden[:, None, :, None], -torch.inf)
            yield t, n, qc, w.softmax(-1)

    @staticmethod
    def forward(ctx, q, k, v, pos, first, sizes, past):
        B, G, T, r, _ = q.shape
        count = sizes.rows(pos + 1)                                                         # (B, T)
        y, blocks = q.new_empty(*q.shape[:4], v.shape[3]), pos.new_full((B, G, T, sizes.blocks), -1)
        for t, n, _, w in Compressed.chunks(q, k, first, count, sizes, past):
            y[:, :, t] = (w @ v[:, :, :n].flatten(0, 1)).view(y[:, :, t].shape)
            found = choose(w.view(B, G, -1, r, n).sum(3), None if first is None else first[:, t], count[:, t], pos[:, t], sizes,
                           -(-(past + t.stop) // sizes.select))
            blocks[:, :, t, :found.shape[3]] = found
        empty = (count == 0)[:, None, :, None, None]
        ctx.save_for_backward(q, k, v, first, count, y.masked_fill_(empty, 0), empty)
        ctx.sizes, ctx.past = sizes, past
        ctx.mark_non_differentiable(blocks)
        return y, blocks

    @staticmethod
    def backward(ctx, dy, _):
        q, k, v, first, count, y, empty = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k).flatten(0, 1), torch.zeros_like(v).flatten(0, 1)
        dy = dy.masked_fill(empty, 0).contiguous()
        delta = (dy * y).sum(-1, keepdim=True)                                              # (B, G, T, r, 1)
        with torch.autocast(q.device.type, enabled=False):
            for t, n, qc, w in Compressed.chunks(q, k, first, count, ctx.sizes, ctx.past):
                dyc, delta_c = (g[:, :, t].flatten(2, 3).flatten(0, 1) for g in (dy, delta))
                dv[:, :n].baddbmm_(w.mT, dyc)
                ds = (dyc @ v[:, :, :n].flatten(0, 1).mT).sub_(delta_c).mul_(w)
                dk[:, :n].baddbmm_(ds.mT, qc)
                dq[:, :, t] = (ds @ k[:, :, :n].flatten(0, 1)).view(dq[:, :, t].shape)
        return dq, dk.view_as(k), dv.view_as(v), None, None, None, None


def overlap(sizes: Sizes, device: torch.device) -> tuple[int, int, Tensor]:
    """Rows before the first that reach into a group of blocks, rows that a group is long, and how many positions, in strides, the
    rows from there on share with the blocks of a group (rows, blocks). The same for every group: each begins with a row."""
    reach = -(-sizes.compress // sizes.stride) - 1
    g = sizes.stride // math.gcd(sizes.select, sizes.stride)
    g *= -(-32 * sizes.stride // (g * sizes.select))                                        # at least 32 rows, for the product's sake
    step = g * sizes.select // sizes.stride
    i = (torch.arange(step + reach, device=device)[:, None] - reach) * sizes.stride
    j = torch.arange(g, device=device) * sizes.select
    shared = torch.minimum(i + sizes.compress, j + sizes.select) - torch.maximum(i, j)
    return reach, step, shared.clamp(min=0).float() / sizes.stride


def choose(w: Tensor, first: Tensor | None, count: Tensor, pos: Tensor, sizes: Sizes, N: int) -> Tensor:
    """Weights (B, G, c, n) of rows, summed over heads -> (B, G, c, blocks or less): the chosen of N blocks; see `compressed`."""
    j, own = torch.arange(N, device=w.device), (pos // sizes.select)[:, None, :, None]      # a padding's own block is -1
    if sizes.blocks >= N:
        return torch.where(j <= own, j, -1).expand(-1, w.shape[1], -1, -1)
    w, i = w.float(), torch.arange(w.shape[3], device=w.device)
    if first is not None:                                                                   # row 0 of the document comes first
        w = w.gather(3, (i + first[..., None]).clamp(max=w.shape[3] - 1)[:, None].expand_as(w))
    w = w.masked_fill(i >= count[:, None, :, None], 0)
    reach, step, shared = overlap(sizes, w.device)
    groups = -(-N // shared.shape[1])
    w = F.pad(w, (reach, groups * step - w.shape[3])).unfold(3, len(shared), step)          # (B, G, c, groups, rows)
    importance = (w.reshape(-1, len(shared)) @ shared).view(*w.shape[:3], -1)[..., :N]
    bits = importance.contiguous().view(torch.int32) >> 12                                  # as ordered as the numbers: none is below 0
    bits = bits.masked_fill((j == 0) | (j >= own - 1), 1 << 20).long()
    key = ((bits << 32) + j).masked_fill(j > own, -1).topk(sizes.blocks, sorted=False).values
    return torch.where(key < 0, -1, key & 0xFFFFFFFF)


# the chosen blocks

@torch.compiler.disable
def selected(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, pos: Tensor, start: Tensor, size: int) -> Tensor:
    """q (B, H, T, D) over what they see of their `blocks` (B, G, T, n) of `size` positions, -1 is none -> (B, H, T, D), 0 where all are.
    k, v (B, G, S, D); start (B, T): the index of position 0 of each query's document.

    Gathering its keys for every query would move n * size of them for r queries. So it is the queries that are gathered: the pairs
    (query, block) are sorted by block and cut into tiles of up to TILE queries and one block, for one batched product; then the
    partial softmaxes of each query are merged by their maxima.
    """
    B, G, T, _ = blocks.shape
    S, q = k.shape[2], exact(q)
    base = torch.arange(B * G, device=q.device).view(B, G, 1) * S + start[:, None]          # (B, G, T): position 0 among all keys
    key = torch.where(blocks < 0, -1, base[..., None] + blocks * size)                      # (B, G, T, n): a block's first key
    with torch.autocast(q.device.type, enabled=False):
        k, v, last = k.reshape(B * G * S, -1), v.reshape(B * G * S, -1), (base + pos[:, None]).flatten()
        y = Selected.apply(grouped(q, G).flatten(0, 2), k, v, key.flatten(0, 2), last, size)
    return y.view(B, G, T, -1, y.shape[-1]).transpose(2, 3).flatten(1, 2)


class Tiles(NamedTuple):
    """m queries and a block each. The last tile is of no query: there the pairs point that have no block."""

    query: Tensor   # (tiles, m): which; one past the last where there is none
    block: Tensor   # (tiles,)
    place: Tensor   # (Q, n): where in the tiles each pair is


def tiled(key: Tensor, block: Tensor, offset: int, none: int) -> Tiles:
    """key, block (Q, n) of the pairs of the queries from offset on. Within a block queries keep their order, so that a later one
    changes nothing for those before it."""
    n, (held, order) = key.shape[1], block.flatten().sort(stable=True)
    skip = int((key < 0).sum())                                                             # those without a block come first
    held, order = held[skip:], order[skip:]
    which, inverse, counts = held.unique_consecutive(return_inverse=True, return_counts=True)
    m = min(TILE, int(counts.max())) if len(counts) else 1
    tiles = -(-counts // m)
    at = torch.arange(len(held), device=key.device) + (tiles.cumsum(0) * m - tiles * m - counts.cumsum(0) + counts)[inverse]
    which = F.pad(which.repeat_interleave(tiles), (0, 1))
    query = at.new_full((len(which) * m,), none).index_copy(0, at, order // n + offset)
    place = torch.full_like(key, len(which) * m - 1).view(-1).index_copy(0, order, at)
    return Tiles(query.view(-1, m), which, place.view_as(key))


class Selected(torch.autograd.Function):
    """q (Q, r, D) scaled, k and v (K, D), key (Q, n): the first of each block's keys, last (Q,): the last that a query sees."""

    @staticmethod
    def forward(ctx, q, k, v, key, last, size):
        (Q, r, _), V, least = q.shape, v.shape[1], torch.finfo(q.dtype)
        begin, block = key.unique(return_inverse=True)                                      # the blocks in use, and that of each pair
        keys = begin[:, None] + torch.arange(size, device=k.device)                         # (blocks, size)
        given, y, lse = (q, k, v, key, block, keys, last), q.new_empty(Q, r, V), q.new_empty(Q, r)
        q, k, v, last = Selected.ready(q, k, v, keys, last)
        for c, tiles in Selected.chunks(key, block):
            top, total, out = (q.new_empty(tiles.query.numel() * r, *s) for s in ((), (), (V,)))
            for t, at, _, s in Selected.scores(tiles, q, k, keys, last):
                most = torch.amax(s, -1, out=top[at].view(s.shape[:2]))
                p = s.sub_(most[..., None]).exp_()
                torch.sum(p, -1, out=total[at].view(s.shape[:2]))
                torch.bmm(p, v[tiles.block[t]], out=out[at].view(*s.shape[:2], V))
            peak = top.view(-1, r)[tiles.place].masked_fill_(key[c, :, None] < 0, -torch.inf)      # (c, n, r)
            most = peak.amax(1, keepdim=True).clamp(min=least.min)
            w = peak.sub_(most).exp_()
            sums = (total.view(-1, r)[tiles.place] * w).sum(1, keepdim=True).clamp(min=least.tiny)
            index = tiles.place[:, None] * r + torch.arange(r, device=q.device)[:, None]           # (c, r, n)
            y[c] = F.embedding_bag(index.flatten(0, 1), out, mode="sum", per_sample_weights=(w / sums).mT.flatten(0, 1)).view(-1, r, V)
            lse[c] = (most + sums.log())[:, 0]
        ctx.save_for_backward(*given, y, lse)
        return y

    @staticmethod
    def backward(ctx, dy):
        q, k, v, key, block, keys, last, y, lse = ctx.saved_tensors
        given, inside, dq, r = (k, v), keys.clamp(0, len(k) - 1), torch.empty_like(q), q.shape[1]
        q, k, v, last = Selected.ready(q, k, v, keys, last)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        dy, delta, lse = one_more(dy, 0), one_more((dy * y).sum(-1), 0), one_more(lse, torch.inf)
        with torch.autocast(q.device.type, enabled=False):
            for c, tiles in Selected.chunks(key, block):
                out = q.new_empty(tiles.query.numel(), q[0].numel())
                for t, at, qt, s in Selected.scores(tiles, q, k, keys, last):
                    query, b = tiles.query[t], tiles.block[t]
                    p = s.sub_(lse[query].view(*s.shape[:2], 1)).exp_()
                    dyt = dy.index_select(0, query.flatten()).view(*s.shape[:2], -1)
                    dv.index_add_(0, b, p.mT @ dyt)
                    ds = (dyt @ v[b].mT).sub_(delta[query].view(*s.shape[:2], 1)).mul_(p)
                    dk.index_add_(0, b, ds.mT @ qt)
                    torch.bmm(ds, k[b], out=out[at.start // r:at.stop // r].view(*s.shape[:2], -1))
                held = (key[c] >= 0).to(q.dtype)
                dq[c] = F.embedding_bag(tiles.place, out, mode="sum", per_sample_weights=held).view(-1, *q.shape[1:])
        dk, dv = (d.new_zeros(t.shape).index_add_(0, inside.flatten(), d.flatten(0, 1)).to(t.dtype) for t, d in zip(given, (dk, dv)))
        return dq, dk, dv, None, None, None

    @staticmethod
    def ready(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The keys and values by block, and one query more, for the tiles' empty places, that sees everything."""
        inside = keys.clamp(0, len(k) - 1)
        return one_more(q, 0), exact(k[inside]), exact(v[inside]), one_more(last, keys.numel() + len(k))

    @staticmethod
    def chunks(key: Tensor, block: Tensor) -> Iterator[tuple[slice, Tiles]]:
        Q, c = len(key), max(1, PAIRS // key.shape[1])
        for i in range(0, Q, c):
            yield slice(i, i + c), tiled(key[i:i + c], block[i:i + c], i, Q)

    @staticmethod
    def scores(tiles: Tiles, q: Tensor, k: Tensor, keys: Tensor, last: Tensor) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Some tiles at a time: which, the rows of their m r queries' heads, the queries (tiles, m r, D), the scores (tiles, m r, size)."""
        (N, m), r, size = tiles.query.shape, q.shape[1], keys.shape[1]
        step = max(1, SCORES // (m * r * size))
        for i in range(0, N, step):
            t = slice(i, min(i + step, N))
            query, b = tiles.query[t], tiles.block[t]
            qt = q.index_select(0, query.flatten()).view(len(b), m * r, -1)
            s = qt @ k[b].mT
            cut = (keys[b, -1] > last[query].amin(1)).nonzero()[:, 0]                        # tiles of which some see only a part
            later = keys[b[cut], None, None] > last[query[cut]][..., None, None]            # (tiles, m, 1, size)
            s[cut] = s[cut].view(-1, m, r, size).masked_fill_(later, -torch.inf).view(-1, m * r, size)
            yield t, slice(i * m * r, t.stop * m * r), qt, s


def one_more(t: Tensor, value: float) -> Tensor:
    """(Q, ...) -> (Q + 1, ...): what stands for no query."""
    return torch.cat([t, t.new_full((1, *t.shape[1:]), value)])
