"""Sparse attention's patterns: who sees whom, as small functions of positions that compose with | and &.

    strided   Local(s) | Strided(s)                 Sparse Transformer (Child et al. 2019, arXiv 1904.10509)
    fixed     Chunk(s) | Columns(s, c)              the same paper
    Longformer, causal (arXiv 2004.05150)           First(g) | Local(w); dilated: Local(d w) & Strided(d)
    BigBird, causal (arXiv 2007.14062)              First(g b) | LocalBlocks(w, b) | RandomBlocks(r, b)
    Llama 4's local layers                          Chunk(c)

`see` is the specification. The rest is for ops/sparse.py, which gathers the keys that a block of queries can see: a union is
a list of `terms`, each an intersection of patterns, and each of those keeps a block of queries to a run of keys (`start`,
`width`), perhaps to every step-th of it. Positions count from the document's beginning. Keys after the query are never seen,
whatever a pattern says: who uses it hides them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor


class Pattern:
    """What a subclass does not say holds for a pattern that leaves nothing out."""

    @property
    def step(self) -> int:
        """Keys seen stand a multiple of it before the query."""
        return 1

    @property
    def block(self) -> int:
        """Queries of one block of so many positions see the same blocks (0: it knows no blocks)."""
        return 0

    @property
    def grain(self) -> int:
        """How many queries share the keys that they see, more or less (0: all)."""
        return self.block

    def see(self, q: Tensor, k: Tensor, head: Tensor) -> Tensor:
        """Positions of queries and keys and numbers of heads, broadcast -> bool."""
        return k <= q

    def __call__(self, q: Tensor, k: Tensor, head: Tensor) -> Tensor:
        """see: so a pattern is a function for attend's `keep`, and equal ones are equal (their bound methods would not be)."""
        return self.see(q, k, head)

    def bound(self) -> tuple[float, float]:
        """(first, window): no query sees a key that is neither among the first nor in its window. What a state must keep."""
        return 0, math.inf

    def terms(self) -> list[tuple[Pattern, ...]]:
        """The pattern as a union of intersections."""
        return [(self,)]

    def start(self, low: Tensor, head: Tensor) -> Tensor:
        """The first key that queries from position `low` on can see."""
        return torch.zeros_like(low)

    def width(self, span: int, within: bool) -> float:
        """How many keys from `start` on hold all that queries over `span` positions see; within: these are in one block."""
        return math.inf

    def __or__(self, other: Pattern) -> Pattern:
        return Either(self, other)

    def __and__(self, other: Pattern) -> Pattern:
        return Both(self, other)


@dataclass(frozen=True)
class Either(Pattern):
    """a | b"""

    a: Pattern
    b: Pattern

    def see(self, q: Tensor, k: Tensor, head: Tensor) -> Tensor:
        return self.a.see(q, k, head) | self.b.see(q, k, head)

    def bound(self) -> tuple[float, float]:
        return widest(self.a, self.b)

    def terms(self) -> list[tuple[Pattern, ...]]:
        return self.a.terms() + self.b.terms()


@dataclass(frozen=True)
class Both(Pattern):
    """a & b"""

    a: Pattern
    b: Pattern

    def see(self, q: Tensor, k: Tensor, head: Tensor) -> Tensor:
        return self.a.see(q, k, head) & self.b.see(q, k, head)

    def bound(self) -> tuple[float, float]:
        return min(self.a.bound(), self.b.bound(), key=sum)

    def terms(self) -> list[tuple[Pattern, ...]]:
        return [x + y for x in self.a.terms() for y in self.b.terms()]


@dataclass(frozen=True)
class Alternate(Pattern):
    """a / b / ...: head h has kinds[h % n]. It stands outside, never within | or &."""

    kinds: tuple[Pattern, ...]

    def see(self, q: Tensor, k: Tensor, head: Tensor) -> Tensor:
        return reduce(torch.logical_or, [kind.see(q, k, head) & (head % len(self.kinds) == i) for i, kind in enumerate(self.kinds)])

    def bound(self) -> tuple[float, float]:
        return widest(*self.kinds)


def widest(*patterns: Pattern) -> tuple[float, float]:
    first, window = zip(*(p.bound() for p in patterns))
    return max(first), max(window)


@dataclass(frozen=True)
class Full(Pattern):
    """full(): every key."""


@dataclass(frozen=True)
class Local(Pattern):
    """local(window): the last `window` keys, the query's own among them."""

    window: int

    @property
    def grain(self) -> int:
        return self.window

    def see(self, q: Tensor, k: Tensor, head: Tensor) -> Tensor:
        return q - k < self.window

    def bound(self) -> tuple[float, float]:
        return 0, self.window

    def start(self, low: Tensor, head: Tensor) -> Tensor:
        return low - self.window + 1

    def width(self, span: int, within: bool) -> float:
        return span + self.window - 1


