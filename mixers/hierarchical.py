"""Hierarchical attention: tokens, sentences, paragraphs. The pooling is that of Hierarchical Attention Networks (Yang et al. 2016,
ACL N16-1174: words to a sentence by a learned query, sentences to a text by another), made causal: only closed units are pooled, and
a query reads its own sentence token by token. All levels share one softmax; no raw tokens are chosen by way of the summaries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from config import GPTConfig
from config.check import check_range
from mixers.attention import Attention, AttentionOptions, RotaryOptions
from ops.positions import Positions, lined_up, write
from ops.units import Seen, Units, all_rows, at_ends, attend_units, behind, block_of, latest, of_length, own, pool, taken, units


@dataclass(kw_only=True)
class HierarchicalOptions(RotaryOptions):
    sentence: int = 16
    """tokens after which a sentence closes"""
    paragraph: int = 8
    """sentences after which a paragraph closes"""
    ends: tuple[int, ...] = ()
    """token ids that close a sentence sooner, such as those of a full stop and of a new line"""
    shortest: int = 4
    """tokens that a sentence has at least, whatever they are: it bounds the number of sentences"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sentence", "paragraph", "shortest"):
            check_range(self, name, least=1)
        if self.ends:
            check_range(self, "shortest", most=self.sentence)


class Hierarchical(Attention):
    """One softmax over the tokens of the query's own sentence up to itself, the closed sentences of its own paragraph, and the closed
    paragraphs of its document. A closed unit U has one row of keys and of values a key/value head,

        k_U = sum_j b_j k_j        v_U = sum_j b_j v_j        b = softmax over j in U of (u . k_j / sqrt(D) + ln |j|)

    its parts j being tokens for a sentence, sentences for a paragraph; u (one for each level and key/value head) is learned, |j| how many
    tokens j stands for, and ln |U| is added to the scores of U's row. So where the keys of every unit are alike, and where a unit
    is a token, this is full attention. Keys are rotated before they are pooled; u starts near 0, which is the mean.

    A sentence closes with its last token and never by looking ahead: after `sentence` tokens, or with one of `ends` from its
    `shortest`th on. `paragraph` sentences are a paragraph; a document ends all. Cost: T (sentence + paragraph + T / |paragraph|).
    State: the last sentence - 1 tokens, the last paragraph - 1 sentences, every paragraph; with `ends` also the rows' sizes.
    """

    Options = HierarchicalOptions  # type: ignore[assignment]

    def __init__(self, cfg: GPTConfig, options: HierarchicalOptions):
        super().__init__(cfg, AttentionOptions(window=0, sinks=0, **options.of(RotaryOptions)))
        if cfg.position == "alibi" or cfg.attn_softcap:
            raise ValueError("layers: hierarchical has no ALiBi and no attn_softcap; leave them off")
        self.sentence, self.paragraph, self.ends = options.sentence, options.paragraph, options.ends
        self.shortest = options.shortest if options.ends else options.sentence
        self.name = ("hierarchical", self.sentence, self.paragraph, self.ends, self.shortest)
        self.pool_tokens, self.pool_sentences = (nn.Parameter(torch.randn(self.G, self.D) * 0.02) for _ in range(2))

    def forward(self, x: Tensor, at: Positions, state: dict[str, Tensor] | None = None) -> Tensor:
        (B, T, _), S, P, plain = x.shape, self.sentence, self.paragraph, at.plain and not self.ends
        q, k, v = self.heads(x, at)
        s, p = at.once(self.name, lambda: self.closing(at, state))
        tokens, past = [k, v], 0
        if state is not None:
            lined, ring = behind(at, [state["k"], state["v"]], tokens)
            tokens, past = (tokens, 0) if at.plain else (lined, ring)
        sentences, shift = self.sentences(tokens, past, at, s, state)
        old = None if state is None else [state["paragraph_" + name] for name in self.kept()]
        paragraphs, every = all_rows(at, p, old, self.paragraphs(sentences, shift, at, s, p), self.shortest * P)
        if state is not None and self.ends:
            last = (at.end[:, None] - 1).clamp(min=0)
            left = torch.cat([torch.where(s.closes, 0, s.since + 1).gather(1, last), (s.number + s.closes).gather(1, last)], 1)
            state["open"].copy_(torch.where(at.end[:, None] > 0, left, state["open"]))

        block = block_of(T, S * P, paragraphs[0].shape[2])
        width = -(-block // S) if plain else P - 1 + -(-block // self.shortest)
        sizes = [t[2][:, 0, :, 0] for t in (sentences, paragraphs)] if self.ends else [S, S * P]
        few = Seen(shift + s.before - s.number % P, shift + s.before, width, plain, sizes[0])
        y = attend_units(q, [(t[0], t[1]) for t in (tokens, sentences, paragraphs)],
                         [own(at, s, S, block, past, plain), few, every._replace(size=sizes[1])], at, self.name, block,
                         self.cfg.attn_dropout if self.training else 0.0)
        return self.out(y.transpose(1, 2).reshape(B, T, self.H * self.D))

    def sentences(self, tokens: list[Tensor], past: int, at: Positions, s: Units,
                  state: dict[str, Tensor] | None) -> tuple[list[Tensor], int]:
        """tokens: k and v (B, G, past + T, D) -> the rows of the last sentences of a state and of those that close now, in one piece
        (B, G, slots + N, D); how many the first are. With `ends`, a third tensor says their tokens (B, 1, ..., 1)."""
        S, N = self.sentence, s.end.shape[1]
        if at.plain and not self.ends:
            made = pool([t[:, :, :N * S].unflatten(2, (N, S)) for t in tokens], self.pool_tokens)
        else:
            index, inside = at.once(("in", *self.name), lambda: self.within(s, past))
            made = pool([taken(t, index) for t in tokens], self.pool_tokens, inside)
        if self.ends:
            made.append((s.since.gather(1, s.end) + 1)[:, None, :, None].float())
        if state is None:
            return made, 0
        old = [state["sentence_" + name] for name in self.kept()]
        rows, slots, shift = made, old[0].shape[2] - 1, 0
        if not at.plain:
            had = s.number.gather(1, at.first.clamp(max=at.pos.shape[1] - 1)[:, None])[:, 0]
            rows, shift = [lined_up(a, b, slots, slots, had, torch.zeros_like(had)) for a, b in zip(old, made)], slots
        write(at.once(("sentence slots", *self.name), lambda: self.slots(at, s, slots)), *zip(old, made))
        return rows, shift

    def paragraphs(self, sentences: list[Tensor], shift: int, at: Positions, s: Units, p: Units) -> list[Tensor]:
        """The rows of the paragraphs that close now (B, G, N, D), of sentences' rows."""
        P, N = self.paragraph, p.end.shape[1]
        if at.plain and not self.ends:
            return pool([t[:, :, :N * P].unflatten(2, (N, P)) for t in sentences], self.pool_sentences)
        index = shift + s.before.gather(1, p.end)[..., None] + torch.arange(1 - P, 1, device=p.end.device)          # (B, N, P)
        k, v, *size = (taken(t, index) for t in sentences)
        sizes = [t[:, 0, :, :, 0].clamp(min=1) for t in size]                                # nobody sees what is not closed
        return [*pool([k, v], self.pool_sentences, *sizes), *(t.sum(-1)[:, None, :, None] for t in sizes)]

    def closing(self, at: Positions, state: dict[str, Tensor] | None) -> tuple[Units, Units]:
        """The sentences and the paragraphs that these tokens close."""
        if self.ends:
            if at.tokens is None:
                raise ValueError("hierarchical(ends=...) needs the tokens: Positions(..., tokens=...)")
            ends = torch.isin(at.tokens, torch.tensor(self.ends, device=at.pos.device))
            s = at_ends(at, ends, self.shortest, self.sentence, at.pos.new_zeros(at.pos.shape[0], 2) if state is None else state["open"])
        else:
            s = of_length(at, self.sentence)
        N = s.end.shape[1]
        closes = s.closes & ((s.number + 1) % self.paragraph == 0)
        return s, units(s.since, s.number // self.paragraph, closes, N // self.paragraph if at.plain else -(-N // self.paragraph))

    def within(self, s: Units, past: int) -> tuple[Tensor, Tensor | None]:
        """Where the tokens of each sentence are (B, N, S), its last one last, and 1 for those, 0 for what is before (None: none)."""
        back = torch.arange(1 - self.sentence, 1, device=s.end.device)
        return past + s.end[..., None] + back, (-back <= s.since.gather(1, s.end)[..., None]) if self.ends else None

    def slots(self, at: Positions, s: Units, slots: int) -> Tensor:
        """Where each sentence is written (B, N): the last of the last document, in a ring."""
        last = (at.end[:, None] - 1).clamp(min=0)
        number, closed = s.number.gather(1, s.end), (s.number + s.closes).gather(1, last)
        return torch.where(latest(at, s) & (number >= closed - slots), number % slots, slots)

    def kept(self) -> list[str]:
        return ["k", "v", "size"] if self.ends else ["k", "v"]

    def init_state(self, B: int, max_len: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """One slot more each, for what need not be kept."""
        few, all = max(1, self.paragraph - 1), max_len // (self.shortest * self.paragraph)
        lengths = {"": max(1, self.sentence - 1), "sentence_": few, "paragraph_": all}
        state = {name + kv: torch.zeros(B, self.G, n + 1, self.D, dtype=dtype, device=device) for name, n in lengths.items() for kv in "kv"}
        if self.ends:
            state |= {name + "size": torch.zeros(B, 1, n + 1, 1, device=device) for name, n in lengths.items() if name}
            state["open"] = torch.zeros(B, 2, dtype=torch.long, device=device)     # tokens in the open sentence, sentences closed
        return state

    def endless(self, max_len: int) -> bool:
        return False

    def cuts(self) -> bool:
        return False

    def flops(self, T: int) -> float:
        """What is attended to, and the pooling of keys and values: three products a token, and as many a sentence."""
        S, P = self.sentence, self.paragraph
        return 4 * self.H * self.D * (min(T, S) + min(P - 1, T // S) + T // (S * P)) + 6 * self.G * self.D * (1 + 1 / S)

    def backend(self, device: str, dtype: torch.dtype, training: bool) -> str:
        return "sdpa"
