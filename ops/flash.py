"""Dao's FlashAttention packages (arXiv 2205.14135, 2307.08691, 2407.08608), where they are installed: half precision on CUDA, causal
rows or packed documents. 4 is flash-attn-4, 3 is built from flash-attention's folder hopper, 2 is flash-attn."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.positions import Positions

# the module of each version, and the GPU generations (major compute capability) that it is made for; the best come first
MODULES = {3: ("flash_attn_interface", (9,)), 4: ("flash_attn.cute", (9, 10, 11)), 2: ("flash_attn", (8, 9, 10, 11, 12))}


def installed() -> dict[int, ModuleType]:
    """What can be imported, built for this torch, and has both functions."""
    found = {}
    for version, (name, _) in MODULES.items():
        try:
            module = import_module(name)
            module.flash_attn_func, module.flash_attn_varlen_func  # noqa: B018
            found[version] = module
        except Exception:
            continue
    return found


INSTALLED = installed() if torch.cuda.is_available() else {}


def version() -> int:
    """2, 3 or 4: which package runs on this GPU; 0: none."""
    if not INSTALLED:
        return 0
    major = torch.cuda.get_device_properties(torch.cuda.current_device()).major     # what torch.compile folds to a constant
    return next((version for version in INSTALLED if major in MODULES[version][1]), 0)


def refuses(version: int, D: int, dropout: float, softcap: float, slopes: bool) -> str:
    """Why this version cannot do it ('' if it can)."""
    if not version:
        return "no flash-attn package is installed that fits this GPU"
    widest = 128 if version == 4 else 256
    if D % 8 or widest < D:
        return f"flash-attn {version} takes heads of up to {widest} channels, a multiple of 8"
    if version > 2 and (dropout or slopes):
        return f"flash-attn {version} has no dropout and no ALiBi"
    return "flash-attn 2 has no dropout beside a soft-cap" if dropout and softcap else ""


def flash_attention(q: Tensor, k: Tensor, v: Tensor, at: Positions, *, window: int = 0, slopes: Tensor | None = None,
                    scale: float | None = None, softcap: float = 0.0, dropout: float = 0.0) -> Tensor:
    """q (B, H, T, D), k (B, G, T, D), v (B, G, T, V <= D), all in half precision -> (B, H, T, V). Rows with several documents or
    padding go as one sequence of all their tokens, cut where documents begin; padding gives 0.

    A window of W keys counts the query, which the packages do not: theirs is (W - 1, 0).
    """
    found = version()
    module = INSTALLED[found]
    (B, H, T, D), V = q.shape, v.shape[-1]
    q, k, v = (t.transpose(1, 2) for t in (q, k, F.pad(v, (0, D - V))))                    # (B, T, H or G, D)
    options: dict = dict(softmax_scale=scale, causal=True, softcap=softcap)
    if window:
        options["window_size"] = (window - 1, 0)
    if found == 2:
        options |= dict(dropout_p=dropout, alibi_slopes=None if slopes is None else slopes.float())
    if at.plain:
        y = module.flash_attn_func(q, k, v, **options)
    else:
        cuts, longest = at.once("cuts", lambda: cut(at))
        y = module.flash_attn_varlen_func(*(t.flatten(0, 1) for t in (q, k, v)), cu_seqlens_q=cuts, cu_seqlens_k=cuts, max_seqlen_q=longest,
                                          max_seqlen_k=longest, **options)
    y = y[0] if isinstance(y, tuple) else y                                                # some versions add the log-sum-exp
    y = y.reshape(B, T, H, D)[..., :V].transpose(1, 2)
    return y if at.plain else y.masked_fill((at.pos < 0)[:, None, :, None], 0)


def cut(at: Positions) -> tuple[Tensor, int]:
    """Where sequences begin and the last one ends, among all B T tokens (int32), and the length of the longest. Padding is a
    sequence too: what it gives is dropped."""
    begins = at.pos == 0
    begins[:, 1:] |= (at.pos[:, 1:] < 0) != (at.pos[:, :-1] < 0)
    begins[:, 0] = True
    cuts = F.pad(begins.flatten().nonzero()[:, 0], (0, 1), value=begins.numel()).int()
    return cuts, int(cuts.diff().max())
