"""Exact softmax attention: full, windowed, over documents, with a past. The queries are the last T of the S keys.

`reference` is the specification: float32, the only one that returns the attention weights. The others are its equals to
rounding, and what one cannot do falls to the next that can: sdpa (torch's fused kernels, every device), flex (flex_attention:
any mask in blocks on CUDA), flash (the flash-attn package). "auto" takes the fastest that fits.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.bands import bands
from ops.few_rows import one_query
from ops.flash import flash_attention, refuses, version
from ops.positions import Keys, Positions, visible

SHORT = 256 # keys up to which plain products in bfloat16 beat the fused kernel on a CPU, forward and backward: 8.5 against 25 ms at
            # (32, 3, 128, 64), 18 against 31 at (16, 4, 256, 64), 287 against 135 at (4, 8, 1024, 64); 2 cores of a Zen 4
BAND = 64   # queries a block of `banded`: below 64 the overhead of a block outweighs what a window saves


# bool, broadcast to (B, H, T, S); or a function of query positions, key positions and heads' numbers, broadcast, to bool
Keep = Tensor | Callable[[Tensor, Tensor, Tensor], Tensor] | None


@dataclass(frozen=True)
class How:
    """What attend is asked for beside the tensors."""

    causal: bool = True
    window: int = 0
    sinks: int = 0
    keep: Keep = None                  # and-ed to what is visible
    slopes: Tensor | None = None       # (H,): ALiBi, scores minus slope times distance
    scale: float | None = None
    softcap: float = 0.0
    sink_logit: Tensor | None = None   # (H,): one more score that takes weight and gives nothing
    dropout: float = 0.0
    need_weights: bool = False

    def mask_key(self) -> tuple:
        """Equal for what has the same masks; a `keep` that is a tensor belongs to one layer, whose masks are not remembered."""
        return self.window, self.sinks, self.causal, self.keep if callable(self.keep) else None, self.sink_logit is not None


def attend(q: Tensor, k: Tensor, v: Tensor, at: Positions, *, keys: Keys | None = None, backend: str = "auto", causal: bool = True,
           window: int = 0, sinks: int = 0, keep: Keep = None, slopes: Tensor | None = None, scale: float | None = None,
           softcap: float = 0.0, sink_logit: Tensor | None = None, dropout: float = 0.0, need_weights: bool = False):
    """q (B, H, T, D), k (B, G, S, D), v (B, G, S, V) -> (B, H, T, V); a query that sees nothing gives 0.

    `keys` says where the S keys stand (None: they are the T tokens themselves). Scores are q.k times `scale` (None: 1/sqrt(D)),
    capped to `softcap` tanh(s / softcap), then biased and masked. With `need_weights`: also the weights (B, H, T, S) and the
    log-sum-exp of the scores (B, H, T), both float32.
    """
    how = How(causal, window, sinks, keep, slopes, scale, softcap, sink_logit, dropout, need_weights)
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    name = choose(backend, q.device.type, q.dtype, q.shape[3], how, plain=at.plain and keys is None, grad=grad, past=keys is not None)
    return BACKENDS[name](q, k, v, at, keys or at.keys_new(), how)


# choosing

def cannot(name: str, device: str, dtype: torch.dtype, D: int, how: How, plain: bool, grad: bool, past: bool = False) -> str:
    """Why a backend cannot do this ('' if it can)."""
    if name == "reference":
        return ""
    if how.need_weights:
        return "no fused kernel returns the weights"
    if name == "sdpa":
        return "sdpa has no soft-cap" if how.softcap else ""
    if name == "flex":
        if how.dropout:
            return "flex has no dropout"
        if device not in ("cuda", "cpu"):
            return f"flex does not run on {device}"
        if device == "cuda" and D < 16:
            return "flex takes heads of 16 channels or more"
        return "flex has no backward on CPU" if device == "cpu" and grad else ""
    if device != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return "flash takes half precision on CUDA only"
    if how.sink_logit is not None:
        return "flash has no sink logit"
    if not how.causal or how.keep is not None or how.sinks or past:
        return "flash takes causal rows and documents without a past only"
    if not plain and torch.compiler.is_compiling():
        return "flash's documents are cut outside of torch.compile only"    # how many there are, the device knows
    return refuses(version(), D, how.dropout, how.softcap, how.slopes is not None)


def choose(backend: str, device: str, dtype: torch.dtype, D: int, how: How, plain: bool = True, grad: bool = True,
           past: bool = False) -> str:
    """The name of the backend that will run. flex pays in training, where its kernel and block mask serve many steps; for plain rows
    sdpa is what flash-attn 2 is, and 3 and 4 are faster."""
    if backend == "auto":
        masked = how.window or how.keep is not None or how.slopes is not None or how.softcap or not plain
        order = ["flash"] * bool(masked or version() > 2) + ["flex"] * bool(masked) if device == "cuda" and grad else []
        order += ["sdpa", "reference"]
    else:
        order = [backend] + [name for name in ("flex", "sdpa", "reference") if name != backend]
    reasons = {name: cannot(name, device, dtype, D, how, plain, grad, past) for name in order}
    name = next(name for name in order if not reasons[name])
    if backend not in ("auto", name) and not torch.compiler.is_compiling():
        say_once(f"attention backend {backend}: {reasons[backend]}; {name} takes its place")
    return name


@cache    # which is what makes it once
def say_once(line: str) -> None:
    print(line, file=sys.stderr)


# what every backend needs

def see(at: Positions, keys: Keys, how: How, H: int = 1) -> Tensor:
    """(B or 1, 1 or H, T, S) bool, made once a call for all layers that ask the same."""
    def make() -> Tensor:
        rows = slice(0, 1 if at.plain else None)     # plain rows are alike
        q_pos, q_doc = at.pos[rows, None, :, None], at.doc[rows, None, :, None]
        k_pos, k_doc = (spread(t, H)[:, :, None] if t.dim() == 3 else t[rows, None, None] for t in (keys.pos, keys.doc))
        mask = visible(q_pos, k_pos, q_doc, k_doc, how.window, how.sinks, how.causal)
        return mask & how.keep(q_pos, k_pos, torch.arange(H, device=q_pos.device)[:, None, None]) if callable(how.keep) else mask
    mask = at.once(("see", keys.name, *how.mask_key()), make)
    return mask & how.keep if isinstance(how.keep, Tensor) else mask


def distance_bias(q_pos: Tensor, k_pos: Tensor, slopes: Tensor) -> Tensor:
    """(B, T), (B, S) or (B, G, S) -> (B, H, T, S): ALiBi."""
    k_pos = spread(k_pos, len(slopes)) if k_pos.dim() == 3 else k_pos[:, None]
    return -slopes[:, None, None] * (q_pos[:, None, :, None] - k_pos[:, :, None]).clamp(min=0).float()


def spread(k: Tensor, H: int) -> Tensor:
    """Key/value heads repeated for their query heads: (B, G, S, D) -> (B, H, S, D), contiguous groups."""
    return k if k.shape[1] == H else k.repeat_interleave(H // k.shape[1], 1)


def parts(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (...) as a sum of numbers of that dtype: (..., P), each the rounding of what those before it leave; 32 bits of x or more."""
    digits, rest = 2 - math.frexp(torch.finfo(dtype).eps)[1], x.detach()      # 8 in bfloat16
    out = [x.to(dtype)]                                                # which has the gradient alone
    while len(out) * digits < 32:
        rest = rest - out[-1].detach().to(x.dtype)
        out.append(rest.to(dtype))
    return torch.stack(out, -1)


