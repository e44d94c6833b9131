"""Decay between keys and queries as channels of them: scores get sums of log gates without a bias tensor, in any backend.

With c the cumulative sum of log f, a pair's score gets c_i - c_j: the log of what the gates after j, up to and with i's, let through.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.attend import parts
from ops.positions import Keys, Positions
from ops.rope import widest

ONE = 256.0   # what a sum is multiplied by in q.k: sums up to 65,504 * 256 / sqrt(D) fit into float16


def decayed(q: Tensor, k: Tensor, f: Tensor, at: Positions, keys: Keys | None = None) -> tuple[Tensor, Tensor]:
    """q (B, H, T, D), k (B, G, S, D), log gates f (B, H, S) float32 of the keys -> q and k with E channels more, a multiple of 8, for
    scores of scale 1/sqrt(D).

    The sums are large and their differences are small, so both stand as several numbers (ops.attend.parts), and c_i's first is beside
    c_j's first, and so on: what is added up first cancels exactly. A group's key has the sums of all its r heads, of which each
    query picks its own: E is P (1 + r), rounded up; 8 for one head a key in float32 and bfloat16.
    """
    (_, H, T, D), G = q.shape, k.shape[1]
    c_q, c_k = (c * (D**0.5 / ONE) for c in sums(f, at, keys, T))
    own = parts(c_q, q.dtype)[..., None]                                                       # (B, H, T, P, 1)
    pick = torch.eye(H // G, dtype=q.dtype, device=q.device).repeat(G, 1)[:, None, None] * ONE   # (H, 1, 1, r)
    key = parts(-c_k.unflatten(1, (G, -1)), k.dtype).permute(0, 1, 3, 4, 2)                    # (B, G, S, P, r)
    more_q = torch.cat([own, pick.expand(*own.shape[:4], -1)], -1).flatten(3)
    more_k = torch.cat([torch.full_like(key[..., :1], ONE), key], -1).flatten(3)
    fill = -more_q.shape[-1] % 8
    return torch.cat([F.pad(more_q, (0, fill)), q], -1), torch.cat([F.pad(more_k, (0, fill)), k], -1)


def sums(f: Tensor, at: Positions, keys: Keys | None, T: int) -> tuple[Tensor, Tensor]:
    """c of the T queries (B, H, T), which are the newest keys, and of all keys (B, H, S): float64, counted from the last token of the
    past, so that what is near it is small. Other documents among the keys of a past change what is masked, and nothing else."""
    f = f.to(widest(f.device))
    if keys is None:
        c = f.cumsum(2) if at.plain else running(f, at.doc[:, None])
        return c, c

    def order() -> Tensor:
        """(B, 1, S): from the oldest to the newest, empty slots first; new tokens that were not written yet stay behind."""
        S, written = keys.pos.shape[1], keys.name[0] == "after"       # type: ignore[index]
        old = keys.pos[:, :S if written else S - T].argsort(1)
        return torch.cat([old, torch.arange(old.shape[1], S, device=old.device).expand(len(old), -1)], 1)[:, None]

    index = at.once(("order", keys.name), order).expand_as(f)
    c = f.gather(2, index).cumsum(2)
    c = c - c[:, :, :-T][:, :, -1:].sum(2, keepdim=True)                                       # of an empty past: 0
    return c[:, :, -T:], torch.empty_like(c).scatter(2, index, c)


def running(f: Tensor, doc: Tensor) -> Tensor:
    """The cumulative sum of f (B, H, T) within each document, doc (B, 1, T), by doubling: a difference of two sums over the row would
    leave the rounding of its gradient on other documents."""
    step = 1
    while step < f.shape[2]:
        f = f + F.pad(f[:, :, :-step] * (doc[:, :, step:] == doc[:, :, :-step]), (step, 0))
        step *= 2
    return f
