"""A token's last inputs: what token shifts (RWKV) and short convolutions (Mamba, delta rules) read."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.positions import Positions


def shift(x: Tensor, n: int, at: Positions, past: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
    """x (B, T, C) and past (B, n, C), the n inputs before it (None: zeros) -> [x_t, x_(t-1), ..., x_(t-n)], each (B, T, C) and zero
    before its document's start; and the last n inputs (B, n, C), zero where they are of an older document. Padding is stepped over."""
    _, T, C = x.shape
    row = F.pad(x, (0, 0, n, 0)) if past is None else torch.cat([past.to(x.dtype), x], 1)                 # (B, n + T, C)
    if not at.given:
        return [row[:, n - j:n - j + T] for j in range(n + 1)], row[:, T:]
    i, first = torch.arange(n + T, device=x.device), at.first[:, None]
    i = torch.where(i < first + n, (i - first).clamp(min=0), i)            # the past stands right before the first token
    row = row.gather(1, i[..., None].expand(-1, -1, C))
    out = [row[:, n - j:n - j + T] * (at.pos >= j)[..., None] for j in range(n + 1)]
    end, i = torch.where(at.end > 0, at.end, T)[:, None], torch.arange(n, device=x.device)                # no token: the past itself
    last = at.pos.gather(1, end - 1).masked_fill(at.end[:, None] == 0, n)
    return out, row.gather(1, (end + i)[..., None].expand(-1, -1, C)) * (last >= n - 1 - i)[..., None]


def short_conv(x: Tensor, weight: Tensor, bias: Tensor | None, at: Positions, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x (B, T, C) -> each channel's weighted sum of its last K inputs (B, T, C), and those that the next tokens need (B, K - 1, C), as
    `shift` has them. weight (C, K): the newest input's is the last, as in nn.Conv1d(C, C, K, groups=C)."""
    K, weight, bias = weight.shape[1], weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if not at.given:
        row = F.pad(x, (0, 0, K - 1, 0)) if past is None else torch.cat([past.to(x.dtype), x], 1)
        return F.conv1d(row.mT, weight[:, None], bias, groups=x.shape[2]).mT, row[:, x.shape[1]:]
    inputs, tail = shift(x, K - 1, at, past)
    y = torch.stack([w * t for w, t in zip(weight.flip(1).T, inputs)]).sum(0)
    return (y if bias is None else y + bias), tail
