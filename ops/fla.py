"""flash-linear-attention's Triton kernels, where `fla-core` is installed: `recurrence`, `delta_rule` and `rwkv7` in half precision on CUDA.

Elsewhere, and in float32, which their products round to TF32, this repository's own chunks run.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from ops.flash import cut
from ops.positions import Positions

# the module below fla.ops of each function that is called here
MODULES = {"chunk_simple_gla": "simple_gla", "chunk_gla": "gla", "chunk_rwkv6": "rwkv6", "chunk_delta_rule": "delta_rule",
           "chunk_gated_delta_rule": "gated_delta_rule", "chunk_kda": "kda", "chunk_rwkv7": "rwkv7"}
WIDEST = 256       # channels of a key: kda and the delta rules take no more


def kernel(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    return getattr(import_module(f"fla.ops.{MODULES[name]}"), name)


def installed() -> str:
    """Its version; '' where it is not there, or not for this torch."""
    try:
        for name in MODULES:
            kernel(name)
        return str(import_module("fla").__version__)
    except Exception:      # whatever a package made for another torch raises when it is imported
        return ""


VERSION = installed() if torch.cuda.is_available() else ""     # a constant to torch.compile


def half(x: Tensor) -> torch.dtype:
    """What products of x are computed in."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) and x.dtype != torch.float64 else x.dtype


def takes(device: str, dtype: torch.dtype, K: int = 64) -> bool:
    """Whether its kernels do it, for keys of K channels."""
    return device == "cuda" and dtype in (torch.bfloat16, torch.float16) and K <= WIDEST and bool(VERSION)


def backend(mixer: object, device: str, dtype: torch.dtype, training: bool) -> str:
    """Mixer.backend of those that call these."""
    return f"fla {VERSION}" if takes(device, dtype) else ""


@torch.compiler.disable     # where sequences begin is read from the device
def run(name: str, at: Positions, h: Tensor | None, wide: dict[str, Tensor], exact: dict[str, Tensor],
        **constants) -> tuple[Tensor, Tensor]:
    """The kernel on tensors (B, H, T, ...), `wide` in half precision and `exact` in float32, and h (B, H, K, V) -> y (B, H, T, V) and the
    last h, in float32. Documents and padding are sequences of their own in one row; padding's are dropped."""
    (B, H, T), dtype = wide["v"].shape[:3], half(wide["v"])
    inputs = {k: t.to(dtype).transpose(1, 2) for k, t in wide.items()} | {k: t.float().transpose(1, 2) for k, t in exact.items()}
    h = None if h is None else h.float()
    cuts, first = None, h
    if at.given:
        cuts, row, goes_on, last = at.once("sequences", lambda: sequences(at))
        inputs = {k: t.flatten(0, 1)[None] for k, t in inputs.items()}
        first = None if h is None else torch.where(goes_on[:, None, None, None], h[row], 0)
    inputs = {k: t.contiguous() for k, t in inputs.items()}
    with torch.autocast(wide["v"].device.type, enabled=False):
        y, end = kernel(name)(**inputs, **constants, scale=1.0, initial_state=first, output_final_state=True, cu_seqlens=cuts)
    if at.given:
        empty = (at.end == 0)[:, None, None, None]
        end = torch.where(empty, torch.zeros_like(end[last]) if h is None else h, end[last])
    return y.view(B, T, H, -1).transpose(1, 2).float(), end.float()


def sequences(at: Positions) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where sequences begin among all B T tokens, and the last one's end (N + 1,); of each, its row and whether it goes on with the
    state (N,); of each row, the sequence of its last token (B,)."""
    cuts, T = cut(at)[0].long(), at.pos.shape[1]
    begin, ends = cuts[:-1], torch.arange(len(at.pos), device=cuts.device) * T + (at.end - 1).clamp(min=0)
    return cuts, begin // T, at.pos.flatten()[begin] > 0, torch.searchsorted(cuts, ends, right=True) - 1


def recurrence(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, at: Positions, bonus: Tensor | None,
               h: Tensor | None) -> tuple[Tensor, Tensor]:
    """ops.recurrence.recurrence."""
    (B, _, T, _), state_heads = k.shape, v.shape[1]
    a = None if log_decay is None else log_decay[:, None].expand(B, -1, T) if log_decay.dim() == 1 else log_decay
    H = max(q.shape[1], state_heads)
    q, k, v = (t.repeat_interleave(H // t.shape[1], 1) for t in (q, k, v))
    h, a = (t if t is None else t.repeat_interleave(H // t.shape[1], 1) for t in (h, a))
    if bonus is not None:
        a = k.new_zeros(k.shape) if a is None else a[..., None].expand(k.shape) if a.dim() == 3 else a
        y, h = run("chunk_rwkv6", at, h, dict(r=q, k=k, v=v), dict(w=a), u=bonus.repeat_interleave(H // len(bonus), 0).float())
    elif a is not None and a.dim() == 4:
        y, h = run("chunk_gla", at, h, dict(q=q, k=k, v=v), dict(g=a))
    else:
        y, h = run("chunk_simple_gla", at, h, dict(q=q, k=k, v=v), {} if a is None else dict(g=a))
    return y, h[:, ::H // state_heads]


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, at: Positions,
               h: Tensor | None) -> tuple[Tensor, Tensor]:
    """ops.delta_rule.delta_rule."""
    q, k = (t.repeat_interleave(v.shape[1] // t.shape[1], 1) for t in (q, k))
    wide = dict(q=q, k=k, v=v)
    if log_decay is None:
        return run("chunk_delta_rule", at, h, {**wide, "beta": beta}, {})
    return run("chunk_kda" if log_decay.dim() == 4 else "chunk_gated_delta_rule", at, h, wide, dict(g=log_decay, beta=beta))


def rwkv7(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, at: Positions, h: Tensor | None) -> tuple[Tensor, Tensor]:
    """ops.rwkv7.rwkv7."""
    return run("chunk_rwkv7", at, h, dict(r=r, k=k, v=v, a=a, b=b), dict(w=log_w))
