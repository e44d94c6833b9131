"""RWKV-7's recurrence (Peng et al. 2025, arXiv 2503.14456): a delta rule whose state decays by channel.

    h_t = diag(exp(log_w_t)) h_(t-1) + b_t (a_t^T h_(t-1)) + k_t v_t^T          y_t = r_t^T h_t

Here h is the transpose of the paper's S, a = -kappa and b = kappa * its a. The correction reads the state before it decays.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ops import fla
from ops.positions import Positions

CHUNK = 32             # tokens whose pairs are multiplied out; a power of 2
GROUP = 1 << 13        # tokens of all heads and rows whose pairs are held at once: 2 MB a tensor of 64 channels


def rwkv7(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, at: Positions, h: Tensor | None = None,
          backend: str = "auto") -> tuple[Tensor, Tensor]:
    """r, log_w (at most 0), k, a, b (B, H, T, K) and v (B, H, T, V) -> y (B, H, T, V) and the state after it (B, H, K, V), both
    float32 (float64 of float64). h is the state before (None: zeros). It is forgotten where a document begins; padding leaves it as it is.

    backend: chunked, naive, or auto: fla's kernels where they are (ops/fla.py), else chunked, whose memory is linear in T: beside the
    inputs, training keeps a state a group of chunks and makes the rest again in backward.
    """
    if backend == "auto" and k.shape[2] > 1 and fla.takes(v.device.type, fla.half(v), k.shape[3]):
        return fla.rwkv7(r, log_w, k, v, a, b, at, h)
    dtype = torch.promote_types(k.dtype, torch.float32)
    with torch.autocast(k.device.type, enabled=False):
        r, log_w, k, v, a, b = (t.to(dtype) for t in (r, log_w, k, v, a, b))
        h = k.new_zeros(*k.shape[:2], k.shape[3], v.shape[3]) if h is None else h.to(dtype)
        if at.given:
            pad = (at.pos < 0)[:, None, :, None]
            log_w, k, a = (t.masked_fill(pad, 0) for t in (log_w, k, a))
        return (loop if backend == "naive" or k.shape[2] == 1 else grouped)(r, log_w, k, v, a, b, at, h)


def loop(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, at: Positions, h: Tensor) -> tuple[Tensor, Tensor]:
    """The specification, a token at a time."""
    y = []
    for t, (v_t, *columns) in enumerate(zip(*(x.unbind(2) for x in (v, r, log_w.exp(), k, a, b)))):
        r_t, w_t, k_t, a_t, b_t = (x[..., None] for x in columns)                                         # (B, H, K, 1)
        if at.given:
            h = h.masked_fill((at.pos[:, t] == 0)[:, None, None, None], 0)
        h = w_t * h + b_t * (a_t * h).sum(2, keepdim=True) + k_t * v_t[:, :, None]
        y.append((r_t * h).sum(2))
    return torch.stack(y, 2), h


def grouped(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, at: Positions, h: Tensor) -> tuple[Tensor, Tensor]:
    """By groups of chunks, one after the other."""
    (B, H, T, _), n = k.shape, CHUNK
    while n >= 2 * T:
        n //= 2
    size = max(1, GROUP // (B * H * n)) * n
    inputs = [F.pad(t, (0, 0, 0, -T % n)).split(size, 2) for t in (r, log_w, k, v, a, b)]                 # the fill leaves h as it is
    doc = torch.cat([F.pad(at.doc, (1, 0)), at.doc[:, -1:].expand(-1, -T % n)], 1)                        # first the state's, which is 0
    out, again = [], torch.is_grad_enabled() and len(inputs[0]) > 1
    for i, group in enumerate(zip(*inputs)):
        args = *group, h, doc[:, i * size:i * size + group[0].shape[2] + 1] if at.given else None, n
        y, h = checkpoint(chunks, *args, use_reentrant=False, preserve_rng_state=False) if again else chunks(*args)
        out.append(y)
    return torch.cat(out, 2)[:, :, :T], h


def chunks(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, h: Tensor, doc: Tensor | None,
           n: int) -> tuple[Tensor, Tensor]:
    """T is a multiple of n here; doc (B, 1 + T) are the documents of the token before these, and of these.

    Within a chunk u_i = a_i^T h_(i-1) is what the state before the chunk and the pairs j < i make of it: u = A_ak v + A_ab u + a~ h,
    a triangular system (the WY form). So the chunk takes h to M h + N.
    """
    r, log_w, k, v, a, b = (t.unflatten(2, (-1, n)) for t in (r, log_w, k, v, a, b))                      # (B, H, N, n, channels)
    pairs = weights(r, a, k, b, log_w)                                                                    # (B, H, N, 2, n, 2, n)
    r, a = r * decay(log_w, upto=0), a * decay(log_w, upto=-1)
    left, keep = torch.cat([k, b], 3) * decay(log_w, after=1).repeat(1, 1, 1, 2, 1), log_w.sum(3).exp()
    if doc is not None:
        before, d = doc[:, None, :-1:n, None], doc[:, None, 1:].unflatten(2, (-1, n))                     # (B, 1, N, 1 or n)
        pairs = pairs * (d[..., :, None] == d[..., None, :])[:, :, :, None, :, None]
        seen = (d == before)[..., None]
        r, a, keep, left = r * seen, a * seen, keep * seen[..., -1, :], left * (d == d[..., -1:]).repeat(1, 1, 1, 2)[..., None]
    (rk, rb), (ak, ab) = (p.unbind(-2) for p in pairs.unbind(3))
    u = torch.linalg.solve_triangular(-ab, torch.cat([ak @ v, a], -1), upper=False, unitriangular=True)   # of v, and of the state
    u, w = u.split([v.shape[-1], a.shape[-1]], -1)
    new = left.mT @ torch.cat([v, u], 3)
    turn = left[..., n:, :].mT @ w + torch.diag_embed(keep)
    states = [h]
    for M, N in zip(turn.unbind(2), new.unbind(2)):
        states.append(M @ states[-1] + N)
    y = rk @ v + rb @ u + (r + rb @ w) @ torch.stack(states[:-1], 2)
    return y.flatten(2, 3), states[-1]


def weights(r: Tensor, a: Tensor, k: Tensor, b: Tensor, log_w: Tensor) -> Tensor:
    """(B, H, N, n, K) each -> (B, H, N, 2, n, 2, n): what r_i (j <= i) and a_i (j < i) meet of k_j and b_j, decayed in between.

    By halves: a pair whose halves of a block part at m is decayed from j to m and from m to i, so that no exponent is above 0, however
    strong the decay, and none is a difference of long sums. Blocks grow from one token, whose r meets its own k and b undecayed.
    """
    own = torch.stack([(r * k).sum(-1), (r * b).sum(-1)], -1)                                             # (B, H, N, n, 2)
    D, s = torch.stack([own, torch.zeros_like(own)], -2)[..., None, :, None], 1                           # (B, H, N, n/s, 2, s, 2, s)
    while s < k.shape[3]:
        halves = [t.unflatten(3, (-1, 2, s)).unbind(4) for t in (r, a, k, b, log_w)]                      # each (B, H, N, n/2s, s, K)
        (_, r1), (_, a1), (k0, _), (b0, _), (left, right) = halves
        rows = torch.cat([r1 * decay(right, upto=0), a1 * decay(right, upto=-1)], -2)
        fade = decay(left, after=1)
        low = (rows @ torch.cat([k0 * fade, b0 * fade], -2).mT).unflatten(-1, (2, s)).unflatten(-3, (2, s))
        D0, D1 = D.unflatten(3, (-1, 2)).unbind(4)
        D, s = torch.cat([F.pad(D0, (0, s)), torch.cat([low, D1], -1)], -3), 2 * s
    return D[:, :, :, 0]


def decay(log_w: Tensor, upto: int | None = None, after: int | None = None) -> Tensor:
    """(..., n, K): what the tokens j <= i + upto leave of the state before them, or the tokens j >= i + after of token i."""
    one = log_w.new_ones(log_w.shape[-2], log_w.shape[-2])
    return ((one.triu(after) if upto is None else one.tril(upto)) @ log_w).exp()                          # type: ignore[arg-type]