def with_sink(q: Tensor, k: Tensor, v: Tensor, how: How, is_causal: bool) -> tuple[Tensor, Tensor, Tensor, How]:
    """The sink logit as one key more, in front of the others, of value 0. Its scores are told by 8 channels more of q and k, so that
    no head needs a bias of its own and its gradient is a product's. is_causal: one query more too, which only the new key sees."""
    if how.sink_logit is None:
        return q, k, v, how
    scale = q.shape[-1] ** -0.5 if how.scale is None else how.scale
    logit = parts(how.sink_logit.float() / scale, q.dtype)                                     # (H, P)
    P = logit.shape[1]
    q = torch.cat([q, F.pad(logit, (0, 8 - P))[:, None].expand(*q.shape[:3], 8)], -1)
    key = F.pad(k.new_ones(P), (k.shape[-1], 8 - P)).expand(*k.shape[:2], 1, -1)
    k, v = torch.cat([key, F.pad(k, (0, 8))], 2), F.pad(v, (0, 0, 1, 0))
    return F.pad(q, (0, 0, int(is_causal), 0)), k, v, replace(how, sink_logit=None, scale=scale)


def as_wide(v: Tensor, D: int) -> Tensor:
    """Values as wide as keys: others a CPU's fused kernel and flash refuse, and what torch runs then holds all T x S scores."""
    return F.pad(v, (0, D - v.shape[-1])) if v.shape[-1] < D else v


