"""Where the new tokens stand. GPT.hidden makes one Positions a call; every layer reads it; what is derived is derived once.

`pos` (B, T) says everything: 0 begins a document, -1 is padding (only before or after a row's tokens, never between),
anything else goes on from the token before it. None: one document a row, from 0 or from where the state left off.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Keys(NamedTuple):
    """Where the keys stand that a call attends to. `name` tells two of them apart when masks are remembered."""

    name: Hashable
    pos: Tensor   # (B, S), or (B, G, S) for `reference` where heads have kept different keys; negative: an empty slot or padding
    doc: Tensor   # as pos


def derived(method: Callable[[Positions], Tensor]) -> Any:
    """A property computed at its first use. functools.cached_property takes a lock, which torch.compile cannot trace."""
    return property(lambda self: self.once(method.__name__, lambda: method(self)))


class Positions:
    """pos (B, T) or None; length (B,): where the next token of each row stands (None: nothing came before);
    past: a bound on length that the host knows, so that slicing the cache needs no answer from the device;
    tokens (B, T): which they are, for mixers that find borders in the text;
    reach (B,): how many tokens each row may come to, where a state says so."""

    def __init__(self, B: int, T: int, device: torch.device, pos: Tensor | None = None, length: Tensor | None = None, past: int = 0,
                 tokens: Tensor | None = None, reach: Tensor | None = None):
        self.given, self.past, self.tokens = pos is not None, past, tokens
        self.memo: dict[Hashable, Any] = {} if reach is None else {"reach": reach}
        if pos is None:
            pos = torch.arange(T, device=device).expand(B, T)
            if length is not None:
                pos = pos + length[:, None]
        self.pos = pos

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    @property
    def plain(self) -> bool:
        """One document from 0 in every row: a causal mask is all there is to say."""
        return not self.given and self.past == 0

    # the row

    @derived
    def doc(self):
        """(B, T): 0 is the document that the state left off; every pos == 0 begins the next."""
        return (self.pos == 0).cumsum(1)

    @derived
    def reach(self):
        """(B,), or (1,) where rows are alike: a state's, or the length of the longest document in the row."""
        return self.pos.amax(1) + 1 if self.given else self.pos.new_full((1,), self.pos.shape[1])

    @derived
    def first(self):
        """(B,): index of each row's first token, T if it is all padding."""
        T = self.pos.shape[1]
        if not self.given:
            return self.pos.new_zeros(self.pos.shape[0])
        return torch.where(self.pos < 0, T, torch.arange(T, device=self.pos.device)).amin(1)

    @derived
    def end(self):
        """(B,): one past the index of each row's last token, 0 if it is all padding."""
        T = self.pos.shape[1]
        if not self.given:
            return self.pos.new_full((self.pos.shape[0],), T)
        return torch.where(self.pos < 0, 0, 1 + torch.arange(T, device=self.pos.device)).amax(1)

    @derived
    def before(self):
        """(B,): how many tokens of its document stand before each row's first: the state's length, or 0 where a document begins."""
        T = self.pos.shape[1]
        return self.pos.gather(1, self.first.clamp(max=T - 1)[:, None])[:, 0].clamp(min=0)

    @derived
    def begin(self):
        """(B,): index of the first token that the call has of each row's last document, T if it is all padding."""
        new = torch.where(self.pos == 0, torch.arange(self.pos.shape[1], device=self.pos.device), -1).amax(1)
        return torch.where(new < 0, self.first, new)

    def next(self, length: Tensor) -> Tensor:
        """(B,): where the next token stands after these."""
        last = self.pos.gather(1, (self.end[:, None] - 1).clamp(min=0))[:, 0]
        return torch.where(self.end > 0, last + 1, length)

    # the cache: position p lives in slot p for the first `sinks`, then in a ring of `ring` slots. No positions are stored.

    def held(self, last: Tensor, ring: int, sinks: int, n: int) -> Tensor:
        """(B, n): the positions in the first n slots once `last` (B,) is the newest; negative: nothing of this document.

        With 2 sinks and a ring of 4, after 9 tokens (last = 8) the slots hold 0 1 | 6 7 8 5: position 6 took the place of 2.
        """
        slot, last = torch.arange(n, device=self.pos.device), last[:, None]
        turned = last - sinks - (last - slot) % ring
        turned = torch.where(turned < 0, -1, turned + sinks)
        return torch.where(slot < sinks, torch.where(slot <= last, slot, -1), turned)

    def slot(self, ring: int, sinks: int) -> Tensor:
        """(B, T): where each key is written. The slot after the last takes what need not be kept: padding, older documents,
        and what newer keys of this very call would overwrite."""
        newest = (self.end[:, None] - 1).clamp(min=0)
        last = self.pos.gather(1, newest)
        keep = (self.pos > last - ring) | (self.pos < sinks)
        if self.given:
            keep = keep & (self.pos >= 0) & (self.doc == self.doc.gather(1, newest))
        p = self.pos
        return torch.where(keep, torch.where(p < sinks, p, sinks + (p - sinks) % ring), sinks + ring)

    def keys_new(self) -> Keys:
        """The call's own tokens alone."""
        return Keys("new", self.pos, self.doc)

    def keys_before(self, ring: int, sinks: int) -> Keys:
        """What the filled slots held before this call, then the call's own tokens."""
        def make() -> Keys:
            n = min(sinks + ring, self.past)
            held = self.held(self.before - 1, ring, sinks, n)
            return Keys(("before", ring, sinks), torch.cat([held, self.pos], 1), torch.cat([torch.zeros_like(held), self.doc], 1))
        return self.once(("before", ring, sinks), make)

    def keys_after(self, ring: int, sinks: int) -> Keys:
        """The filled slots once these tokens are written; they hold the last document alone."""
        def make() -> Keys:
            n = min(sinks + ring, self.past + self.pos.shape[1])
            held = self.held(self.next(self.before) - 1, ring, sinks, n)
            return Keys(("after", ring, sinks), held, self.doc[:, -1:].expand_as(held))
        return self.once(("after", ring, sinks), make)


