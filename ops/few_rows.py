"""Linear layers for generation: weights in float32, bfloat16, int8 or int4, and on a CPU a kernel (few_rows.cpp) that reads them as fast
as memory gives them where x has a few rows: one token, some rows side by side, some guesses ahead.

int8: a scale for each output, w is about code * scale. int4: a scale and a zero for 32 channels of an output, 5 bits a weight in all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.quantize import dequantized, packed, quantized

GROUP = 32
BITS = {"int8": 8, "int4": 4}
FEW = 8    # rows up to which the kernel beats torch: int8 6 ms against float32's 19 at one row, 27 against 45 at 8, 60 against 39 at 16
           # (24 matrices of 3072 x 768; 2 cores of an AVX2 EPYC, 2026-11-30)


@cache
def kernel() -> Callable[[Tensor, Tensor, Tensor | None], Tensor] | None:
    """few_rows(x (M, K) float32, W, scale) -> x W^T (M, N), built at its first use and kept in torch's cache of extensions; None, and a
    line that says why, where there is no compiler."""
    try:
        from torch.utils.cpp_extension import load
        load("heed_few_rows", [str(Path(__file__).with_suffix(".cpp"))], extra_cflags=["-O3", "-march=native", "-std=c++20"],
             is_python_module=False)
    except (ImportError, OSError, RuntimeError) as e:
        reason = next((line for line in str(e).splitlines() if "error" in line.lower()), type(e).__name__)[:150]
        print(f"no fast kernel for few rows ({reason}): generation goes on without; it takes a C++20 compiler and pip install ninja",
              file=sys.stderr)
        return None
    return torch.ops.heed.few_rows


class FewRows(nn.Module):
    """nn.Linear of weights that no longer change, in `bits` 8 or 4, or as they are."""

    codes: Tensor
    scale: Tensor | None
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, bits: int | None):
        super().__init__()
        w = linear.weight.detach()
        self.bits, self.dtype, scale = bits, w.dtype, None
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

    def forward(self, x: Tensor) -> Tensor:
        K = x.shape[-1]
        rows = x.numel() // K
        run = kernel() if 0 < rows <= FEW and x.device.type == "cpu" and K % GROUP == 0 else None
        if run is None:
            return F.linear(x, self.weight_as(x.dtype), self.bias)
        y = run(x.reshape(rows, K).float().contiguous(), self.codes, self.scale).view(*x.shape[:-1], -1)
        return (y if self.bias is None else y + self.bias).to(x.dtype)


def for_generation(model: nn.Module, bits: int | None = None) -> float:
    """Replaces every linear layer, the head too (a tied embedding keeps its own matrix), in place; int4 leaves those whose inputs are no
    multiple of 32. Returns the share of the layers' weights that were."""
    of = done = 0
    for parent in list(model.modules()):
        for name, m in list(parent.named_children()):
            if isinstance(m, nn.Linear):
                fits = bits != 4 or m.in_features % GROUP == 0
                of, done = of + m.weight.numel(), done + m.weight.numel() * fits
                if fits:
                    setattr(parent, name, FewRows(m, bits))
    return done / max(1, of)
