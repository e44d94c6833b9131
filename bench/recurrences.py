"""What chunks are worth: every operation whose past is a state of fixed size, forward and backward, by the loop over tokens that is its
specification and by what runs, in turns in one run; full causal attention of the same heads beside them."""

from __future__ import annotations

import json
from dataclasses import dataclass

from config.check import check_fields, check_range
from engine.cli import parse


@dataclass
class RecurrencesConfig:
    """One row, 12 heads of 64, for the selective scan 1,536 channels of 16; float32 (bfloat16 on CUDA but for the loops); eager."""

    T: int = 2048
    """tokens; the loops keep a state for each, for backward"""
    heads: int = 12
    """whose states are 64 x 64"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps"""

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "T", least=2)
        check_range(self, "heads", above=0)


if __name__ == "__main__":
    config = parse(RecurrencesConfig)

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.checks import recurrences
from bench.mixers import Calls, in_turns
from engine.device import keep_memory, pick_device
from ops.positions import Positions
from ops.scan import scan
from ops.shift import short_conv


def training(f: Callable, inputs: list[Tensor | None], at: Positions, backend: str) -> Callable[[], object]:
    x = [t if t is None else t.detach().requires_grad_() for t in inputs]
    leaves = [t for t in x if t is not None]

    def call() -> object:
        y, _ = f(*x, at, backend=backend)
        return torch.autograd.grad(y, leaves, torch.ones_like(y))
    return call


def convolution(x: Tensor, weight: Tensor, bias: Tensor, at: Positions, backend: str) -> tuple[Tensor, None]:
    """The short convolution; in place of a loop torch's own."""
    if backend == "naive":
        return F.conv1d(F.pad(x, (0, 0, weight.shape[1] - 1, 0)).mT, weight[:, None], bias, groups=x.shape[2]).mT, None
    return short_conv(x, weight, bias, at)[0], None


def operations(T: int, H: int, device: torch.device, dtype: torch.dtype) -> dict[str, tuple[Callable, list[Tensor | None]]]:
    """`bench.checks.recurrences` with one row; the selective scan and the short convolution (conv1d in the loop's place) of twice as
    many channels."""
    E, N = 2 * 64 * H, 16
    draw = lambda *shape: torch.randn(*shape, device=device, generator=torch.Generator(device).manual_seed(0))
    selective: list[Tensor | None] = [draw(1, T, E), draw(1, T, E).sigmoid() / 10, -draw(E, N).exp(), draw(1, T, N), draw(1, T, N)]
    short: list[Tensor | None] = [draw(1, T, E), draw(E, 4), draw(E)]
    return {**recurrences(device, dtype, T, 1, H), "selective scan": (scan, selective), "conv1d, blocks": (convolution, short)}


def main(config: RecurrencesConfig) -> list[dict]:
    keep_memory()
    device = pick_device(config.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    at, T, H = Positions(1, config.T, device), config.T, config.heads
    q, k, v = (torch.randn(1, H, T, 64, device=device, dtype=dtype).requires_grad_() for _ in "qkv")
    full = lambda: torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), torch.ones_like(v))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, {torch.get_num_threads()} threads"
    print(f"{H} heads of 64, {T:,} tokens, {str(dtype)[6:]}, forward and backward; {name}, torch {torch.__version__}\n"
          f"{'':16} {'loop ms':>10} {'chunks ms':>10} {'loop/chunks':>12} {'full attention/chunks':>22}")
    found: list[dict] = []
    for word, (f, x) in operations(T, H, device, dtype).items():
        calls: Calls = {"loop": training(f, x, at, "naive"), "chunks": training(f, x, at, "auto"), "full": full}
        s = in_turns(calls, device, partial(lambda word, name, e: print(f"{word}, {name}: {type(e).__name__}: {e}"), word))
        if len(s) == len(calls):
            loop, chunks, full_s = (s[name] for name in calls)
            found.append({"operation": word, "loop_s": loop, "chunks_s": chunks, "full_s": full_s})
            print(f"{word:16} {1e3 * loop:10,.1f} {1e3 * chunks:10,.1f} {loop / chunks:12.1f} {full_s / chunks:22.2f}")
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main(config)