def document_positions(tokens: Tensor, eot: int) -> Tensor:
    """tokens (B, T) of packed documents -> pos (B, T): an end-of-text token begins the document that follows it."""
    at = torch.arange(tokens.shape[1], device=tokens.device)
    return at - torch.where(tokens == eot, at, 0).cummax(1).values


def within_documents(run: Callable[..., Tensor], eot: int | None) -> Callable[..., Tensor]:
    """The same model, whose rows are packed documents that do not see one another: (tokens, targets) -> loss."""
    if eot is None:
        raise ValueError("there is no end-of-text token between documents")
    return lambda tokens, targets: run(tokens, targets, document_positions(tokens, eot))


def visible(q_pos: Tensor, k_pos: Tensor, q_doc: Tensor, k_doc: Tensor, window: int = 0, sinks: int = 0, causal: bool = True) -> Tensor:
    """Who sees whom: a query (...) and a key (...) of the same document, broadcast against each other -> bool.

    The only place that knows. A window of W keys counts the query itself; the document's first `sinks` tokens stay visible.
    """
    see = (q_pos >= 0) & (k_pos >= 0) & (q_doc == k_doc)
    if causal:
        see = see & (k_pos <= q_pos)
    if window:
        see = see & ((q_pos - k_pos < window) | (k_pos < sinks))
    return see


# states that keep what attention does not read as it lies

def write(slot: Tensor, *pairs: tuple[Tensor, Tensor]) -> None:
    """Into each (B, G, slots, ...) its new (B, G, T, ...), at slot (B, T). Not by scatter_, which on a CPU copies all of a bfloat16 cache:
    36 ms against 0.02 at (16, 12, 1088, 64)."""
    rows = torch.arange(len(slot), device=slot.device)[:, None]
    for kept, new in pairs:
        kept.transpose(1, 2).index_put_((rows, slot), new.transpose(1, 2).to(kept.dtype))


def lined_up(old: Tensor, new: Tensor, n: int, ring: int, before: Tensor, first: Tensor) -> Tensor:
    """n slots for the past, in order, and new (B, G, T, D), so that a document that goes on lies in one piece: its `before`
    (B,) positions, the last `ring` of which are in old, stand right in front of its first new token, at `first` (B,)."""
    x = torch.arange(n + new.shape[2], device=new.device)
    front = (n + first)[:, None]
    index = torch.where(x < front, (x - front + before[:, None]) % ring, old.shape[2] + x - n)            # (B, n + T)
    both = torch.cat([old.type_as(new), new], 2)
    return both.gather(2, index[:, None, :, None].expand(-1, both.shape[1], -1, both.shape[3]))
