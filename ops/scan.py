"""The selective scan (Mamba, Gu and Dao 2023, arXiv 2312.00752): a state of N numbers for each of E channels, whose decay, input and
readout are functions of the token.

    h_t = exp(dt_t A) h_(t-1) + (dt_t x_t) B_t,    y_t = C_t h_t

x, dt (B, T, E), dt >= 0; A (E, N), < 0; B, C (B, T, N) -> y (B, T, E) and the last h (B, N, E), both float32 (or more, as x). With
dt >= 0 and A < 0 no exponent is positive.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.positions import Positions

BLOCK = 32          # tokens whose states are held at once; backward makes them again from the one that is kept of each block
WIDE = 2**19        # numbers of states that a block has at most, where it can: with its like they fit into a core's cache


def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, at: Positions, h: Tensor | None = None,
         backend: str = "auto") -> tuple[Tensor, Tensor]:
    """The shapes above, any dtype; h (B, N, E): the state before (None: zeros). Padding neither decays nor adds, and a document
    begins with an empty state. Gradients of everything, h included. backend: naive, or auto: blocked but for one token."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, dt, A, B, C = (t.to(dtype) for t in (x, dt, A, B, C))
    h = x.new_zeros(x.shape[0], A.shape[1], x.shape[2]) if h is None else h.to(dtype)
    keep = None
    if at.given:
        dt, keep = dt.masked_fill((at.pos < 0)[..., None], 0), (at.pos != 0).to(dtype)
    if backend == "naive" or x.shape[1] == 1:
        return naive(x, dt, A, B, C, keep, h)
    y, last, _ = blocked(x, dt, A, B, C, keep, h)
    return y, last


def naive(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, keep: Tensor | None, h: Tensor) -> tuple[Tensor, Tensor]:
    """The specification, a token at a time. keep (B, T): 0 where the past is forgotten, else 1."""
    out = []
    for t, (x_t, dt_t, B_t, C_t) in enumerate(zip(x.unbind(1), dt.unbind(1), B.unbind(1), C.unbind(1))):
        a = (dt_t[:, None] * A.mT).exp()                                                       # (B, N, E)
        h = (a if keep is None else a * keep[:, t, None, None]) * h + (dt_t * x_t)[:, None] * B_t[..., None]
        out.append((h * C_t[..., None]).sum(1))
    return torch.stack(out, 1), h


