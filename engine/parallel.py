"""Data parallelism by torchrun: which rank am I, which device is mine, sums over all ranks. Alone, all of it does nothing."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.device import pick_device
from engine.log import say

TIMEOUT = timedelta(minutes=10)   # how long a rank waits for one that has died or hangs


class Ranks:
    """Joins the others that torchrun started: `rank` of `size`, `first` for the one that logs and saves, and its `device`."""

    def __init__(self, device: str):
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.first = self.rank == 0
        if self.size > 1 and device in ("auto", "cuda") and torch.cuda.is_available():
            device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        self.device = pick_device(device)
        if self.device.index is not None:
            torch.cuda.set_device(self.device)
        if self.size > 1 and not dist.is_initialized():
            on_cuda = self.device.type == "cuda"
            dist.init_process_group("nccl" if on_cuda else "gloo", timeout=TIMEOUT, device_id=self.device if on_cuda else None)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The same model, whose backward averages the gradients over the ranks."""
        self.wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True) if self.size > 1 else model
        return self.wrapped

    def sync(self, wanted: bool) -> AbstractContextManager:
        """Around forward and backward of a micro-step: whether its backward sends gradients (the last of a step alone does)."""
        return contextlib.nullcontext() if wanted or self.size == 1 else self.wrapped.no_sync()  # type: ignore[operator]

    def sum(self, t: Tensor) -> Tensor:
        """Over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(t)
        return t

    def any(self, here: bool) -> bool:
        """Whether it is so on any rank."""
        return here if self.size == 1 else bool(self.sum(torch.tensor(float(here), device=self.device)))

    def say(self, text: str) -> None:
        if self.first:
            say(text)

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """The first rank goes ahead alone; the others then find what it has made."""
        if self.size > 1 and not self.first:
            dist.barrier()
        yield
        if self.size > 1 and self.first:
            dist.barrier()


def leave() -> None:
    """At the end of a script, after the last rank has come there: to exit before tears the others' connections. Several ranks end
    without the interpreter's farewell, in which a thread of gloo's now and then aborts a process whose work is done."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
