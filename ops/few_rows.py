"""Linear layers for generation: weights in float32, bfloat16, int8 or int4, and on a CPU a kernel (few_rows.cpp) that reads them as fast
as memory gives them where x has a few rows: one token, some rows side by side, some guesses ahead.

int8: a scale for each output, w is about code * scale. int4: a scale and a zero for 32 channels of an output, 5 bits a weight in all.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.processor import cpu_multiplies_bf16, processor
from ops.quantize import dequantized, packed, quantized

GROUP = 32
BITS = {"int8": 8, "int4": 4}
FEW = 16   # rows up to which the kernel beats torch: float32 12 ms against 16 at one row, 14 against 33 at 4, 31 against 41 at 16; int8 4,
           # 6 and 21 (24 matrices of 3072 x 768; 2 cores of an AVX2 EPYC, 2026-11-30)
BUILT: list = []     # the kernels, once they are


@cache
def kernel() -> Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor] | None:
    """few_rows(x (..., K), W, scale, bias) -> x W^T + bias (..., N), built at its first use and kept under ~/.cache/heed; None, and a line
    that says why, where there is no compiler."""
    source = Path(__file__).with_suffix(".cpp")
    parts = torch.__version__, processor(), source.read_text(encoding="utf-8"), Path(__file__).read_text(encoding="utf-8")
    version = hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "heed" / f"few_rows-{version}"
    try:
        from torch.utils.cpp_extension import load
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):           # torch waits for ever for a build that was interrupted
            if time.time() - (folder / "lock").stat().st_mtime > 300:
                (folder / "lock").unlink()
        if not list(folder.glob("*.so")):
            print("building the kernel for few rows, once on this machine: about half a minute", file=sys.stderr)
        threads = [] if sys.platform == "darwin" else ["-fopenmp"]           # without it at::parallel_for takes one; Apple's has none
        load("heed_few_rows", [str(source)], extra_cflags=["-O3", "-march=native", "-std=c++20", *threads], extra_ldflags=threads,
             build_directory=str(folder), is_python_module=False)
    except (ImportError, OSError, RuntimeError) as e:
        reason = next((line for line in str(e).splitlines() if "error:" in line), type(e).__name__)[:150]
        print(f"no fast kernel for few rows ({reason}): generation goes on without; it takes a C++20 compiler and pip install ninja",
              file=sys.stderr)
        return None
    if not BUILT:
        torch.library.register_fake("heed::few_rows")(lambda x, w, scale, bias: x.new_empty(*x.shape[:-1], len(w)))
        torch.library.register_fake("heed::one_query")(lambda q, k, v, mask, scale: torch.empty_like(q))
        torch.library.register_fake("heed::mlp")(lambda x, *layers: torch.empty_like(x))
        BUILT.append(torch.ops.heed)
    return torch.ops.heed.few_rows


def one_query(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor | None:
    """Attention of one query a row, q (B, H, 1, D), over k and v (B, G, S, D), where the kernel has been built and takes it; else None.
    mask: as F.scaled_dot_product_attention has it."""
    D = q.shape[-1]
    if not BUILT:
        return None
    fits = q.shape[2] == 1 and D % 16 == 0 and v.shape[-1] == D and k.stride(3) == v.stride(3) == 1
    fits = fits and k.dtype == v.dtype and k.dtype in (torch.float32, torch.bfloat16)
    if not fits or q.device.type != "cpu" or torch.is_grad_enabled():
        return None
    if mask is not None:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask
        mask = mask if mask.shape[-1] == k.shape[2] else mask.expand(-1, -1, -1, k.shape[2])
    return torch.ops.heed.one_query(q, k, v, mask, D**-0.5 if scale is None else scale)


class FewRows(nn.Module):
    """nn.Linear of weights that no longer change, in `bits` 8 or 4, or as they are."""

    codes: Tensor
    scale: Tensor | None
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, bits: int | None):
        super().__init__()
        w = linear.weight.detach()
        self.bits, self.dtype, self.in_features, scale = bits, w.dtype, linear.in_features, None
        self.fast = w.device.type == "cpu" and linear.in_features % GROUP == 0 and kernel() is not None
        if bits == 8:
            scale = w.float().abs().amax(1).clamp(min=1e-12) / 127
            w = (w.float() / scale[:, None]).round().to(torch.int8)
        elif bits == 4:
            codes, scale = quantized(w.unflatten(1, (-1, GROUP)), 4, -1)
            w, scale = packed(codes, 4).flatten(1), scale[:, :, 0].contiguous()
        self.register_buffer("codes", w.contiguous(), persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("bias", linear.bias, persistent=False)

    @property
    def weight(self) -> Tensor:
        """(out, in), as the codes say."""
        return self.weight_as(self.dtype)

    def weight_as(self, dtype: torch.dtype) -> Tensor:
        if self.bits is None or self.scale is None:
            return self.codes.to(dtype)
        wide = dtype if dtype.itemsize > 2 else torch.float32
        if self.bits == 8:
            return (self.codes.to(wide) * self.scale[:, None]).to(dtype)
        return dequantized(self.codes.unflatten(1, (-1, GROUP // 2)), self.scale[:, :, None], 4, wide).flatten(1).to(dtype)

    def few(self, x: Tensor) -> bool:
        """Whether the kernel takes x."""
        gradients = torch.is_grad_enabled() and x.requires_grad
        return self.fast and x.device.type == "cpu" and 0 < x.numel() // x.shape[-1] <= FEW and not gradients

    def forward(self, x: Tensor) -> Tensor:
        if not self.few(x):
            emulated = x.device.type == "cpu" and not cpu_multiplies_bf16()          # bfloat16 would take 90 times as long
            wide = torch.float32 if emulated else x.dtype
            return F.linear(x.to(wide), self.weight_as(wide), None if self.bias is None else self.bias.to(wide)).to(x.dtype)
        return torch.ops.heed.few_rows(x, self.codes, self.scale, self.bias)
