"""Text from a model: prefill the prompts, then a token a row a step, through the mixers' state alone."""

from __future__ import annotations

import codecs
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from data.tokenizer import Tokenizer
from engine.device import compiled
from engine.speculate import Guess, Guesser, Reader, judged
from model import GPT, State

PIECE = 1024      # tokens a row of a prompt that are taken in at once
LARGEST = 1e6     # of a penalty, a bias, a temperature: far from where float32 overflows


@dataclass(frozen=True)
class Options:
    """How a text goes on. What is given acts in the order of the fields; temperature 0 takes the likeliest."""

    repetition_penalty: float = 1.0
    """divides the logits, where above 0, of tokens in prompt or text, and multiplies those below (Keskar et al. 2019, arXiv 1909.05858)"""
    presence_penalty: float = 0.0
    """is taken off the logits of tokens that the text has, the prompt aside"""
    frequency_penalty: float = 0.0
    """is taken off once for every time that it has them"""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(id, what is added to its logit)"""
    min_new_tokens: int = 0
    """before so many none of stop_ids is drawn"""
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    max_new_tokens: int = 500
    stop_ids: tuple[int, ...] = ()
    """which end a text; they are its last token"""
    logprobs: int | None = None
    """log probabilities of what was drawn and of so many likeliest alternatives, by the model itself, before all of the above"""

    def __post_init__(self) -> None:
        numbers = {"repetition_penalty": self.repetition_penalty, "presence_penalty": self.presence_penalty,
                   "frequency_penalty": self.frequency_penalty, "temperature": self.temperature,
                   **{f"logit_bias of {i}": b for i, b in self.logit_bias}}
        for name, value in numbers.items():
            if not abs(value) <= LARGEST:            # nor NaN: logits must stay numbers, or the draw fails for all rows
                raise ValueError(f"{name}={value} must be between -{LARGEST:g} and {LARGEST:g}")


def probabilities(logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None,
                  min_p: float | None = None) -> Tensor:
    """logits (B, V) -> (B, V) in float32. In this order: temperature, the top_k likeliest, the fewest that make up top_p, and
    those at least min_p times as likely as the likeliest. temperature > 0."""
    logits = logits.float()
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature      # at most 0: no temperature overflows
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k)[0][:, -1:], -torch.inf)
    p = logits.softmax(-1)
    if top_p is not None:
        likely, order = p.sort(descending=True)
        before = likely.cumsum(-1) - likely                          # what is likelier makes up so much
        p = p.masked_fill((before >= top_p).scatter(-1, order, before >= top_p), 0)
    if min_p is not None:
        p = p.masked_fill(p < min_p * p.amax(-1, keepdim=True), 0)
    return p / p.sum(-1, keepdim=True)


def adjusted(logits: Tensor, prompt: Iterable[int], new: Counter[int], o: Options) -> Tensor:
    """logits (V,) with what `Options` says of penalties, bias and tokens that may not come yet; new: how often the text has each id."""
    x = logits.clone()
    if o.repetition_penalty != 1:
        seen = torch.tensor(list({*prompt, *new}), device=x.device)
        x[seen] = torch.where(x[seen] > 0, x[seen] / o.repetition_penalty, x[seen] * o.repetition_penalty)
    if new and (o.presence_penalty or o.frequency_penalty):
        ids, counts = (torch.tensor(t, device=x.device) for t in zip(*new.items()))
        x[ids] -= o.presence_penalty + o.frequency_penalty * counts
    for i, bias in o.logit_bias:
        x[i] += bias
    if new.total() < o.min_new_tokens:
        x[list(o.stop_ids)] = -torch.inf
    return x


def plain(o: Options) -> bool:
    """Whether `adjusted` changes nothing, whatever came before."""
    return o.repetition_penalty == 1 and not (o.presence_penalty or o.frequency_penalty or o.logit_bias or o.min_new_tokens)


def prefill(model: GPT, prompts: Sequence[Sequence[int]], max_len: int, reach: Sequence[int] | None = None) -> State:
    """Takes prompts of any lengths in as one batch, PIECE tokens at a time, padded behind, so that each is cut where it would be alone;
    an empty one leaves its row empty. reach: what each may come to with its text (None: max_len)."""
    device, T = model.wte.weight.device, max(map(len, prompts))
    tokens = torch.tensor([list(p) + [0] * (T - len(p)) for p in prompts], device=device, dtype=torch.long)
    pos = torch.tensor([list(range(len(p))) + [-1] * (T - len(p)) for p in prompts], device=device)
    state = model.init_state(len(prompts), max_len)
    if reach is not None:
        state.reach.copy_(torch.tensor(reach))
    for a in range(0, T, PIECE):
        model.hidden(tokens[:, a:a + PIECE], None if min(map(len, prompts)) == T else pos[:, a:a + PIECE], state)
    return state


@dataclass
class Row:
    """A text in progress."""

    key: int
    ids: list[int]                                   # the last that the model has read, and at their end what it will read next
    options: Options
    draws: torch.Generator
    prompt: set[int]
    reach: int | None = None                         # tokens that the text may come to, if they are known beforehand
    new: Counter[int] = field(default_factory=Counter)
    count: int = 0                                   # new tokens
    read: int = 0                                    # tokens that the state holds
    lag: int = 1                                     # of ids, the last that a draft has not read
    done: bool = False


@dataclass(frozen=True)
class Drawn:
    key: int
    id: int
    logprob: float | None
    top: list[tuple[int, float]]
    last: bool               # nothing comes after it


class Batch:
    """Texts in progress, at most `width` side by side in one state. One that ends makes room for the next that waits, in its place.

    Every text is as it would be alone: its draws depend on its seed. Ids from `vocab_size` on, with which a vocabulary is padded, are
    never drawn. `overflow` says what comes of text longer than block_size: "half" goes on from its last half, read anew, and a longer
    prompt counts by its end; "slide" goes on in the state, which must be one that takes text of any length; "refuse" makes a longer prompt
    an error, and ends a full text. None is "slide" where kv_cache drops keys, else "half".
    `speculate` guesses ahead; then a step brings a row one token or more, in order. `compile` compiles the step of a token a row: once for
    the first, once more for all lengths that follow.
    """

    def __init__(self, model: GPT, width: int = 64, vocab_size: int | None = None, overflow: str | None = None,
                 speculate: Guesser | None = None, compile: bool = False):
        self.next = compiled(model, compile, model.wte.weight.device)    # a token a row
        self.model, self.width, self.vocab_size, self.speculate = model, width, vocab_size, speculate
        self.reader = Reader(model)
        self.readers = [self.reader, *(speculate.readers if speculate else [])]
        for r in self.readers:
            r.state = None                           # of a batch before
        self.context = min(r.model.cfg.block_size for r in self.readers)
        endless = all(r.model.wpe is None and all(block.mixer.endless(self.context) for block in r.model.blocks)  # type: ignore[operator,union-attr]
                      for r in self.readers)
        if speculate and not all(block.mixer.by_pieces() for r in self.readers for block in r.model.blocks):  # type: ignore[operator,union-attr]
            raise ValueError(f"kv_cache={model.cfg.kv_cache} keeps what depends on how many tokens are read at once, so that speculating "
                             "would change the text: leave one of them")
        self.overflow = overflow or ("slide" if endless and model.cfg.kv_cache != "full" else "half")
        if self.overflow == "slide" and not endless:
            raise ValueError("overflow=slide needs a state that holds text of any length, which not all of this model's layers have: "
                             "try --kv_cache=streaming(), or half")
        self.rows: list[Row] = []
        self.waiting: deque[Row] = deque()
        self.steps = self.drawn = 0                  # of a row: what speculating saves is their ratio

    def add(self, key: int, prompt: Sequence[int], options: Options, seed: int, reach: int | None = None) -> None:
        """reach: as many tokens may the text come to before it is read anew, by which RoPE scalings that depend on it choose (None: the
        prompt and max_new_tokens, or the context if that is less)."""
        if not prompt:
            raise ValueError("a prompt needs at least one token")
        if self.overflow == "refuse" and len(prompt) > self.context:
            raise ValueError(f"a prompt of {len(prompt):,} tokens does not fit into block_size={self.context}: shorten it, or choose "
                             "another overflow")
        ids = list(prompt if self.overflow == "slide" else prompt[-self.context:])
        draws = torch.Generator().manual_seed(seed)
        self.waiting.append(Row(key, ids, options, draws, set(ids), reach, done=options.max_new_tokens < 1))

    def drop(self, key: int) -> None:
        """Ends a text now, whether it is in progress or still waits."""
        for row in (*self.rows, *self.waiting):
            row.done = row.done or row.key == key

    @torch.no_grad()
    def go_on(self, more: Sequence[int]) -> None:
        """After the only text has ended: it goes on, from its cache, with these ids read after what it has."""
        (row,) = self.rows
        unread = [row.ids[-1], *more][:-1]
        row.ids += more
        row.prompt, row.new, row.count, row.done = row.prompt | row.new.keys() | set(more), Counter(), 0, False
        if self.overflow == "slide" or len(row.ids) <= self.context:     # else `admit` reads its last half
            for a in range(0, len(unread), PIECE):
                piece = unread[a:a + PIECE]
                self.model.hidden(torch.tensor([piece], device=self.model.wte.weight.device), state=self.reader.state)
            row.read, row.lag = row.read + len(unread), row.lag + len(more)

    @torch.no_grad()
    def step(self) -> list[Drawn]:
        """A token or more for every row, in order; [] once there are none."""
        self.admit()
        if not self.rows:
            return []
        speculate = self.speculate
        guesses = speculate.guess(self.rows, self.rooms(speculate.ahead), self.likely) if speculate else [Guess() for _ in self.rows]
        if any(g.ids for g in guesses):
            self.reader.mark()
            logits = self.known(self.reader.read([[row.ids[-1], *g.ids] for row, g in zip(self.rows, guesses)]))
            found = [judged(row, x[:len(g.ids) + 1], g, self.likely) for row, x, g in zip(self.rows, logits, guesses)]
        else:
            last = torch.tensor([[row.ids[-1]] for row in self.rows], device=self.model.wte.weight.device)
            logits = self.known(self.next(last, state=self.reader.state))
            found = [[i] for i in self.draw(logits[:, -1])]
        out, came = [], list[int]()
        for row, ids, xs in zip(self.rows, found, logits):
            came.append(0)
            for i, x in zip(ids, xs):
                came[-1] += 1
                row.read += 1
                row.ids.append(i)
                row.new[i] += 1
                row.count += 1
                full = self.overflow == "refuse" and row.read == self.context
                row.done = i in row.options.stop_ids or row.count == row.options.max_new_tokens or full
                out.append(Drawn(row.key, i, *told(x, i, row.options.logprobs), row.done))
                if row.done:
                    break
        self.steps, self.drawn = self.steps + len(came), self.drawn + sum(came)
        if any(g.ids for g in guesses):
            self.reader.keep(came)
        if speculate:
            speculate.accepted(self.rows, [n - 1 for n in came])
        return out

    def rooms(self, ahead: int) -> list[int]:
        """How many guesses each row has a use for."""
        left = [row.options.max_new_tokens - row.count - 1 for row in self.rows]
        return [min(ahead, n, n if self.overflow == "slide" else self.context - row.read - 1) for n, row in zip(left, self.rows)]

    def known(self, logits: Tensor) -> Tensor:
        if self.vocab_size is not None:
            logits[..., self.vocab_size:] = -torch.inf
        return logits

    def likely(self, row: Row, logits: Tensor, ids: list[int]) -> Tensor:
        """What is drawn from, (V,), after these ids more; certain at temperature 0."""
        o, x = row.options, self.known(logits)
        if not plain(o):
            x = adjusted(x, row.prompt, row.new + Counter(ids), o)
        if o.temperature == 0:
            return torch.zeros_like(x).index_fill_(0, x.argmax(), 1)
        return probabilities(x[None], o.temperature, o.top_k, o.top_p, o.min_p)[0]

    def admit(self) -> None:
        """Rows that are done leave, those that wait take their places, and full ones start again from their last half."""
        self.waiting = deque(row for row in self.waiting if not row.done)
        free = [i for i, row in enumerate(self.rows) if row.done]
        places, fresh = [], []                       # of rows whose text up to the last id is read now
        for i, row in enumerate(self.rows):
            if self.overflow == "slide":
                row.ids = row.ids if len(row.ids) < 2 * self.context else row.ids[-self.context:]
            elif not row.done and len(row.ids) > self.context:
                row.ids = row.ids[-max(1, self.context // 2):]
                places.append(i)
                fresh.append(row)
        while self.waiting and (free or len(self.rows) < self.width):
            row = self.waiting.popleft()
            if not free:
                self.rows.append(row)
            i = free.pop(0) if free else len(self.rows) - 1
            self.rows[i] = row
            places.append(i)
            fresh.append(row)
        reaches = [row.reach or min(self.context, len(row.ids) + row.options.max_new_tokens - row.count) for row in fresh]
        asked = [(tuple(row.ids[:-1]), reach) for row, reach in zip(fresh, reaches)]
        unique = list(dict.fromkeys(asked))          # samples of one prompt share its prefill
        stay = [i for i in range(len(self.rows)) if i not in free]
        for reader in self.readers:
            if fresh:
                state = prefill(reader.model, [ids for ids, _ in unique], self.context, [reach for _, reach in unique])
                put = state.rows(torch.tensor([unique.index(a) for a in asked], device=state.length.device))
                reader.state = placed(reader.state, put, places)
            if free and reader.state is not None:    # fewer rows from now on
                reader.state = reader.state.rows(torch.tensor(stay, device=reader.state.length.device)) if stay else None
        for row in fresh:
            row.read, row.lag = len(row.ids) - 1, 1
        self.rows = [self.rows[i] for i in stay]
        for reader in self.readers:
            if reader.state is not None:
                reader.state.past = max(row.read for row in self.rows)

    def draw(self, logits: Tensor) -> list[int]:
        """An id a row; rows with the same options at once."""
        ids, groups = [0] * len(self.rows), dict[Options, list[int]]()
        for i, row in enumerate(self.rows):
            groups.setdefault(row.options, []).append(i)
        for o, members in groups.items():
            x = logits if len(members) == len(logits) else logits[members]
            if not plain(o):
                x = torch.stack([adjusted(x_, self.rows[i].prompt, self.rows[i].new, o) for x_, i in zip(x, members)])
            if o.temperature == 0:
                found = (x.numpy() if x.device.type == "cpu" else x).argmax(-1).tolist()     # torch's takes 13 times as long on a CPU
            else:
                p = probabilities(x, o.temperature, o.top_k, o.top_p, o.min_p).cpu()
                found = [int(torch.multinomial(p_, 1, generator=self.rows[i].draws)) for p_, i in zip(p, members)]
            for i, found_id in zip(members, found):
                ids[i] = found_id
        return ids


def placed(state: State | None, new: State, places: list[int]) -> State:
    """`state` with the rows of `new` in these places, of which those beyond its rows come in order."""
    if state is None:
        return new
    n = len(state.length)
    inside, beyond = ([j for j, i in enumerate(places) if (i < n) == here] for here in (True, False))
    slots = torch.tensor([places[j] for j in inside], device=state.length.device, dtype=torch.long)
    layers = [(a[name], b[name]) for a, b in zip(state.layers, new.layers) for name in a]
    for old, t in [(state.length, new.length), (state.reach, new.reach), *layers]:
        old[slots] = t[inside]
    if not beyond:
        return state
    more = new.rows(torch.tensor(beyond, device=state.length.device))
    joined = [{name: torch.cat([a[name], b[name]]) for name in a} for a, b in zip(state.layers, more.layers)]
    return State(torch.cat([state.length, more.length]), joined, torch.cat([state.reach, more.reach]), state.past, state.max_len)


def told(logits: Tensor, i: int, n: int | None) -> tuple[float | None, list[tuple[int, float]]]:
    """logits (V,) -> the log probability of id i, and the n likeliest ids with theirs."""
    if n is None:
        return None, []
    p = logits.float().log_softmax(-1)
    likely, ids = p.topk(min(n, len(p)))
    return float(p[i]), list(zip(ids.tolist(), likely.tolist()))


def generate(model: GPT, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, seed: int = 1337, first_row: int = 0, width: int = 64,
             ends: Callable[[int], bool] = lambda row: False, vocab_size: int | None = None, stop_ids: Sequence[int] = (),
             **options) -> Iterator[dict[int, int]]:
    """Yields {row: id} step by step; a row that has drawn a stop id (which is yielded), or for which `ends(row)` is true after
    the yield, is in no later one. A row's draws depend on seed and `first_row` + row alone. See `Batch` and `Options`."""
    batch, o = Batch(model, width, vocab_size), Options(max_new_tokens=max_new_tokens, stop_ids=tuple(stop_ids), **options)
    for row, prompt in enumerate(prompts):
        batch.add(row, prompt, o, seed * 1_000_003 + first_row + row)
    while drawn := batch.step():
        yield {d.key: d.id for d in drawn}
        for d in drawn:
            if ends(d.key):
                batch.drop(d.key)


