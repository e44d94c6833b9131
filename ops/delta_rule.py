"""The delta rule, a linear attention that overwrites: before a key's value is added, what the state holds for that key is taken out.

    h_t = exp(g_t) h_(t-1)                               the decay: none, of a head, or of each channel of its keys
    h_t = h_t + k_t (beta_t (v_t - h_t^T k_t))^T         the correction, on the decayed state
    y_t = q_t h_t

DeltaNet (Schlag et al. 2021, arXiv 2102.11174; in chunks Yang et al. 2024, arXiv 2406.06484), Gated DeltaNet (arXiv 2412.06464), KDA
(Kimi Linear, arXiv 2510.26692). `naive` is the specification. In chunks of 64 tokens, with u_t = beta_t (v_t - h_t^T k_t) for unknowns,

    (I + A) u = beta v - (beta k exp(G)) h_0             A_ij = beta_i (k_i . k_j) decay_ij below the diagonal
    y = (q exp(G)) h_0 + P u                             P_ij = (q_i . k_j) decay_ij up to the diagonal

where G sums g from the chunk's start and decay_ij = exp(g_(j+1) + ... + g_i). All chunks solve their triangle at once (the UT transform),
for u as a function of h_0; what is left for a loop are two products a chunk. No exponent is positive, and none is a difference of sums.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ops import fla
from ops.positions import Positions

CHUNK = 64           # tokens: the triangles cost as much as the state's products where K = V = 64
SEGMENT = 1024       # tokens whose intermediate results are held at once; in training they are computed again in backward


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, at: Positions, h: Tensor | None = None,
               backend: str = "auto") -> tuple[Tensor, Tensor]:
    """q, k (B, G, T, K), v (B, H, T, V), beta (B, H, T), H a multiple of G (H/G value heads in a row share keys), log_decay <= 0
    (B, H, T), or (B, H, T, K) by channel, or None; h (B, H, K, V), the state before the first token (None: zeros) -> y (B, H, T, V) and
    the state after the last, both float32 at least. A document begins with h = 0; padding leaves h as it was. ValueError where H is no
    multiple of G. backend: chunked, naive, or auto: fla's kernels where they are (ops/fla.py), else chunked."""
    B, G, T, K = q.shape
    if v.shape[1] % G:
        raise ValueError(f"delta_rule: {v.shape[1]} value heads are no multiple of {G} key heads")
    if backend == "auto" and T > 1 and fla.takes(v.device.type, fla.half(v), K):
        return fla.delta_rule(q, k, v, beta, log_decay, at, h)
    dtype = torch.promote_types(v.dtype, torch.float32)
    q, k, v, beta = (t.to(dtype) for t in (q, k, v, beta))
    h = v.new_zeros(B, v.shape[1], K, v.shape[3]) if h is None else h.to(dtype)
    g = None if log_decay is None else log_decay.to(dtype)
    if at.given:                                                                     # padding neither decays nor adds
        pad = (at.pos < 0)[:, None]
        beta, g = beta.masked_fill(pad, 0), None if g is None else g.masked_fill(pad.unflatten(-1, (T, *[1] * (g.dim() - 3))), 0)
    run = naive if backend == "naive" or T == 1 else chunked
    with torch.autocast(q.device.type, enabled=False):
        return run(q, k, v, beta, g, at, h)


