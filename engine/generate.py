"""Text from a model: prefill the prompts, then a token a row a step, through the mixers' state alone."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from data.tokenizer import Tokenizer
from model import GPT, State


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


def prefill(model: GPT, prompts: Sequence[Sequence[int]], max_len: int) -> tuple[State, Tensor]:
    """Takes prompts of any lengths in as one batch, left-padded -> the state, and the logits (B, V) after each."""
    device, T = model.wte.weight.device, max(map(len, prompts))
    tokens = torch.tensor([[0] * (T - len(p)) + list(p) for p in prompts], device=device)
    pos = torch.tensor([[-1] * (T - len(p)) + list(range(len(p))) for p in prompts], device=device)
    state = model.init_state(len(prompts), max_len)
    x = model.hidden(tokens, None if min(map(len, prompts)) == T else pos, state)
    return state, model.logits(x[:, -1])


@torch.no_grad()
def generate(model: GPT, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, temperature: float = 1.0, top_k: int | None = None,
             top_p: float | None = None, min_p: float | None = None, seed: int = 1337, first_row: int = 0, stop_ids: Sequence[int] = (),
             ends: Callable[[int], bool] = lambda row: False, vocab_size: int | None = None) -> Iterator[dict[int, int]]:
    """Yields {row: id} step by step; a row that has drawn a stop id (which is yielded), or for which `ends(row)` is true after
    the yield, is in no later one.

    temperature 0 takes the likeliest. A row's draws depend on seed and `first_row` + row alone, not on its neighbours. Ids from
    `vocab_size` on, with which a vocabulary is padded, are never drawn. Where a row reaches block_size it goes on from its last
    half, so that text may be longer than the context; a longer prompt counts by its last block_size tokens.
    """
    if not all(prompts):
        raise ValueError("a prompt needs at least one token")
    context = model.cfg.block_size
    texts = [list(p)[-context:] for p in prompts]
    draws = [torch.Generator().manual_seed(seed * 1_000_003 + first_row + row) for row in range(len(texts))]
    unique = list(dict.fromkeys(map(tuple, texts)))                     # samples of one prompt share its prefill
    state, logits = prefill(model, unique, context)
    which = torch.tensor([unique.index(tuple(t)) for t in texts], device=logits.device)
    state, logits = state.rows(which), logits[which]
    alive = list(range(len(texts)))
    for step in range(max_new_tokens):
        if vocab_size is not None:
            logits[:, vocab_size:] = -torch.inf
        if temperature == 0:
            ids = logits.argmax(-1).tolist()
        else:
            p = probabilities(logits, temperature, top_k, top_p, min_p).cpu()
            ids = [int(torch.multinomial(p[i], 1, generator=draws[row])) for i, row in enumerate(alive)]
        yield dict(zip(alive, ids))
        for row, i in zip(alive, ids):
            texts[row].append(i)
        stay = [i for i, row in enumerate(alive) if ids[i] not in stop_ids and not ends(row)]
        if not stay or step + 1 == max_new_tokens:
            return
        if len(stay) < len(alive):
            alive, ids = [alive[i] for i in stay], [ids[i] for i in stay]
            state = state.rows(torch.tensor(stay, device=logits.device))
        if max(len(texts[row]) for row in alive) > context:             # full: go on from the last half
            for row in alive:
                if len(texts[row]) > context:
                    texts[row] = texts[row][-max(1, context // 2):]
            state, logits = prefill(model, [texts[row] for row in alive], context)
        else:
            logits = model(torch.tensor(ids, device=logits.device)[:, None], state=state)[:, -1]


class Text:
    """Ids into text as they come: whole characters only, and nothing of a stop string or after it."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self.tokenizer, self.stop = tokenizer, [s for s in stop if s]
        self.decoder, self.held, self.done = codecs.getincrementaldecoder("utf-8")("replace"), "", False

    def push(self, i: int) -> str:
        """What can be shown now that this id has come; afterwards `done` says whether the text has ended."""
        if i == self.tokenizer.eot:
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
        found = [at for s in self.stop if (at := text.find(s)) >= 0]
        if found:
            self.held, self.done = "", True
            return text[:min(found)]
        partial = max((n for s in self.stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        self.held = text[len(text) - partial:]
        return text[:len(text) - partial]