# the backends

def reference(q: Tensor, k: Tensor, v: Tensor, at: Positions, keys: Keys, how: How):
    scale = q.shape[-1] ** -0.5 if how.scale is None else how.scale
    s = q.float() @ spread(k, q.shape[1]).float().mT * scale                                   # (B, H, T, S)
    if how.softcap:
        s = how.softcap * torch.tanh(s / how.softcap)
    if how.slopes is not None:
        s = s + distance_bias(at.pos, keys.pos, how.slopes)
    s = s.masked_fill(~see(at, keys, how, q.shape[1]), -torch.inf)
    lse = s.logsumexp(-1)                                                                     # (B, H, T)
    if how.sink_logit is not None:
        lse = torch.logaddexp(lse, how.sink_logit.float()[:, None].expand_as(lse))
    w = (s - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    y = (F.dropout(w, how.dropout) @ spread(v, q.shape[1]).float()).type_as(q)
    return (y, w, lse) if how.need_weights else y


def sdpa(q: Tensor, k: Tensor, v: Tensor, at: Positions, keys: Keys, how: How) -> Tensor:
    T = q.shape[2]
    if keys.name == "new" and at.plain and how.causal and how.keep is None and how.slopes is None and not (how.window and how.window < T):
        if q.device.type == "cpu" and q.dtype == torch.bfloat16 and 1 < T <= SHORT:
            return products(q, k, v, at, how)
        return fused(q, k, v, None, how, is_causal=True)
    front = keys.pos.shape[1] - T
    if how.window and how.causal and how.keep is None and max(how.window, BAND) < T and front >= 0 and not (how.sinks and at.given):
        return banded(q, k, v, at, keys, how)

    def make() -> tuple[Tensor, Tensor]:
        bias = None if how.slopes is None else distance_bias(at.pos, keys.pos, how.slopes)
        if T == 1 and bias is None and q.device.type == "cpu":              # numbers, so that one_query need not make them for each layer
            bias = torch.zeros(1, device=q.device)
        return opened(see(at, keys, how, q.shape[1]), bias, q.dtype, how.sink_logit is not None)

    mask, empty = make() if isinstance(how.keep, Tensor) else at.once(("mask", keys.name, *how.mask_key(), q.dtype), make)
    return fused(q, k, v, mask, how).masked_fill(empty, 0)


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: How, is_causal: bool = False) -> Tensor:
    T, V = q.shape[2], v.shape[-1]
    q, k, v, how = with_sink(q, k, v, how, is_causal)
    if T == 1 and not how.dropout and (y := one_query(q, k, v, mask, how.scale)) is not None:
        return y[..., :V]
    gqa = q.shape[1] != k.shape[1]
    if gqa and q.device.type != "cpu" and (mask is not None or q.dtype == torch.float32 or q.device.type == "mps"):
        k, v, gqa = spread(k, q.shape[1]), spread(v, q.shape[1]), False    # CUDA's masked and float32 kernels take equal heads only
    return F.scaled_dot_product_attention(q, k, as_wide(v, k.shape[-1]), attn_mask=mask, dropout_p=how.dropout, is_causal=is_causal,
                                          scale=how.scale, enable_gqa=gqa)[:, :, -T:, :V]


