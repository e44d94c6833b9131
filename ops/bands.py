"""Softmax attention of blocks of queries, each to the few blocks of keys before it: a window, on a CPU, in float32 or float64."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

SCORES = 1 << 21   # scores held at once: 8 MB in float32


def bands(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, front: int) -> Tensor:
    """q (B, H, N L, D), scaled; k, v (B, G, front + (N + m - 1) L, D): the keys that every block of queries may see, then blocks of
    which the i-th block of queries may see m, from the i-th on. mask (B or 1, N, L, front + m L): what it sees, one key at least.

    The r query heads of a key/value head are multiplied with it at once. Only a few blocks' scores exist at a time; backward makes
    them again. `python -m bench.mixers` has a window's time beside full attention's.
    """
    (B, H, T, D), (_, N, L, _), G = q.shape, mask.shape, k.shape[1]
    q = q.view(B, G, H // G, N, L, D).transpose(2, 3).reshape(B, G, N, -1, D)
    y = Bands.apply(q, k, v, ~mask[:, None, :, None], front)
    return y.view(B, G, N, -1, L, v.shape[-1]).transpose(2, 3).reshape(B, H, T, -1)


class Bands(torch.autograd.Function):
    """q (B, G, N, r L, D); hidden (B or 1, 1, N, 1, L, n)."""

    @staticmethod
    def chunks(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, front: int) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor]]:
        """Some blocks of queries at a time, with their keys, values and weights (B, G, c, r L, n)."""
        (B, G, N, rows, _), (L, n) = q.shape, hidden.shape[4:]
        c = max(1, SCORES // (B * G * rows * n))

        def near(t: Tensor, s: slice) -> Tensor:
            band = t[:, :, front:].unfold(2, n - front, L)[:, :, s].mT                     # (B, G, c, m L, D)
            return torch.cat([t[:, :, None, :front].expand(-1, -1, band.shape[2], -1, -1), band], 3) if front else band.contiguous()

        for a in range(0, N, c):
            s = slice(a, min(a + c, N))
            qc, kc = q[:, :, s], near(k, s)
            w = qc @ kc.mT
            w.view(B, G, -1, rows // L, L, n).masked_fill_(hidden[:, :, s], -torch.inf)
            yield s, qc, kc, near(v, s), w.softmax(-1)

    @staticmethod
    def forward(ctx, q, k, v, hidden, front):
        y = q.new_empty(*q.shape[:4], v.shape[3])
        for s, _, _, vc, w in Bands.chunks(q, k, v, hidden, front):
            y[:, :, s] = w @ vc
        ctx.save_for_backward(q, k, v, hidden, y)
        ctx.front = front
        return y

    @staticmethod
    def backward(ctx, dy):
        q, k, v, hidden, y = ctx.saved_tensors
        (L, n), f = hidden.shape[4:], ctx.front
        dq, dk, dv, delta = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v), (dy * y).sum(-1, keepdim=True)

        def add(total: Tensor, part: Tensor, s: slice) -> None:
            """part (B, G, c, n, D): block by block, because bands overlap."""
            total[:, :, :f] += part[:, :, :, :f].sum(2)
            for i in range(f, n, L):
                total[:, :, s.start * L + i:s.stop * L + i] += part[:, :, :, i:i + L].flatten(2, 3)

        for s, qc, kc, vc, w in Bands.chunks(q, k, v, hidden, f):
            dyc = dy[:, :, s]
            add(dv, w.mT @ dyc, s)
            ds = (dyc @ vc.mT).sub_(delta[:, :, s]).mul_(w)
            add(dk, ds.mT @ qc, s)
            dq[:, :, s] = ds @ kc
        return dq, dk, dv, None, None