@dataclass(frozen=True)
class First(Pattern):
    """first(count): the document's first keys. Longformer's global tokens; their own queries see all before them anyway."""

    count: int

    def see(self, q: Tensor, k: Tensor, head: Tensor) -> Tensor:
        return k < self.count

    def bound(self) -> tuple[float, float]:
        return self.count, 1

    def width(self, span: int, within: bool) -> float:
        return self.count


@dataclass(frozen=True)
class Strided(Pattern):
    """strided(stride): the keys whose distance is a multiple of `stride`."""

    stride: int

    @property
    def step(self) -> int:
        return self.stride

    def see(self, q: Tensor, k: Tensor, head: Tensor) -> Tensor:
        return (q - k) % self.stride == 0


@dataclass(frozen=True)
class Columns(Pattern):
    """columns(size, summary=1): the last `summary` keys of every chunk of `size`."""

    size: int
    summary: int = 1

    def __post_init__(self) -> None:
        if self.summary > self.size:
            raise ValueError(f"pattern: summary={self.summary} must be at most size={self.size}")

    def see(self, q: Tensor, k: Tensor, head: Tensor) -> Tensor:
        return k % self.size >= self.size - self.summary


@dataclass(frozen=True)
class LocalBlocks(Pattern):
    """local_blocks(count, size=64): the block of `size` positions that holds the query, and those before it: `count` in all."""

    count: int
    size: int = 64

    @property
    def block(self) -> int:
        return self.size

    def see(self, q: Tensor, k: Tensor, head: Tensor) -> Tensor:
        return q // self.size - k // self.size < self.count

    def bound(self) -> tuple[float, float]:
        return 0, self.count * self.size

    def start(self, low: Tensor, head: Tensor) -> Tensor:
        return (low // self.size - self.count + 1) * self.size

    def width(self, span: int, within: bool) -> float:
        return self.count * self.size + (0 if within else span - 1)


@dataclass(frozen=True)
class RandomBlocks(Pattern):
    """random_blocks(count, size=64, seed=0): `count` of the blocks before the query's own, drawn for each head and block."""

    count: int
    size: int = 64
    seed: int = 0

    def see(self, q: Tensor, k: Tensor, head: Tensor) -> Tensor:
        return reduce(torch.logical_or, [k // self.size == b for b in draw(self.count, q // self.size, head, self.seed)])

    def terms(self) -> list[tuple[Pattern, ...]]:
        return [(RandomBlock(self, i),) for i in range(self.count)]


@dataclass(frozen=True)
class RandomBlock(Pattern):
    """One of the random blocks."""

    of: RandomBlocks
    index: int

    @property
    def block(self) -> int:
        return self.of.size

    def drawn(self, q: Tensor, head: Tensor) -> Tensor:
        return draw(self.of.count, q // self.block, head, self.of.seed)[self.index]

    def see(self, q: Tensor, k: Tensor, head: Tensor) -> Tensor:
        return k // self.block == self.drawn(q, head)

    def start(self, low: Tensor, head: Tensor) -> Tensor:
        return self.drawn(low, head) * self.block

    def width(self, span: int, within: bool) -> float:
        return self.block if within else math.inf


def draw(count: int, block: Tensor, head: Tensor, seed: int) -> list[Tensor]:
    """`count` different numbers below `block` (-1 where there are fewer), every subset as likely as any other (Floyd). A function
    of seed, head and block alone: the same in training and decoding, on every device, at every length."""
    key, chosen = scramble(scramble(block * 0 + seed) + head), []  # type: ignore[var-annotated]
    key = scramble(key + block)
    for i in range(count):
        top = block - count + i
        number = scramble(key + i) % (top + 1).clamp(min=1)
        taken = reduce(torch.logical_or, [number == c for c in chosen], number < 0)
        chosen.append(torch.where(top < 0, -1, torch.where(taken, top, number)))
    return chosen


def scramble(x: Tensor) -> Tensor:
    """Integers below 2^31 for integers below 2^32, as if by chance; no product passes 2^63."""
    for factor in (0x45D9F3B, 0x3C6EF372 | 1, 0x27D4EB2F):
        x = ((x ^ (x >> 15)) * factor) & 0x7FFFFFFF
    return x ^ (x >> 16)


def Chunk(size: int) -> Pattern:
    """chunk(size): the keys of the query's own chunk of `size` positions."""
    return LocalBlocks(1, size)


def Fixed(size: int, summary: int = 1) -> Pattern:
    """fixed(size, summary=1): the query's own chunk of `size` positions, and the last `summary` keys of every chunk."""
    return Chunk(size) | Columns(size, summary)


def table(pattern: Pattern, T: int, head: int = 0) -> Tensor:
    """(T, T) bool: who sees whom in a document of T tokens."""
    pos = torch.arange(T)
    return pattern.see(pos[:, None], pos, torch.tensor(head)).expand(T, T) & (pos <= pos[:, None])


def picture(pattern: Pattern, T: int, heads: int = 1) -> str:
    """A line a query, a column a key, # where it is seen; several heads side by side."""
    tables = [table(pattern, T, head).tolist() for head in range(heads)]
    return "\n".join("   ".join("".join(".#"[seen] for seen in row) for row in rows) for rows in zip(*tables))
