"""Numbers in 8 or 4 bits: x is about code * scale + zero, with one scale and zero for what stands along a dimension."""

from __future__ import annotations

import torch
from torch import Tensor


def quantized(x: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor]:
    """codes (uint8, as x) and (scale, zero) in the last place behind x's sizes, 1 along `dim`, float16: min and max are met, what is
    between is off by half a scale at most, and by what float16 rounds."""
    x = x.float()
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    pair = torch.stack([(high - low) / (2**bits - 1), low], -1).half()
    scale, zero = pair.float().unbind(-1)
    return ((x - zero) / scale.clamp(min=1e-8)).round().clamp(0, 2**bits - 1).byte(), pair


def dequantized(codes: Tensor, pair: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """`packed` codes and their (scale, zero) -> numbers."""
    scale, zero = pair.to(dtype).unbind(-1)
    return unpacked(codes, bits) * scale + zero


def packed(codes: Tensor, bits: int) -> Tensor:
    """Two 4-bit codes to a byte, the first half of the channels in the low nibbles: (..., D) -> (..., D / 2); 8 bits as they are."""
    if bits == 8:
        return codes
    low, high = codes.chunk(2, -1)
    return low | high << 4


def unpacked(codes: Tensor, bits: int) -> Tensor:
    return codes if bits == 8 else torch.cat([codes & 15, codes >> 4], -1)
