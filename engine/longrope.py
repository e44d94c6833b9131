"""LongRoPE's search (Ding et al. 2024, arXiv 2402.13753, algorithm 1): which divisors of RoPE's frequencies, one for each pair of channels,
let a model read texts `factor` times as long with the least loss."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ops.rope import NTK, YaRN, inverse_frequencies

STARTS = (0, 1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 64, 128, 256)    # the paper's choices
DIGITS = 2                                                       # divisors lie on a grid of 0.01, as the authors' code has it
LARGEST = 1e9                                                    # loss of what gives no number; JSON has no infinity
TRIES = 20                                                       # for a crossover that is new and monotone


class Factors(NamedTuple):
    """A point of the search: `start` first positions keep their frequencies; pair i's is divided by divisors[i], none below 1 or below the
    one before, as fast pairs need the least."""

    start: int
    divisors: tuple[float, ...]

    def monotone(self, most: float) -> bool:
        return all(a <= b for a, b in zip((1.0, *self.divisors), (*self.divisors, most)))


@dataclass(frozen=True)
class Plan:
    """Of each of `iterations` generations, the best `parents` stay and have so many `mutations` and `crossovers`. The paper has 64, 40, 32,
    16, 16."""

    population: int = 64
    iterations: int = 40
    parents: int = 32
    mutations: int = 16
    crossovers: int = 16
    chance: float = 0.3        # that a mutation redraws a number, that a crossover considers one
    seed: int = 1337

    def evaluations(self) -> int:
        """At most."""
        return self.population + self.iterations * (self.mutations + self.crossovers)


class Losses(dict[Factors, float]):
    """Losses that are known, kept in a file, so that a search that was stopped goes on. ValueError where that is of other settings."""

    def __init__(self, file: Path, settings: dict[str, Any]):
        self.file, self.settings = file, json.loads(json.dumps(settings))
        if file.is_file():
            saved = json.loads(file.read_text(encoding="utf-8"))
            if saved["settings"] != self.settings:
                raise ValueError(f"{file} is of a search with other settings: give that one's, or name another --out_dir")
            super().__init__((Factors(start, tuple(divisors)), value) for start, divisors, value in saved["points"])

    def keep(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"settings": self.settings, "points": [[p.start, p.divisors, value] for p, value in self.items()]})
        new = self.file.with_suffix(".new")
        new.write_text(text, encoding="utf-8")
        os.replace(new, self.file)


def known(D: int, theta: float, original: int, factor: float) -> list[Factors]:
    """Where the search begins: YaRN, position interpolation, NTK, as divisors."""
    w, reach = inverse_frequencies(D, theta), torch.zeros(1)
    yarn = w / YaRN(factor=factor, original=original).frequencies(D, theta, reach)
    ntk = w / NTK(factor=factor).frequencies(D, theta, reach)
    return [Factors(0, tuple(round(float(f), DIGITS) for f in divisors)) for divisors in (yarn, torch.full_like(w, factor), ntk)]


def mutant(parent: Factors, most: float, starts: Sequence[int], draw: random.Random, chance: float) -> Factors:
    """Each number, perhaps, anew between its neighbours, so that the order stays."""
    f = [1.0, *parent.divisors, most]
    for i in range(1, len(f) - 1):
        if draw.random() < chance:
            f[i] = min(max(round(draw.uniform(f[i - 1], f[i + 1]), DIGITS), f[i - 1]), f[i + 1])
    start = draw.choice(starts) if draw.random() < chance else parent.start
    return Factors(start, tuple(f[1:-1]))


def crossed(a: Factors, b: Factors, draw: random.Random, chance: float) -> Factors:
    """a, with some of b's numbers."""
    take = lambda x, y: y if draw.random() < chance and draw.random() < 0.5 else x
    return Factors(take(a.start, b.start), tuple(take(x, y) for x, y in zip(a.divisors, b.divisors)))


def largest(factor: float) -> float:
    """Divisor of a search for texts `factor` times as long, as in the paper."""
    return round(1.25 * factor, DIGITS)


def search(loss: Callable[[Factors], float], begin: list[Factors], factor: float, starts: Sequence[int], plan: Plan,
           memo: dict[Factors, float], note: Callable[[float], None] = lambda best: None) -> tuple[Factors, list[float]]:
    """The best point found, and the best loss after each generation. starts: which may be tried.

    memo: losses that are known, which are not computed again, and get those that are; the draws depend on the seed and on the losses alone,
    so that a search that was stopped goes on by its memo. note(best loss) follows every point.
    """
    most, draw = largest(factor), random.Random(plan.seed)
    best = math.inf

    def cost(point: Factors) -> float:
        nonlocal best
        assert point.monotone(most), point
        if point not in memo:
            value = loss(point)
            memo[point] = value if math.isfinite(value) else LARGEST
        best = min(best, memo[point])
        note(best)
        return memo[point]

    people = list(dict.fromkeys(begin))[:plan.population]
    while len(people) < plan.population:
        people.append(mutant(draw.choice(begin), most, starts, draw, plan.chance))
    people, course, seen = sorted(people, key=cost), [], set(people)
    for _ in range(plan.iterations):
        people = people[:plan.parents]
        children = []
        for i in range(plan.mutations + plan.crossovers):
            child = mutant(draw.choice(people), most, starts, draw, plan.chance)
            for _ in range(TRIES if i >= plan.mutations and len(people) > 1 else 0):
                one, other = draw.sample(people, 2)
                mixed = crossed(one, other, draw, plan.chance)
                if mixed.monotone(most) and mixed not in seen:
                    child = mixed
                    break
            children.append(child)
            seen.add(child)
        people = sorted([*people, *sorted(children, key=cost)], key=memo.__getitem__)
        course.append(memo[people[0]])
    return people[0], course
