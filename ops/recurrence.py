"""A state that fades and gains one outer product a token: linear attention, RetNet, Mamba-2 (q=C, k=B, v=dt x), GLA, RWKV-6.

    h_t = exp(log_decay_t) h_(t-1) + k_t v_t^T        y_t = q_t h_t
    with a bonus u (RWKV-6):                          y_t = q_t (h_(t-1) + diag(u) k_t v_t^T)

`naive` is the specification, token by token; `chunked` is what runs: products inside of chunks, all of them at once, and a short loop
over the chunks' states. Every exponent is a sum of log decays over just the tokens between two, so that none is positive (if no log
decay is), none loses digits to what lies before, and no gradient is a difference of sums over documents that do not see one another.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ops import fla
from ops.positions import Positions

CHUNK = 64        # tokens whose products are a matrix; a power of two
BLOCK = 4         # where decays go by channel: tokens whose pairs are taken one by one
ROWS = 12288      # rows times heads times tokens at once: what a backward pass holds, and a processor's cache


def recurrence(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, at: Positions, bonus: Tensor | None = None,
               h: Tensor | None = None, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """q, k (B, H, T, K), v (B, H, T, V) -> y (B, H, T, V) and the last h (B, H, K, V), both float32, whatever autocast says.

    log_decay, finite and <= 0: (B, H, T), by channel (B, H, T, K), a head's constant (H,), or None for no decay. bonus (H, K).
    h (B, H, K, V): what came before (None: nothing). A document starts from h = 0; padding neither decays nor adds, and its y means
    nothing. No scale: q has it already. backend: chunked, naive, or auto: fla's kernels where they
    are (ops/fla.py), else chunked.

    Contiguous groups of heads may share, with no copy of the whole: q and k of G heads serve the H of v, decay and h (Mamba-2), or k, v,
    decay and h of G heads serve the H of q (grouped queries, whose state is so many times smaller).
    """
    (B, G, T, K), (H, V) = k.shape, v.shape[1::2]
    if H % G or q.shape[1] % G:
        raise ValueError(f"recurrence: {q.shape[1]} heads of q and {H} of v must be multiples of the {G} of k")
    if backend == "auto" and T > 1 and fla.takes(v.device.type, fla.half(v), K):
        return fla.recurrence(q, k, v, log_decay, at, bonus, h)
    dtype = torch.promote_types(v.dtype, torch.float32)
    with torch.autocast(v.device.type, enabled=False):
        q, k, v = (t.to(dtype).unflatten(1, (G, -1)) for t in (q, k, v))                       # (B, G, 1 or R, T, ...)
        a = v.new_zeros(G) if log_decay is None else log_decay.to(dtype)
        a = a[:, None].expand(B, len(a), T) if a.dim() == 1 else a
        a = (a[..., None] if a.dim() == 3 else a).unflatten(1, (G, -1))                        # (B, G, R, T, 1 or K)
        h = (v.new_zeros(B, H, K, V) if h is None else h.to(dtype)).unflatten(1, (G, -1))      # (B, G, R, K, V)
        u = None if bonus is None else bonus.to(dtype).view(G, -1, 1, K)                       # (G, R, 1, K)
        start = None
        if at.given:               # a document's start is a mask, not a decay of -inf, which no sum can hold
            start, pad = at.pos == 0, (at.pos < 0)[:, None, None, :, None]
            k, a = k.masked_fill(pad, 0), a.masked_fill(pad | start[:, None, None, :, None], 0)
        y, h = (naive if backend == "naive" or T == 1 else chunked)(q, k, v, a, u, start, h)
        return y.flatten(1, 2), h.flatten(1, 2)


def naive(q: Tensor, k: Tensor, v: Tensor, a: Tensor, u: Tensor | None, start: Tensor | None, h: Tensor) -> tuple[Tensor, Tensor]:
    """Shapes as in `recurrence`; start (B, T) bool: where documents begin (None: nowhere)."""
    out = []
    for t in range(q.shape[3]):
        if start is not None:
            h = h.masked_fill(start[:, None, None, t, None, None], 0)
        new, faded = k[..., t, :, None] * v[..., t, None, :], h * a[..., t, :, None].exp()
        read = faded + new if u is None else h + u.mT * new
        h = faded + new
        out.append((q[..., t, None, :] @ read)[..., 0, :])
    return torch.stack(out, 3), h


def chunked(q: Tensor, k: Tensor, v: Tensor, a: Tensor, u: Tensor | None, start: Tensor | None, h: Tensor) -> tuple[Tensor, Tensor]:
    """The same. Some chunks at a time, whose products are made again in the backward pass, which keeps the inputs and a few states; short
    rows' are kept."""
    B, T, n = v.shape[0], v.shape[3], CHUNK
    while n >= 2 * max(T, BLOCK):
        n //= 2
    ends = -T % n                                          # tokens that neither decay nor add
    if ends:                                               # cat: of F.pad here, inductor (torch 2.13, CPU) makes gradients that are garbage
        q, k, v, a = (torch.cat([t, t.new_zeros(*t.shape[:3], ends, t.shape[4])], 3) for t in (q, k, v, a))
        start = None if start is None else F.pad(start, (0, ends))
    size = max(1, ROWS // (B * v.shape[1] * max(q.shape[2], v.shape[2]) * n)) * n
    starts = [None] * -(-v.shape[3] // size) if start is None else start.split(size, 1)
    out, again = [], torch.is_grad_enabled() and len(starts) > 1
    for q_, k_, v_, a_, start_ in zip(*(t.split(size, 3) for t in (q, k, v, a)), starts):
        if again:
            y, h = checkpoint(several, q_, k_, v_, a_, u, start_, h, n, use_reentrant=False, preserve_rng_state=False)
        else:
            y, h = several(q_, k_, v_, a_, u, start_, h, n)
        out.append(y)
    return torch.cat(out, 3)[..., :T, :], h


def several(q: Tensor, k: Tensor, v: Tensor, a: Tensor, u: Tensor | None, start: Tensor | None, h: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """A whole number N of chunks of n tokens."""
    late = int(u is not None)                              # y_t reads h_(t-1): its decay does not count yet
    own = None if u is None else (q * u * k).sum(-1, keepdim=True) * v
    q, k, v, a = (t.unflatten(3, (-1, n)) for t in (q, k, v, a))                               # (B, G, 1 or R, N, n, ...)
    into = (ones(n, a).tril(-late) @ a).exp()              # how much of the state before the chunk each token sees
    give = (ones(n, a).triu(1) @ a).exp()                  # how much of each token is left at the chunk's end
    keep = a.sum(-2).exp()                                 # and of the state before it: (B, G, R, N, 1 or K)
    see = ones(n, a).tril(-late).bool()
    if start is not None:
        doc = start.unflatten(1, (-1, n)).cumsum(2)[:, None, None]                             # (B, 1, 1, N, n)
        see = see & (doc[..., :, None] == doc[..., None, :])
        into, give = into * (doc == 0)[..., None], give * (doc == doc[..., -1:])[..., None]
        keep = keep * (doc[..., -1:] == 0)
    w = (alike if a.shape[-1] == 1 else by_channel)(q, k, a, late).masked_fill(~see, 0)        # (B, G, R, N, n, n)
    before = []
    for keep_, new in zip(keep[..., None].unbind(3), ((k * give).mT @ v).unbind(3)):
        before.append(h)
        h = h * keep_ + new
    y = (w @ v + (q * into) @ torch.stack(before, 3)).flatten(3, 4)
    return y if own is None else y + own, h


def alike(q: Tensor, k: Tensor, a: Tensor, late: int) -> Tensor:
    """q, k (..., n, K), a (..., n, 1) -> q_i . k_j exp(a_(j+1) + ... + a_(i-late)): (..., n, n), of meaning for j <= i - late."""
    n = a.shape[-2]
    return (ones(n, a).tril(-late) @ (a * ones(n, a).tril(-1))).exp() * (q @ k.mT)


def by_channel(q: Tensor, k: Tensor, a: Tensor, late: int) -> Tensor:
    """The same, zero elsewhere, for a (..., n, K): sum over c of q_ic k_jc exp(a_(j+1)c + ... + a_(i-late)c).

    Pairs inside of blocks one by one; then two blocks at a time, m = 4, 8, ...: what the right one's queries see of the left one's keys,
    the sum of decays parted where the blocks meet."""
    n, m = a.shape[-2], min(BLOCK, a.shape[-2])
    i, j = torch.tril_indices(m, m, -late, device=a.device)
    s = torch.arange(m, device=a.device)
    between = ((s > j[:, None]) & (s <= i[:, None] - late)).to(a.dtype)                        # (pairs, m)
    q_, k_, a_ = (t.unflatten(-2, (-1, m)) for t in (q, k, a))
    pairs = (q_[..., i, :] * k_[..., j, :] * (between @ a_).exp()).sum(-1)                     # (..., n/m, pairs)
    place = F.one_hot(i * m + j, m * m).to(a.dtype)
    w = (pairs @ place).unflatten(-1, (m, m))                                                  # (..., n/m, m, m)
    while m < n:
        (_, q_), (k_, _), (left, right) = (t.unflatten(-2, (-1, 2, m)).unbind(-3) for t in (q, k, a))       # (..., n/2m, m, K)
        x = (q_ * (ones(m, a).tril(-late) @ right).exp()) @ (k_ * (ones(m, a).triu(1) @ left).exp()).mT
        upper, lower = w.unflatten(-3, (-1, 2)).unbind(-3)
        w, m = torch.cat([F.pad(upper, (0, m)), torch.cat([x, lower], -1)], -2), 2 * m
    return w[..., 0, :, :]


def ones(n: int, like: Tensor) -> Tensor:
    return like.new_ones(n, n)