def naive(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, at: Positions, h: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token."""
    q, k = (t.repeat_interleave(v.shape[1] // t.shape[1], 1) for t in (q, k))
    out = []
    for t in range(q.shape[2]):
        if at.given:
            h = h.masked_fill((at.pos[:, t] == 0)[:, None, None, None], 0)
        if g is not None:
            h = h * g[:, :, t].exp().reshape(*h.shape[:2], -1, 1)
        u = beta[:, :, t, None, None] * (v[:, :, t, None] - k[:, :, t, None] @ h)    # (B, H, 1, V)
        h = h + k[:, :, t, :, None] * u
        out.append(q[:, :, t, None] @ h)
    return torch.cat(out, 2), h


class Chunks(NamedTuple):
    """Of every chunk: scores of what is read against what is written, and how both decay to its borders."""

    kk: Tensor      # (..., C, C): k_i . k_j decay_ij; above its diagonal nothing is read
    qk: Tensor      # (..., C, C): q_i . k_j decay_ij, 0 above the diagonal
    into: Tensor    # (..., C, 1 or K): how the state before the chunk decays to each token
    give: Tensor    # (..., C, 1 or K): how each token decays to the chunk's end


def chunked(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, at: Positions, h: Tensor) -> tuple[Tensor, Tensor]:
    G, T = q.shape[1:3]
    C = min(CHUNK, 1 << (T - 1).bit_length())
    n, shared = max(1, SEGMENT // C), documents(at.doc, C) if at.given else (None, None)
    whole = [t if t is None else cut(t, G, C) for t in (q, k, v, beta, g)] + [*shared]
    h, out, count = h.unflatten(1, (G, -1)), [], -(-T // (n * C))
    parts = [[None] * count if t is None else t.split(n, 3) for t in whole]
    again = torch.is_grad_enabled() and count > 1
    run: Callable[..., Any] = partial(checkpoint, segment, use_reentrant=False, preserve_rng_state=False) if again else segment
    for part in zip(*parts):
        y, h = run(*part, h)
        out.append(y)
    return torch.cat(out, 3).flatten(3, 4)[:, :, :, :T].flatten(1, 2), h.flatten(1, 2)


def cut(x: Tensor, G: int, C: int) -> Tensor:
    """(B, G R, T, ...) -> (B, G, R, N, C, ...), filled up with zeros, which neither decay nor add."""
    if x.shape[2] % C:        # not F.pad, of whose gradient inductor 2.13 makes garbage on a CPU
        x = torch.cat([x, x.new_zeros(*x.shape[:2], -x.shape[2] % C, *x.shape[3:])], 2)
    return x.unflatten(2, (-1, C)).unflatten(1, (G, -1))


def documents(doc: Tensor, C: int) -> tuple[Tensor, Tensor]:
    """doc (B, T) -> which tokens of a chunk share one (B, 1, 1, N, C, C), and which of them go on with the chunk before's last
    (B, 1, 1, N, C, 1)."""
    doc = torch.cat([doc, doc[:, -1:].expand(-1, -doc.shape[1] % C)], 1).unflatten(1, (-1, C))
    before = torch.cat([torch.zeros_like(doc[:, :1, -1]), doc[:, :-1, -1]], 1)        # 0 is what h belongs to
    return (doc[..., None] == doc[..., None, :])[:, None, None], (doc == before[..., None])[:, None, None, ..., None]


def segment(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, same: Tensor | None, goes_on: Tensor | None,
            h: Tensor) -> tuple[Tensor, Tensor]:
    """Chunks that follow one another: q, k (B, G, 1, N, C, K), v (B, G, R, N, C, V), h (B, G, R, K, V) -> y like v, h."""
    beta = beta[..., None]
    kk, qk, into, give = by_head(q, k, g) if g is None or g.dim() == 5 else by_channel(q, k, g)
    if same is not None and goes_on is not None:
        kk, qk, into, give = kk * same, qk * same, into * goes_on, give * same[..., -1, :, None]
    return solve(kk * beta, qk, v * beta, k * into * beta, q * into, k * give, into[..., -1, :], h)


def solve(A: Tensor, P: Tensor, u: Tensor, erase: Tensor, read: Tensor, write: Tensor, keep: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """In every chunk (I + A) u' = u - erase h for A below its diagonal, y = read h + P u', and h = keep h + write^T u' after it.

    A, P (..., N, C, C), u (..., N, C, V), erase, read, write (..., N, C, K), keep (..., N, 1 or K), h (..., K, V)."""
    shape = torch.broadcast_shapes(A.shape[:-2], u.shape[:-2])
    A, u, erase = (t.expand(*shape, *t.shape[-2:]) for t in (A, u, erase))
    both = torch.linalg.solve_triangular(A, torch.cat([u, erase], -1), upper=False, unitriangular=True)
    u, erase = both.split([u.shape[-1], erase.shape[-1]], -1)
    states, news = [], []
    for u_n, erase_n, write_n, keep_n in zip(u.unbind(-3), erase.unbind(-3), write.mT.unbind(-3), keep[..., None].unbind(-3)):
        new = u_n - erase_n @ h
        states.append(h)
        news.append(new)
        h = keep_n * h + write_n @ new
    return read @ torch.stack(states, -3) + P @ torch.stack(news, -3), h


def by_head(q: Tensor, k: Tensor, g: Tensor | None) -> Chunks:
    """g (B, G, R, N, C) or None."""
    C = q.shape[-2]
    lower = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    if g is None:
        decay, into = lower.to(q.dtype), q.new_ones(*q.shape[:-1], 1)
    else:                                                                            # sums, not differences of sums, which lose digits
        decay = g[..., None].expand(*g.shape, C).masked_fill(~lower.tril(-1), 0).cumsum(-2).exp() * lower
        into = g.cumsum(-1).exp()[..., None]
    return Chunks(k @ k.mT * decay, q @ k.mT * decay, into, decay[..., -1, :, None])


def by_channel(q: Tensor, k: Tensor, g: Tensor) -> Chunks:
    """g (B, G, R, N, C, K). Blocks of 1, 2, 4, ... tokens are joined by twos: what the later half reads of the earlier decays to the
    border between them on either side, so that it is a product of matrices whose exponents are sums of g."""
    C, x = q.shape[-2], torch.stack([q, k])                                          # (2, B, G, 1, N, C, K)
    scores = (x * k).sum(-1)[..., None, None].expand(2, *g.shape[:-1], 1, 1)         # (2, B, G, R, N, blocks, s, s)
    into, give = g[..., None, :], torch.zeros_like(g)[..., None, :]                  # (B, G, R, N, blocks, s, K)
    for s in (1 << i for i in range(C.bit_length() - 1)):
        (into_1, into_2), (give_1, give_2), (s_1, s_2) = (t.unflatten(-3, (-1, 2)).unbind(-3) for t in (into, give, scores))
        later = x.unflatten(-2, (-1, 2, s))[..., 1, :, :] * into_2.exp()
        earlier = k.unflatten(-2, (-1, 2, s))[..., 0, :, :] * give_1.exp()
        cross = later @ earlier.mT if s > 1 else (later * earlier).sum(-1)[..., None]
        scores = torch.cat([torch.cat([s_1, torch.zeros_like(cross)], -1), torch.cat([cross, s_2], -1)], -2)
        into, give = torch.cat([into_1, into_2 + into_1[..., -1:, :]], -2), torch.cat([give_1 + into_2[..., -1:, :], give_2], -2)
    qk, kk = scores[..., 0, :, :]
    return Chunks(kk, qk, into[..., 0, :, :].exp(), give[..., 0, :, :].exp())
