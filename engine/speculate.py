"""Speculative decoding (Leviathan et al. 2022, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318): somebody guesses the next tokens,
the model reads all of them at once, and keeps as many as it would have written itself. What comes out has exactly the distribution of
the model's own text. Guesses come from a smaller model (`Draft`) or from the text itself (`Lookup`, Saxena 2023: prompt look-up)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from data.tokenizer import Tokenizer
from engine.checkpoint import load_model
from engine.decode import prepare
from model import GPT, State

if TYPE_CHECKING:
    from engine.generate import Row


Likely = Callable[["Row", Tensor, list[int]], Tensor]


@dataclass
class Guess:
    """ids that may come next; probs: for each the distribution it was drawn from, (V,), None: it was certain."""

    ids: list[int] = field(default_factory=list)
    probs: list[Tensor] | None = None


class Reader:
    """A model and its state, which can unread. A state whose keys lie by position is cut back by its length; others (rings, recurrent
    ones) are copied before, and read again what stays."""

    def __init__(self, model: GPT):
        self.model = model
        self.state: State | None = None
        self.cuts = all(block.mixer.cuts() and not block.shifts for block in model.blocks)  # type: ignore[operator,union-attr]

    def mark(self) -> None:
        """From here on `keep` may unread."""
        assert self.state is not None
        self.length = self.state.length.clone()
        self.texts: list[list[int]] = [[] for _ in self.length]
        self.before = None if self.cuts else self.state.rows(torch.arange(len(self.texts), device=self.length.device))

    def read(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """The next ids of each row, or none -> logits (B, T, V), a row's own at its front."""
        self.texts = [[*old, *new] for old, new in zip(self.texts, texts)]
        return self.feed(texts)

    def feed(self, texts: Sequence[Sequence[int]]) -> Tensor:
        assert self.state is not None
        device, T = self.state.length.device, max(map(len, texts))
        tokens = torch.tensor([[*ids, *[0] * (T - len(ids))] for ids in texts], device=device)
        if min(map(len, texts)) == T:
            return self.model(tokens, state=self.state)
        at = torch.arange(T, device=device)
        here = at < torch.tensor([len(ids) for ids in texts], device=device)[:, None]
        return self.model(tokens, pos=torch.where(here, self.state.length[:, None] + at, -1), state=self.state)

    def keep(self, counts: Sequence[int]) -> None:
        """Unreads, of what was read since `mark`, all but the first `counts` of each row's ids."""
        if list(counts) == list(map(len, self.texts)):
            return
        if self.before is None:
            assert self.state is not None
            self.state.length.copy_(self.length + torch.tensor(counts, device=self.length.device))
        else:
            self.state = self.before
            if any(counts):
                self.feed([ids[:n] for ids, n in zip(self.texts, counts)])


class Guesser:
    """Guesses at most `ahead` ids for each row; `readers` are of its own models, which read along."""

    ahead: int
    readers: Sequence[Reader] = ()

    def guess(self, rows: list[Row], rooms: list[int], likely: Likely) -> list[Guess]:
        """At most so many for each row. likely(row, logits (V,), ids since): the distribution that the row's options make of them."""
        raise NotImplementedError

    def accepted(self, rows: list[Row], counts: list[int]) -> None:
        """How many of each row's guesses stay; one id more has come since."""


class Lookup(Guesser):
    """What came after the last place in the text that ends as it does now."""

    def __init__(self, ahead: int = 8, longest: int = 3):
        self.ahead, self.longest = ahead, longest

    def guess(self, rows: list[Row], rooms: list[int], likely: Likely) -> list[Guess]:
        return [Guess(self.found(row.ids)[:room]) for row, room in zip(rows, rooms)]

    def found(self, ids: list[int]) -> list[int]:
        for n in range(min(self.longest, len(ids) - 1), 0, -1):
            end = ids[-n:]
            for i in range(len(ids) - n - 1, -1, -1):
                if ids[i:i + n] == end:
                    return ids[i + n:i + n + self.ahead]
        return []


