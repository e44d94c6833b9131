"""A token's last inputs: what token shifts (RWKV) and short convolutions (Mamba, delta rules) read."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ops.positions import Positions

BLOCK = 256       # rows times tokens whose inputs, outputs and gradients stay in a core's cache


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
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            return InBlocks.apply(row, weight, bias), row[:, x.shape[1]:]
        return F.conv1d(row.mT, weight[:, None], bias, groups=x.shape[2]).mT, row[:, x.shape[1]:]
    inputs, tail = shift(x, K - 1, at, past)
    y = torch.stack([w * t for w, t in zip(weight.flip(1).T, inputs)]).sum(0)
    return (y if bias is None else y + bias), tail


class InBlocks(torch.autograd.Function):
    """The convolution on a CPU, faster than conv1d (bench.recurrences): row (B, K - 1 + T, C), weight (C, K), bias (C,) or
    None -> (B, T, C). Inside at least in float32."""

    @staticmethod
    def forward(ctx, row: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(row, weight)
        ctx.bias = bias is not None
        dtype = torch.promote_types(row.dtype, torch.float32)
        K, w = weight.shape[1], weight.to(dtype)
        start = torch.zeros_like(w[:, 0]) if bias is None else bias.to(dtype)
        y = row.new_empty(len(row), row.shape[1] - K + 1, row.shape[2])
        for part in blocks(y):
            x = row[:, part.start:part.stop + K - 1].to(dtype)
            n, out = part.stop - part.start, start
            for j in range(K):
                out = torch.addcmul(out, x[:, j:j + n], w[:, j])
            y[:, part] = out
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        row, weight = ctx.saved_tensors
        dtype = torch.promote_types(row.dtype, torch.float32)
        K, w = weight.shape[1], weight.to(dtype)
        d_row, d_w, d_bias = torch.empty_like(row), torch.zeros_like(w.T), w.new_zeros(len(w))
        late = w.new_zeros(len(row), K - 1, len(w))            # what the block before has given to inputs of this one
        for part in blocks(g):
            x, d, n = row[:, part.start:part.stop + K - 1].to(dtype), g[:, part].to(dtype), part.stop - part.start
            d_x = torch.cat([late, w.new_zeros(len(row), n, len(w))], 1)
            for j in range(K):
                d_x[:, j:j + n].addcmul_(d, w[:, j])
                d_w[j] += (d * x[:, j:j + n]).sum((0, 1))
            d_bias += d.sum((0, 1))
            d_row[:, part], late = d_x[:, :n], d_x[:, n:]
        d_row[:, g.shape[1]:] = late
        return d_row, d_w.T.to(weight.dtype), d_bias.to(weight.dtype) if ctx.bias else None


def blocks(y: Tensor) -> list[slice]:
    """Of the tokens of y (B, T, C)."""
    n = max(1, BLOCK // max(1, len(y)))
    return [slice(a, min(a + n, y.shape[1])) for a in range(0, y.shape[1], n)]