def products(q: Tensor, k: Tensor, v: Tensor, at: Positions, how: How) -> Tensor:
    """Two plain products, the mask added in the first, and a softmax: what a CPU does fastest with short rows in bfloat16. Its
    kernel takes bfloat16 scores and computes in float32; autocast would write them out in float32 first."""
    new, (q, k, v, how) = q.shape[2], with_sink(q, k, v, how, True)
    B, H, T, scale = *q.shape[:3], q.shape[-1] ** -0.5 if how.scale is None else how.scale
    later = at.once(("later", T), lambda: torch.full((T, T), -torch.inf, dtype=q.dtype).triu(1))
    with torch.autocast("cpu", enabled=False):
        w = torch.baddbmm(later, q.flatten(0, 1), spread(k, H).flatten(0, 1).mT, alpha=scale).softmax(-1)
        return (F.dropout(w, how.dropout) @ spread(v, H).flatten(0, 1)).unflatten(0, (B, H))[:, :, -new:]


def opened(mask: Tensor, bias: Tensor | None, dtype: torch.dtype, sink: bool = False) -> tuple[Tensor, Tensor]:
    """The mask, with the bias in it if there is one, and the rows that see nothing: those are let see everything, for their
    outputs to be zeroed, because kernels disagree on such rows and some give NaN. sink: with the key that all see in front."""
    empty = ~mask.any(-1, keepdim=True)
    mask = mask | empty
    mask = mask if bias is None else bias.to(dtype).masked_fill(~mask, -torch.inf)
    return (F.pad(mask, (1, 0), value=bias is None) if sink else mask), empty