class Text:
    """Ids into text as they come: whole characters only, and nothing of a stop string or after it. A stop string that is whole before
    `least` ids have come is text like any other; end-of-text ends it, but with `through`."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), through: bool = False, least: int = 0):
        self.tokenizer, self.stop, self.through, self.least = tokenizer, [s for s in stop if s], through, least
        self.decoder, self.held, self.done, self.count = codecs.getincrementaldecoder("utf-8")("replace"), "", False, 0
        self.stopped = False      # by a stop string or end-of-text, not for want of room

    def push(self, i: int) -> str:
        """What can be shown now that this id has come; afterwards `done` says whether the text has ended."""
        self.count += 1
        if i == self.tokenizer.eot and not self.through:
            self.stopped = True
            return self.end()
        return self.cut(self.held + self.decoder.decode(self.tokenizer.token_bytes(i)))

    def end(self) -> str:
        """What was held back, once nothing more will come."""
        if self.done:
            return ""
        text = self.cut(self.held + self.decoder.decode(b"", True))
        text, self.held, self.done = text + self.held, "", True
        return text

    def cut(self, text: str) -> str:
        if self.count < self.least:
            self.held = ""
            return text
        found = [at for s in self.stop if (at := text.find(s)) >= 0]
        if found:
            self.held, self.done, self.stopped = "", True, True
            return text[:min(found)]
        partial = max((n for s in self.stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        self.held = text[len(text) - partial:]
        return text[:len(text) - partial]
