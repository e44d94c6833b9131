"""What a run reads: one corpus, or several by weight, `--dataset fineweb_edu:0.8,python:0.2`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import get_args

import numpy as np

from data.find import find, is_name
from data.loader import FixedWindows, Loader
from data.tokenizer import Published

SHARED = ("byte", *get_args(Published))   # tokenizers that no corpus has made for itself: another corpus may have a variant with it
PERIOD = 1000   # rows after which the weights are met exactly; so they count in thousandths


class Mixture:
    """The corpora that `dataset` names and their weights, which add up to 1. They share the tokenizer of the first: with
    fineweb_edu in gpt2's, `python` is data/python_gpt2."""

    def __init__(self, dataset: str):
        self.weights = weights(dataset)
        self.corpora = {name: find(name) for name in self.weights}
        (first, corpus), *others = self.corpora.items()
        kind = corpus.meta.get("settings", {}).get("tokenizer")
        for name, other in others:
            if other.tokenizer.hash != corpus.tokenizer.hash and kind in SHARED and is_name(name):
                other = self.corpora[name] = find(f"{name}_{kind}")
            if other.tokenizer.hash != corpus.tokenizer.hash:
                raise ValueError(f"{first} and {name} have different tokenizers: prepare both with one of {', '.join(SHARED)}")
        self.tokenizer, self.vocab_size = corpus.tokenizer, corpus.vocab_size

    def train(self, block_size: int, rows: int, seed: int, rank: int = 0, ranks: int = 1) -> Loader:
        loaders = [Loader(c.split("train"), block_size, rows, seed, rank, ranks) for c in self.corpora.values()]
        return loaders[0] if len(loaders) == 1 else MixedLoader(loaders, list(self.weights.values()))

    def val(self, block_size: int, rows: int, batches: int | None = None) -> dict[str, FixedWindows]:
        """Each corpus's validation windows; the loss of a mixture is the weighted mean of theirs."""
        return {name: FixedWindows(corpus.split("val"), block_size, rows, batches) for name, corpus in self.corpora.items()}

    def epochs(self, tokens: int) -> dict[str, tuple[float, int]]:
        """How often `tokens` of training go over each corpus, and its size."""
        sizes = {name: len(corpus.split("train")) for name, corpus in self.corpora.items()}
        return {name: (tokens * self.weights[name] / max(1, n), n) for name, n in sizes.items()}


def weights(dataset: str) -> dict[str, float]:
    """`a:3,b:1` -> {"a": 0.75, "b": 0.25}; without a weight it is 1. A path may hold colons and, if it exists, commas."""
    words = [dataset] if Path(dataset).exists() else [word.strip() for word in dataset.split(",")]
    found: dict[str, float] = {}
    for word in words:
        name, colon, tail = word.rpartition(":")
        weight = None
        with contextlib.suppress(ValueError):
            weight = float(tail) if colon and not Path(word).exists() else None
        name, weight = (word, 1.0) if weight is None else (name, weight)
        if not name or not 0 < weight < float("inf") or name in found:
            raise ValueError(f"dataset={dataset!r}: write NAME:WEIGHT,NAME:WEIGHT, each name once and each weight above 0")
        found[name] = weight
    return {name: weight / sum(found.values()) for name, weight in found.items()}


def shares(weights: list[float]) -> list[int]:
    """Rows of each in PERIOD, at least one, by largest remainders."""
    exact = [weight * PERIOD for weight in weights]
    counts = [max(1, int(e)) for e in exact]
    for i in sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])[:max(0, PERIOD - sum(counts))]:
        counts[i] += 1
    counts[counts.index(max(counts))] -= sum(counts) - PERIOD
    return counts


class MixedLoader(Loader):
    """Rows of several loaders in a fixed order drawn from the seed, each corpus in its own order without repeats in its epoch."""

    def __init__(self, loaders: list[Loader], weights: list[float]):
        first = loaders[0]
        super().__init__(first.split, first.block_size, first.rows, first.seed, first.rank, first.ranks)
        self.loaders, self.counts = loaders, shares(weights)
        self.order = np.random.default_rng(first.seed).permutation(np.repeat(np.arange(len(loaders)), self.counts))    # (PERIOD,)
        self.before = np.stack([(self.order == k).cumsum() - (self.order == k) for k in range(len(loaders))])

    def turn(self, g: int) -> tuple[int, int]:
        """Row g of the run is the n-th of corpus k: (k, n)."""
        period, i = divmod(g, PERIOD)
        k = int(self.order[i])
        return k, period * self.counts[k] + int(self.before[k, i])

    def row(self, g: int) -> np.ndarray:
        k, n = self.turn(g)
        return self.loaders[k].row(n)