class Draft(Guesser):
    """A smaller model of the same vocabulary writes the guesses, as the row's options say."""

    def __init__(self, model: GPT, ahead: int = 4):
        self.ahead, self.reader = ahead, Reader(model)
        self.readers = [self.reader]

    def guess(self, rows: list[Row], rooms: list[int], likely: Likely) -> list[Guess]:
        self.guesses: list[Guess] = [Guess([], []) for _ in rows]
        self.late = [row.ids[-row.lag:] if room else [] for row, room in zip(rows, rooms)]      # what this model has not read
        self.reader.mark()
        texts: list[list[int]] = self.late
        for j in range(max(rooms)):
            logits = self.reader.read(texts)
            texts = [[] for _ in rows]
            for i, (row, room) in enumerate(zip(rows, rooms)):
                if j < room:
                    g = self.guesses[i]
                    p = likely(row, logits[i, len(self.late[i]) - 1 if j == 0 else 0], g.ids)
                    g.ids.append(drawn(p, row))
                    g.probs.append(p)  # type: ignore[union-attr]
                    texts[i] = g.ids[-1:] if j + 1 < room else []
        return self.guesses

    def accepted(self, rows: list[Row], counts: list[int]) -> None:
        keep = []
        for row, n, g, late in zip(rows, counts, self.guesses, self.late):
            k = len(g.ids)
            keep.append(len(late) + min(n, k - 1) if k else 0)           # the last guess was not read
            row.lag = row.lag + 1 if not k else 1 + (n == k)
        self.reader.keep(keep)


def drawn(p: Tensor, row: Row) -> int:
    return int(p.argmax()) if row.options.temperature == 0 else int(torch.multinomial(p.cpu(), 1, generator=row.draws))


def judged(row: Row, logits: Tensor, g: Guess, likely: Likely) -> list[int]:
    """logits (len(g.ids) + 1, V) of the model -> the guesses that stay, and the id that comes after them: a guess drawn from q stays with
    probability p / q; where it does not, the id is drawn from what p has more than q."""
    ids: list[int] = []
    for j, x in enumerate(logits):
        p = likely(row, x, ids)
        if j == len(g.ids):
            return [*ids, drawn(p, row)]
        d = g.ids[j]
        q = torch.zeros_like(p).index_fill_(0, torch.tensor([d], device=p.device), 1) if g.probs is None else g.probs[j]
        if row.options.temperature == 0:
            ids.append(int(p.argmax()))
            if ids[-1] != d:
                return ids
        elif float(torch.rand(1, generator=row.draws)) < float(p[d] / q[d]):
            ids.append(d)
        else:
            rest = (p - q).clamp(min=0)
            return [*ids, drawn(rest / rest.sum() if rest.sum() > 0 else p, row)]
    raise AssertionError


def guesser(draft: str | None, lookup: bool, ahead: int | None, model: GPT, tokenizer: Tokenizer, quantize: str | None,
            rope_scaling: str | None) -> Guesser | None:
    """Who guesses ahead for `model`, if anybody does: the checkpoint `draft`, its like in device, type and context, or look-up. ValueError
    for both."""
    if lookup and draft:
        raise ValueError("give --draft or --lookup, one of them")
    if lookup:
        return Lookup(ahead or 8)
    if draft is None:
        return None
    w = model.wte.weight
    small, its = load_model(draft, w.device, rope_scaling=rope_scaling)
    if its.hash != tokenizer.hash:
        raise ValueError(f"the draft {draft} has another tokenizer: train it on a corpus prepared with the same one")
    if small.cfg.block_size < model.cfg.block_size:
        print(f"the draft's context is {small.cfg.block_size}, less than the model's {model.cfg.block_size}, and so is that of the text",
              file=sys.stderr)
    small = small.to(w.dtype)
    prepare(small, quantize)
    return Draft(small, ahead or 4)