def rows_at_once(x: Tensor, N: int) -> int:
    """Rows of a block: all on a GPU, and on a CPU as many as the cache takes."""
    return x.shape[0] if x.is_cuda else min(x.shape[0], max(1, WIDE // (BLOCK * N * x.shape[2])))


def states(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, keep: Tensor | None, h: Tensor, a: Tensor, H: Tensor) -> None:
    """Into a (R, n, N, E) the decays of n tokens, and into H (R, n, N, E) their states. h (R, N, E); A (N, E)."""
    torch.mul(dt[:, :, None], A, out=a).exp_()
    if keep is not None:
        a *= keep[:, :, None, None]
    torch.mul(B[..., None], (dt * x)[:, :, None], out=H)
    for a_t, H_t in zip(a.unbind(1), H.unbind(1)):
        h = H_t.addcmul_(a_t, h)


@torch.library.custom_op("heed::scan", mutates_args=())
def blocked(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, keep: Tensor | None, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """naive's numbers, and the states (B, T / BLOCK, N, E) that its blocks began with.

    A block goes through whole-block operations but for the recurrence itself, one fused multiply-add a token over rows, channels
    and state. An operation of its own to torch, so that a compiler does not unroll the loop.
    """
    (R, T, E), N = x.shape, A.shape[1]
    A, many = A.mT.contiguous(), rows_at_once(x, N)
    y, last, starts = torch.empty_like(x), torch.empty_like(h), x.new_empty(R, -(-T // BLOCK), N, E)
    work = x.new_empty(2, many, BLOCK, N, E)
    with torch.autocast(x.device.type, enabled=False):
        for rows in (slice(r, r + many) for r in range(0, R, many)):
            now = h[rows]
            for i, t in enumerate(range(0, T, BLOCK)):
                part = rows, slice(t, t + BLOCK)
                n = min(BLOCK, T - t)
                a, H = work[:, :len(now), :n]
                starts[rows, i] = now
                states(x[part], dt[part], A, B[part], None if keep is None else keep[part], starts[rows, i], a, H)
                y[part] = (C[part][:, :, None] @ H)[:, :, 0]
                now = H[:, -1]
            last[rows] = now
    return y, last, starts


@blocked.register_fake
def _(x, dt, A, B, C, keep, h):
    return torch.empty_like(x), torch.empty_like(h), x.new_empty(h.shape[0], -(-x.shape[1] // BLOCK), *h.shape[1:])


@torch.library.custom_op("heed::scan_backward", mutates_args=())
def blocked_backward(gy: Tensor, gh: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, keep: Tensor | None,
                     starts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dt, A, B, C and h from those of y and of the last state. g_t = C_t gy_t + a_(t+1) g_(t+1) is the same recurrence
    backwards, and a's own gradient is g_t h_(t-1)."""
    (R, _, E), N = x.shape, A.shape[1]
    A, many = A.mT.contiguous(), rows_at_once(x, N)
    gx, gdt, gB, gC, first = (torch.empty_like(t) for t in (x, dt, B, C, gh))
    gA, work = torch.zeros_like(A), x.new_empty(2, many, BLOCK, N, E)
    with_start = x.new_empty(many, 1 + BLOCK, N, E)
    with torch.autocast(x.device.type, enabled=False):
        for rows in (slice(r, r + many) for r in range(0, R, many)):
            g = gh[rows].clone()
            for i in reversed(range(starts.shape[1])):
                part = rows, slice(i * BLOCK, (i + 1) * BLOCK)
                x_, dt_, B_, C_, gy_ = (t[part] for t in (x, dt, B, C, gy))
                (a, G), H = work[:, :len(g), :x_.shape[1]], with_start[:len(g), :1 + x_.shape[1]]
                H[:, 0] = starts[rows, i]
                states(x_, dt_, A, B_, None if keep is None else keep[part], H[:, 0], a, H[:, 1:])
                gC[part] = (H[:, 1:] @ gy_[..., None])[..., 0]
                torch.mul(C_[..., None], gy_[:, :, None], out=G)
                later = G[:, -1].add_(g)
                for a_t, G_t in zip(reversed(a[:, 1:].unbind(1)), reversed(G[:, :-1].unbind(1))):
                    later = G_t.addcmul_(a_t, later)
                torch.mul(a[:, 0], later, out=g)
                gB[part] = (G @ (dt_ * x_)[..., None])[..., 0]
                gu = (B_[:, :, None] @ G)[:, :, 0]                                             # of dt x
                G.mul_(a).mul_(H[:, :-1])                                                      # of dt A
                gx[part] = gu * dt_
                gdt[part] = torch.mul(G, A, out=a).sum(2) + gu * x_
                gA += G.mul_(dt_[:, :, None]).sum((0, 1))
            first[rows] = g
    return gx, gdt, gA.mT.contiguous(), gB, gC, first


@blocked_backward.register_fake
def _(gy, gh, x, dt, A, B, C, keep, starts):
    return tuple(torch.empty_like(t) for t in (x, dt, A, B, C, gh))


def keep_for_backward(ctx, inputs, output):
    *given, _ = inputs
    ctx.save_for_backward(*given, output[2])


def backward(ctx, gy, gh, _):
    gx, gdt, gA, gB, gC, first = blocked_backward(gy.contiguous(), gh, *ctx.saved_tensors)
    return gx, gdt, gA, gB, gC, None, first


blocked.register_autograd(backward, setup_context=keep_for_backward)