def banded(q: Tensor, k: Tensor, v: Tensor, at: Positions, keys: Keys, how: How) -> Tensor:
    """A window in time and memory linear in T: blocks of queries, each with the slice of new keys that its window reaches,
    the keys of the past, and the sinks among the new ones.

    With T = 200, a window of 9 and no past: N = 4 blocks of L = 64 queries; block 1 holds queries 64 to 127 and keys 56 to 127.
    """
    (B, H, T, D), n, W = q.shape, k.shape[2] - q.shape[2], how.window
    in_blocks = q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64) and how.slopes is None and not how.dropout
    in_blocks = in_blocks and not torch.compiler.is_compiling()
    L, f = BAND if in_blocks else max(W, BAND), min(how.sinks, T)
    reach = -(-(W - 1) // L) * L if in_blocks else W - 1
    N = -(-T // L)
    fill = N * L - T

    def own(t: Tensor, value: float = 0) -> Tensor:                        # (B, T, ...) -> (B, N, L, ...)
        return F.pad(t, (0, 0) * (t.dim() - 2) + (0, fill), value=value).unflatten(1, (N, L))

    def row(t: Tensor, value: float = 0) -> Tensor:                        # (B, S, ...) -> (B, reach + N L, ...): the new ones
        return F.pad(t[:, n:], (0, 0) * (t.dim() - 2) + (reach, fill), value=value)

    def reached(t: Tensor, value: float = 0) -> Tensor:                    # (B, S, ...) -> (B, N, n + f + reach + L, ...)
        front = t[:, None, :n + f].expand(B, N, *t[:, :n + f].shape[1:])
        return torch.cat([front, row(t, value).unfold(1, reach + L, L).movedim(-1, 2)], 2)

    def make() -> tuple[Tensor, Tensor]:
        q_pos, q_doc = own(at.pos, -1)[..., None], own(at.doc)[..., None]  # (B, N, L, 1)
        k_pos, k_doc = reached(keys.pos, -1)[:, :, None], reached(keys.doc)[:, :, None]
        old = visible(q_pos, k_pos[..., :n], q_doc, k_doc[..., :n], W, how.sinks)
        sink = visible(q_pos, k_pos[..., n:n + f], q_doc, k_doc[..., n:n + f])
        sink = sink & (k_pos[..., n:n + f] < how.sinks) & (q_pos - k_pos[..., n:n + f] >= W)   # what the band shows already
        band = visible(q_pos, k_pos[..., n + f:], q_doc, k_doc[..., n + f:], W)
        mask = torch.cat([old.expand(B, N, L, n), sink.expand(B, N, L, f), band], -1).flatten(0, 1)
        bias = None if how.slopes is None else distance_bias(q_pos[..., 0].flatten(0, 1), k_pos[:, :, 0].flatten(0, 1), how.slopes)
        return opened(mask[:, None], bias, q.dtype, how.sink_logit is not None)

    mask, empty = at.once(("band", keys.name, *how.mask_key(), q.dtype, L), make)
    if in_blocks:
        k, v = (torch.cat([t[:, :, :n + f], row(t.transpose(1, 2)).transpose(1, 2)], 2) for t in (k, v))
        q, k, v, how = with_sink(q, k, v, how, False)
        q = F.pad(q * (D ** -0.5 if how.scale is None else how.scale), (0, 0, 0, fill))
        y = bands(q, k, v, mask.view(B, N, L, -1), mask.shape[-1] - reach - L)
        return y.masked_fill(empty.view(B, 1, N * L, 1), 0)[:, :, :T]
    q = own(q.transpose(1, 2)).flatten(0, 1).transpose(1, 2)               # (B N, H, L, D)
    k, v = (reached(t.transpose(1, 2)).flatten(0, 1).transpose(1, 2) for t in (k, v))
    y = fused(q, k, v, mask, how).masked_fill(empty, 0)
    return y.transpose(1, 2).reshape(B, N * L, H, -1)[:, :T].transpose(1, 2)


def flex(q: Tensor, k: Tensor, v: Tensor, at: Positions, keys: Keys, how: How) -> Tensor:
    """torch's flex_attention; its block mask skips what no query of a block sees, and is made once a call for all layers."""
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
    q_pos, q_doc, k_pos, k_doc = at.pos, at.doc, keys.pos, keys.doc
    (B, H, T, _), S, keep = q.shape, k.shape[2], how.keep
    fixed = not isinstance(keep, Tensor)                             # a mask of positions, good for every layer
    keep = keep.expand(B, H, T, S) if isinstance(keep, Tensor) else keep
    by_head = keep is not None and (not callable(keep) or keep(q_pos[0, 0], k_pos[0, 0], torch.arange(H, device=q.device)).dim() > 0)

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = visible(q_pos[b, i], k_pos[b, j], q_doc[b, i], k_doc[b, j], how.window, how.sinks, how.causal)
        if keep is None:
            return seen
        return seen & (keep(q_pos[b, i], k_pos[b, j], h) if callable(keep) else keep[b, h, i, j])

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if how.softcap:
            s = how.softcap * torch.tanh(s / how.softcap)
        return s if how.slopes is None else s - how.slopes[h] * (q_pos[b, i] - k_pos[b, j]).clamp(min=0)

    def blocks() -> BlockMask:
        alike = at.plain and fixed                                   # one mask for all rows
        return create_block_mask(mask, None if alike else B, H if by_head else None, T, S, device=str(q.device))

    block_mask = at.once(("flex", keys.name, *how.mask_key()), blocks) if fixed else blocks()
    run: Any = flex_attention if q.device.type == "cpu" or torch.compiler.is_compiling() else compiled_flex()
    changes = how.softcap or how.slopes is not None
    if q.device.type == "cpu" and not torch.compiler.is_compiling():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")   # compiling takes 17 s there, for nothing
    call = partial(run, q, k, v, score_mod=score if changes else None, block_mask=block_mask, scale=how.scale, enable_gqa=k.shape[1] != H)
    if how.sink_logit is None:
        return call()
    y, aux = call(return_aux=AuxRequest(lse=True))                   # one more score takes weight from all alike
    return y * torch.sigmoid(aux.lse - how.sink_logit[:, None])[..., None].type_as(y)


@cache
def compiled_flex() -> Callable:
    """Uncompiled, flex_attention is slow and holds all scores at once."""
    from torch.nn.attention.flex_attention import flex_attention
    return torch.compile(flex_attention, dynamic=False)


def flash(q: Tensor, k: Tensor, v: Tensor, at: Positions, keys: Keys, how: How) -> Tensor:
    return flash_attention(q, k, v, at, window=how.window, slopes=how.slopes, scale=how.scale, softcap=how.softcap, dropout=how.dropout)


BACKENDS: dict[str, Callable] = {"reference": reference, "sdpa": sdpa, "flex": flex, "flash": flash}
