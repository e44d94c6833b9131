"""Batches by arithmetic: which windows a step sees is a pure function of (seed, step, rank), so there is no state to save."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch

from data.shards import Split

MASK64 = (1 << 64) - 1


@lru_cache(maxsize=16)
def keys(seed: int, epoch: int) -> tuple[int, ...]:
    """Five pseudo-random 64-bit numbers: four for the rounds of `permuted`, one for the grid's offset."""
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=40).digest()
    return tuple(int.from_bytes(digest[i : i + 8], "little") for i in range(0, 40, 8))


def permuted(place: int, n: int, key: tuple[int, ...]) -> int:
    """Where `place` goes in a pseudo-random permutation of range(n), in O(1) memory.

    A Feistel network of four rounds permutes the numbers of 2 * half bits; those that fall outside range(n) are
    sent round again until they fall inside (cycle walking; Black and Rogaway 2002): at most four times on average.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for k in key[:4]:
            mixed = ((right ^ k) * 0x9E3779B97F4A7C15) & MASK64
            mixed = ((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9) & MASK64
            left, right = right, left ^ ((mixed >> 32) & mask)
        place = left << half | right
        if place < n:
            return place


class Loader:
    """Windows of block_size + 1 tokens: every one of an epoch's grid exactly once, in pseudo-random order.

    rows: of the global step, all ranks and micro-batches together; rank r of `ranks` takes the r-th part, so that the
    number of ranks does not change what a step sees. Each epoch's grid begins at another offset.
    """

    def __init__(self, split: Split, block_size: int, rows: int, seed: int, rank: int = 0, ranks: int = 1):
        if rows < 1 or rows % ranks:
            near = " or ".join(str(n) for n in (rows // ranks * ranks, (rows // ranks + 1) * ranks) if n)
            raise ValueError(f"{rows} rows a step (batch_size x gradient_accumulation_steps) do not divide over {ranks} ranks: "
                             f"{near} rows would")
        if len(split) < block_size + 1:
            raise ValueError(
                f"the split {split.name!r} in {split.folder} has {len(split)} tokens and block_size is {block_size}: it needs at "
                f"least block_size + 1 = {block_size + 1}; give it more text or lower --block_size"
            )
        self.split, self.block_size, self.rows, self.seed, self.rank, self.ranks = split, block_size, rows, seed, rank, ranks
        self.windows = (len(split) - 1) // block_size   # of an epoch

    def start(self, g: int) -> int:
        """The first token of window number g of the whole run."""
        epoch, place = divmod(g, self.windows)
        key = keys(self.seed, epoch)
        offset = key[4] % (len(self.split) - self.windows * self.block_size)
        return offset + permuted(place, self.windows, key) * self.block_size

    def row(self, g: int) -> np.ndarray:
        """Window number g of the whole run, (block_size + 1,) int64."""
        return self.split.read(self.start(g), self.block_size + 1)

    def batch(self, step: int) -> torch.Tensor:
        """(rows / ranks, block_size + 1) int64: inputs are [:, :-1], targets [:, 1:]."""
        own = self.rows // self.ranks
        first = step * self.rows + self.rank * own
        return torch.from_numpy(np.stack([self.row(g) for g in range(first, first + own)]))


class FixedWindows:
    """The same windows each time it is iterated, for evaluation: pairs (x, y) of (rows, block_size) int64.

    batches=None: the whole split in order, every token but the first a target exactly once; the last window is padded
    (x with 0, y with -1, where nothing is to be predicted) and the last batch may have fewer rows.
    batches=k: k batches of whole windows spread evenly; each window once if the split has fewer.
    """

    def __init__(self, split: Split, block_size: int, rows: int, batches: int | None = None):
        needs = 2 if batches is None else block_size + 1
        if len(split) < needs:
            raise ValueError(
                f"the split {split.name!r} in {split.folder} has {len(split)} tokens and block_size is {block_size}: it needs at "
                f"least {needs}{'' if batches is None else ' = block_size + 1'}; give it more text or lower --block_size"
            )
        whole = (len(split) - 1) // block_size
        if batches is None:
            self.starts = range(0, len(split) - 1, block_size)
        else:
            n = min(batches * rows, whole)
            self.starts = [i * whole // n * block_size for i in range(n)]   # type: ignore[assignment]
        self.split, self.block_size, self.rows = split, block_size, rows

    def __len__(self) -> int:
        return -(-len(self.starts) // self.rows)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for i in range(0, len(self.starts), self.rows):
            starts = self.starts[i : i + self.rows]
            x = torch.zeros(len(starts), self.block_size, dtype=torch.int64)
            y = torch.full_like(x, -1)
            for row, start in enumerate(starts):
                n = min(self.block_size, len(self.split) - 1 - start)
                window = torch.from_numpy(self.split.read(start, n + 1))
                x[row, :n], y[row, :n] = window[:-1], window[1:]
            yield x, y
