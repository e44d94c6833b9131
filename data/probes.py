"""Synthetic tasks with known answers, generated: what a way of mixing tokens can recall, copy and find.

Each is `probe(rows, seed, T=..., ...) -> (x, y)`, int64 (rows, T): tokens, and at every position the token that is asked for there, -1
where none is. The same seed gives the same batch. Token 0 is blank.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

VOCAB = 64
IGNORE = -1   # as in ops.loss


def distinct(rng: np.random.Generator, rows: int, n: int, low: int, high: int) -> np.ndarray:
    """(rows, n): n different numbers of low..high-1 in each row, in random order."""
    return rng.random((rows, high - low)).argsort(1)[:, :n] + low


def placed(x: np.ndarray, y: np.ndarray) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(x.astype(np.int64)), torch.from_numpy(y.astype(np.int64))


def mqar(rows: int, seed: int, T: int = 96, pairs: int = 28, power: float = 0.01) -> tuple[Tensor, Tensor]:
    """Multi-query associative recall (Arora et al. 2023, Zoology, arXiv 2312.04927): k1 v1 k2 v2 ..., and then every key once more,
    among blanks, where its value is asked for. Keys are tokens below VOCAB / 2, values the others. How far behind the pairs a key
    comes again follows their power law, p(gap) ~ gap^(power - 1): near is likelier."""
    if 3 * pairs > T or pairs >= VOCAB // 2:
        raise ValueError(f"mqar: {pairs} pairs need T of at least {3 * pairs}, and fewer than {VOCAB // 2} keys are there")
    rng, space = np.random.default_rng([seed, 1]), T - 2 * pairs
    keys, values = distinct(rng, rows, pairs, 1, VOCAB // 2), distinct(rng, rows, pairs, VOCAB // 2, VOCAB)
    x, y = np.zeros((rows, T), int), np.full((rows, T), IGNORE)
    x[:, 0:2 * pairs:2], x[:, 1:2 * pairs:2] = keys, values
    likely = (power - 1) * np.log(np.arange(1, space + 1)) + rng.gumbel(size=(rows, space))     # the largest are a draw without
    at = 2 * pairs + np.argpartition(-likely, pairs - 1, 1)[:, :pairs]                           # replacement (Gumbel, top k)
    at = rng.permuted(at, axis=1)
    np.put_along_axis(x, at, keys, 1)
    np.put_along_axis(y, at, values, 1)
    return placed(x, y)


def induction(rows: int, seed: int, T: int = 64, shortest: int = 4, longest: int = 32) -> tuple[Tensor, Tensor]:
    """Random tokens that begin again (Olsson et al. 2022, In-context Learning and Induction Heads, arXiv 2209.11895): a segment of
    different tokens, of shortest to longest, repeated to the row's end. From its second time on what followed a token is asked for;
    its length changes from row to row, so that distance alone does not tell."""
    rng = np.random.default_rng([seed, 2])
    length = rng.integers(shortest, longest + 1, (rows, 1))
    at = np.arange(T + 1)[None]
    x = np.take_along_axis(distinct(rng, rows, longest, 1, VOCAB), at % length, 1)
    return placed(x[:, :-1], np.where(at[:, :-1] >= length, x[:, 1:], IGNORE))


def selective_copying(rows: int, seed: int, T: int = 64, items: int = 8) -> tuple[Tensor, Tensor]:
    """Some tokens among blanks, to be said again in their order (Gu and Dao 2023, Mamba, arXiv 2312.00752, section 4.1.1; the task is
    of Jing et al. 2019 and Arjovsky et al. 2016): the last `items` positions hold the token 1, and the i-th asks for the i-th."""
    rng, space = np.random.default_rng([seed, 3]), T - items
    said = rng.integers(2, VOCAB, (rows, items))
    x, y = np.zeros((rows, T), int), np.full((rows, T), IGNORE)
    np.put_along_axis(x, np.sort(distinct(rng, rows, items, 0, space), 1), said, 1)
    x[:, space:], y[:, space:] = 1, said
    return placed(x, y)


def needle(rows: int, seed: int, T: int = 128, needles: int = 4) -> tuple[Tensor, Tensor]:
    """Needles in a haystack (Kamradt 2023, github.com/gkamradt/LLMTest_NeedleInAHaystack; several of them: Hsieh et al. 2024, RULER,
    arXiv 2404.06654): within the first quarter keys with their values; in the last quarter each key twice more, where its value is
    asked for; hay everywhere else. Hay is a quarter of the tokens, keys and values share the rest."""
    hay, half = VOCAB // 4, VOCAB // 4 + 3 * VOCAB // 8
    if 8 * needles > T:
        raise ValueError(f"needle: {needles} needles need T of at least {8 * needles}")
    rng, quarter = np.random.default_rng([seed, 4]), T // 4
    keys, values = distinct(rng, rows, needles, hay, half), distinct(rng, rows, needles, half, VOCAB)
    x, y = rng.integers(1, hay, (rows, T)), np.full((rows, T), IGNORE)
    at, asked = 2 * distinct(rng, rows, needles, 0, quarter // 2), distinct(rng, rows, 2 * needles, T - quarter, T)
    np.put_along_axis(x, at, keys, 1)
    np.put_along_axis(x, at + 1, values, 1)
    np.put_along_axis(x, asked, np.tile(keys, 2), 1)
    np.put_along_axis(y, asked, np.tile(values, 2), 1)
    return placed(x, y)


PROBES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "mqar": mqar, "induction": induction, "selective_copying": selective_copying, "needle": needle}

LEVELS: dict[str, tuple[str, tuple[int, ...]]] = {     # an option of each, from easy to hard; training takes them in turn
    "mqar": ("pairs", (4, 8, 16, 28)), "induction": ("longest", (8, 16, 32)), "selective_copying": ("items", (2, 4, 8)),
    "needle": ("T", (32, 64, 128))}
