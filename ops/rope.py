"""Positions by rotation (RoPE, Su et al. 2021, arXiv 2104.09864), by sinusoids (Vaswani et al. 2017, arXiv 1706.03762)
and by distance (ALiBi, Press et al. 2022, arXiv 2108.12409). No table with a largest length anywhere."""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_frequencies(D: int, theta: float = 10000.0, device: torch.device | None = None) -> Tensor:
    """(D/2,): radians a position for each pair of channels, theta^(-2i/D)."""
    return theta ** (-torch.arange(0, D, 2, device=device, dtype=widest(device)) / D)


def widest(device: torch.device | None) -> torch.dtype:
    """float64, where the device has it: float32 angles at position 131,072 change scores by 2e-3."""
    return torch.float32 if device is not None and device.type == "mps" else torch.float64


def angles(pos: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """pos (B, T) -> cos and sin (B, 1, T, D/2) in float32, whatever the model's dtype or autocast."""
    a = pos.clamp(min=0)[:, None, :, None].to(inv_freq.dtype) * inv_freq
    return a.cos().float(), a.sin().float()


def rope_table(pos: Tensor, D: int, theta: float) -> tuple[Tensor, Tensor]:
    """`angles` of D channels with base theta."""
    return angles(pos, inverse_frequencies(D, theta, pos.device))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str = "half") -> Tensor:
    """Turns the pairs of x (B, H, T, D) by their angles. Pairs are (i, i + D/2) in the "half" layout of Hugging Face's
    checkpoints, (2i, 2i + 1) in the "interleaved" one of Meta's; scores agree after permuting the rows of W_q and W_k."""
    if layout == "half":
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).type_as(x)
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)                   # (B, H, T, D/2) each
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).type_as(x)


def sinusoids(pos: Tensor, C: int) -> Tensor:
    """pos (B, T) -> (B, T, C): sin and cos in alternating channels, added to the embedding."""
    cos, sin = angles(pos, inverse_frequencies(C + C % 2, device=pos.device))
    return torch.stack([sin, cos], -1).flatten(-2)[:, 0, :, :C]


def alibi_slopes(H: int) -> list[float]:
    """One slope a head: 2^(-8h/H) for a power of two; otherwise those of the next lower power, then every second of the next."""
    n = 1 << (H.bit_length() - 1)
    slopes = [2 ** (-8 * h / n) for h in range(1, n + 1)]
    return slopes + [2 ** (-4 * h / n) for h in range(1, 2 * n + 1, 2)][:H - n]
