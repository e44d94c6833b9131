"""KV caches: what attention keeps of its past. `kv_cache` names one: full, int8, int4, streaming(sinks=4, window=1020), h2o(budget=512),
snapkv(budget=512).

A cache is a pair: `allocate` makes a layer's empty state, `extend` takes new keys and values in and attends. `full` is exact. int8 and int4
keep every key, rounded; the others keep some: attention sinks and the newest (StreamingLLM), or the most looked at (H2O, SnapKV).
What a piece of a prompt brings is attended to whole; only what it leaves behind is rounded or dropped. Layers with a window keep their
ring, which is bounded already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from config.check import check_fields, check_range, one_of
from ops.attend import How, attend, reference
from ops.positions import Keys, Positions, write
from ops.quantize import dequantized, packed, quantized
from ops.rope import angles

if TYPE_CHECKING:
    from mixers.attention import Attention

State = dict[str, Tensor]
Number = TypeVar("Number", int, Tensor)


@dataclass(kw_only=True)
class Full:
    """Keys and values of the positions that can still be seen: all, or a ring of `window` after the sinks."""

    by_pieces = True      # whether what is kept and attended to is the same however many tokens come at once

    def __post_init__(self) -> None:
        check_fields(self)

    def sees(self, m: Attention) -> tuple[int, int]:
        """Window (0: all) and sinks."""
        return m.window, m.sinks

    def allocate(self, m: Attention, B: int, max_len: int, dtype: torch.dtype, device: torch.device) -> State:
        """The state of B rows: every tensor is (B, ...). `nbytes` is its size by formula."""
        window, sinks = self.sees(m)
        n = sinks + min(window or max_len, max_len) + 1
        return {name: torch.zeros(B, m.G, n, m.D, dtype=dtype, device=device) for name in "kv"}

    def nbytes(self, m: Attention, max_len: int, itemsize: int) -> float:
        """Of a row and layer, keys and values."""
        window, sinks = self.sees(m)
        return 2 * m.G * m.D * itemsize * (sinks + min(window or max_len, max_len))

    def endless(self, m: Attention, max_len: int) -> bool:
        return 0 < self.sees(m)[0] <= max_len

    def attend(self, m: Attention, q: Tensor, kept: tuple[Tensor, ...], at: Positions, keys: Keys | None) -> Tensor:
        return m.attend_keys(q, *kept, at=at, keys=keys)

    def extend(self, m: Attention, q: Tensor, new: tuple[Tensor, ...], at: Positions, state: State) -> Tensor:
        """q (B, H, T, D) -> (B, H, T, D). new: k and v (B, G, T, D) and what stands beside them; the state has each, (B, G, sinks +
        ring + 1, D), of which the last slot takes what need not be kept."""
        T, (window, sinks), past = q.shape[2], self.sees(m), list(state.values())
        ring = past[0].shape[2] - 1 - sinks
        slot = at.once(("slot", ring, sinks), lambda: at.slot(ring, sinks))
        if T == 1 or not (window or at.given or at.plain):    # what these tokens overwrite, none of them sees: no copy
            write(slot, *zip(past, new))
            keys = at.keys_after(ring, sinks)
            n = keys.pos.shape[1]
            return self.attend(m, q, tuple(old[:, :, :n].type_as(t) for old, t in zip(past, new)), at, keys)
        if at.plain:
            y = self.attend(m, q, new, at, None)
        else:
            keys = at.keys_before(ring, sinks)
            n = keys.pos.shape[1] - T
            y = self.attend(m, q, tuple(torch.cat([old[:, :, :n].type_as(t), t], 2) for old, t in zip(past, new)), at, keys)
        write(slot, *zip(past, new))
        return y


@dataclass(kw_only=True)
class Streaming(Full):
    """Attention sinks (StreamingLLM, Xiao et al. 2023, arXiv 2309.17453): the document's first tokens and the newest, as if nothing
    stood between them. A query at position p is for the sinks at min(p, sinks + window - 1); how far the window's keys are stays true, and
    so do ALiBi's distances."""

    sinks: int = 4
    """first tokens that stay"""
    window: int = 1020
    """newest tokens, the query itself included"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "sinks", least=0)
        check_range(self, "window", above=0)

    def sees(self, m: Attention) -> tuple[int, int]:
        return self.window, self.sinks

    def allocate(self, m: Attention, B: int, max_len: int, dtype: torch.dtype, device: torch.device) -> State:
        return super().allocate(m, B, max(max_len, self.window), dtype, device)

    def endless(self, m: Attention, max_len: int) -> bool:
        return True

    def attend(self, m: Attention, q: Tensor, kept: tuple[Tensor, ...], at: Positions, keys: Keys | None) -> Tensor:
        """A query twice as wide: as it is for the window's keys, turned back for the sinks, whose other half is zero."""
        (k, v), keys = kept, keys or at.keys_new()
        if (turn := m.turn) and self.sinks:
            beyond = (at.pos - (self.sinks + self.window - 1)).clamp(min=0)
            cos, sin = at.once(("beyond", self.sinks, self.window, *turn.key), lambda: angles(beyond, turn.frequencies(at)))
            q = torch.cat([q, m.turned(q, cos, -sin)], -1)
            sink = (keys.pos < self.sinks)[:, None, :, None]
            k = torch.cat([k.masked_fill(sink, 0), k.masked_fill(~sink, 0)], -1)
        return attend(q, k, v, at, keys=keys, window=self.window, sinks=self.sinks, scale=m.D**-0.5, **m.asked(q, at))


@dataclass(kw_only=True)
class Int8(Full):
    """Keys rounded by channel, over groups of tokens, values by token, over a head's channels (KIVI, Liu et al. 2024, arXiv 2402.02750);
    a group is rounded once `recent` newer tokens have come."""

    recent: int = 32
    """newest tokens that are kept as they are; up to a group more"""
    group: int = 32
    """tokens that share the scale of a key's channel"""
    bits = 8
    by_pieces = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "recent", above=0)
        check_range(self, "group", above=0)

    def rounded(self, length: Number) -> Number:
        """How many first tokens of `length` are."""
        old = length - self.recent
        return (old.clamp(min=0) if isinstance(old, Tensor) else max(0, old)) // self.group * self.group

    def allocate(self, m: Attention, B: int, max_len: int, dtype: torch.dtype, device: torch.device) -> State:
        n = self.rounded(max_len) // self.group + 1                                            # groups, and one for what is not kept
        if m.D * self.bits % 8:
            raise ValueError(f"kv_cache=int4 packs two channels into a byte, and head_dim={m.D} is odd")
        whole = torch.zeros(B, m.G, n, self.group, m.D * self.bits // 8, dtype=torch.uint8, device=device)
        recent = torch.zeros(B, m.G, self.recent + self.group + 1, m.D, dtype=dtype, device=device)
        k_scale, v_scale = (torch.zeros(B, m.G, n, *size, 2, dtype=torch.float16, device=device) for size in ((1, m.D), (self.group, 1)))
        return {"k": whole, "v": whole.clone(), "k_scale": k_scale, "v_scale": v_scale, "recent_k": recent, "recent_v": recent.clone()}

    def nbytes(self, m: Attention, max_len: int, itemsize: int) -> float:
        n = self.rounded(max_len)
        a_token = 2 * m.D * self.bits / 8 + 4 * (m.D / self.group + 1)              # codes; scale and zero of k and v, 2 bytes each
        return m.G * (n * a_token + 2 * (self.recent + self.group) * m.D * itemsize)

    def extend(self, m: Attention, q: Tensor, new: tuple[Tensor, ...], at: Positions, state: State) -> Tensor:
        T, C, g = q.shape[2], self.recent + self.group, self.group
        recent = state["recent_k"], state["recent_v"]
        y = m.attend_keys(q, *new, at=at) if at.plain else self.attend_kept(m, q, new, at, state)

        # the groups that are complete and old enough now, from the recent ring and the new tokens
        begin, before = at.begin, at.pos.gather(1, at.begin.clamp(max=T - 1)[:, None]).clamp(min=0)
        start, upto = self.rounded(before), self.rounded(at.next(at.before)[:, None])
        j = torch.arange(-(-T // g), device=q.device)
        p = start + torch.arange(len(j) * g, device=q.device)                                  # (B, groups of g): positions
        index = torch.where(p < before, p % C, C + 1 + begin[:, None] - before + p).clamp(max=C + T)[:, None, :, None]
        slot = torch.where(start + (j + 1) * g <= upto, start // g + j, state["k"].shape[2] - 1)
        for name, old, t in zip("kv", recent, new):
            both = torch.cat([old, t.to(old.dtype)], 2)
            groups = both.gather(2, index.expand(-1, m.G, -1, m.D)).unflatten(2, (-1, g))      # (B, G, groups, g, D)
            codes, scale = quantized(groups, self.bits, dim=-2 if name == "k" else -1)
            write(slot, (state[name], packed(codes, self.bits)), (state[f"{name}_scale"], scale))
        write(at.once(("slot", C, 0), lambda: at.slot(C, 0)), *zip(recent, new))
        return y

    def attend_kept(self, m: Attention, q: Tensor, new: tuple[Tensor, ...], at: Positions, state: State) -> Tensor:
        """Over what is rounded, what is recent, and the new tokens."""
        C, n = self.recent + self.group, self.rounded(at.past)

        def where() -> Keys:
            ready = self.rounded(at.before)[:, None]
            first = torch.arange(n, device=q.device).expand(len(ready), n)
            ring = at.held(at.before - 1, C, 0, C)
            held = torch.cat([torch.where(first < ready, first, -1), torch.where(ring < ready, -1, ring)], 1)
            return Keys(("rounded", C, self.group), torch.cat([held, at.pos], 1), torch.cat([torch.zeros_like(held), at.doc], 1))

        keys, kept = at.once(("rounded", C, self.group), where), []
        for name, t in zip("kv", new):
            whole = dequantized(state[name][:, :, :n // self.group], state[f"{name}_scale"][:, :, :n // self.group], self.bits, t.dtype)
            kept.append(torch.cat([whole.flatten(2, 3), state[f"recent_{name}"][:, :, :C].type_as(t), t], 2))
        return m.attend_keys(q, *kept, at=at, keys=keys)


@dataclass(kw_only=True)
class Int4(Int8):
    __doc__ = Int8.__doc__
    bits = 4


@dataclass(kw_only=True)
class H2O(Full):
    """Heavy hitters (Zhang et al. 2023, arXiv 2306.14048): each key/value head keeps the newest tokens, and of the others those that have
    got the most weight from all queries so far, its query heads' summed."""

    budget: int = 512
    """tokens that are kept"""
    recent: int = 256
    """of them, the newest"""
    by_pieces = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "budget", above=0)
        check_range(self, "recent", above=0, most=self.budget)

    def allocate(self, m: Attention, B: int, max_len: int, dtype: torch.dtype, device: torch.device) -> State:
        kv = {name: torch.zeros(B, m.G, self.budget, m.D, dtype=dtype, device=device) for name in "kv"}
        place, score = (torch.zeros(B, m.G, self.budget, dtype=t, device=device) for t in (torch.long, torch.float32))
        return {**kv, "place": place, "score": score}            # position + 1, so that 0 is an empty slot

    def nbytes(self, m: Attention, max_len: int, itemsize: int) -> float:
        return m.G * self.budget * (2 * m.D * itemsize + 12)

    def endless(self, m: Attention, max_len: int) -> bool:
        return True

    def extend(self, m: Attention, q: Tensor, new: tuple[Tensor, ...], at: Positions, state: State) -> Tensor:
        k, v = (torch.cat([state[name].type_as(t), t], 2) for name, t in zip("kv", new))                      # (B, G, S, D)
        held = state["place"] - 1
        pos = torch.cat([held, at.pos[:, None].expand(-1, m.G, -1)], 2)                                       # (B, G, S)
        doc = torch.cat([torch.zeros_like(held), at.doc[:, None].expand(-1, m.G, -1)], 2)
        asked = m.asked(q, at)
        y, w, _ = reference(q, k, v, at, Keys(object(), pos, doc), How(need_weights=True, **{n: asked[n] for n in asked if n != "backend"}))

        last, doc_now = at.next(at.before)[:, None, None] - 1, at.doc[:, -1:, None]
        there = (pos >= 0) & (doc == doc_now)
        old = F.pad(state["score"], (0, q.shape[2]))
        score = self.scored(old, w.unflatten(1, (m.G, -1)), at).masked_fill(~there, 0)                        # w (B, G, H / G, T, S)
        rank = self.smoothed(score, there).masked_fill(pos > last - self.recent, torch.inf).masked_fill(~there, -torch.inf)
        best = rank.topk(self.budget, -1).indices
        best = best.gather(2, (best + there.gather(2, best) * pos.shape[2]).argsort(-1))             # empty slots, then by position
        state["place"].copy_(torch.where(there, pos + 1, 0).gather(2, best))
        state["score"].copy_(score.gather(2, best))
        for name, t in (("k", k), ("v", v)):
            state[name].copy_(t.gather(2, best[..., None].expand(-1, -1, -1, m.D)))
        return y

    def scored(self, score: Tensor, w: Tensor, at: Positions) -> Tensor:
        """score (B, G, S) with the weights (B, G, H / G, T, S) of these queries."""
        return score + w.sum((2, 3))

    def smoothed(self, score: Tensor, there: Tensor) -> Tensor:
        """By what is kept."""
        return score


@dataclass(kw_only=True)
class SnapKV(H2O):
    """SnapKV (Li et al. 2024, arXiv 2404.14469): each key/value head keeps the newest tokens, and of the others those that the last
    `recent` queries look at, the mean over them and its query heads, averaged over neighbours. The paper drops once, after the prompt, and
    lets what is written grow; here each token drops one, by a running mean, so that the budget holds for ever."""

    recent: int = 32
    """newest tokens, whose queries judge the others"""
    kernel: int = 5
    """neighbours over which a score is averaged, itself included"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "kernel", above=0)
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel={self.kernel} must be odd")

    def scored(self, score: Tensor, w: Tensor, at: Positions) -> Tensor:
        last = at.next(at.before)[:, None] - 1
        judge = (at.pos > last - self.recent) & (at.pos >= 0) & (at.doc == at.doc[:, -1:])                    # (B, T)
        n = judge.sum(1)[:, None, None]
        seen = (w.mean(2) * judge[:, None, :, None]).sum(2)                                                   # (B, G, S)
        return (score * (self.recent - n) + seen) / self.recent

    def smoothed(self, score: Tensor, there: Tensor) -> Tensor:
        pool = lambda t: F.avg_pool1d(t, self.kernel, 1, self.kernel // 2)
        return pool(score) / pool(there.type_as(score)).clamp(min=1e-6)


KV_CACHES: dict[str, type[Full]] = {"full": Full, "int8": Int8, "int4": Int4, "streaming": Streaming, "h2o": H2O, "snapkv": SnapKV}


def kv_cache(text: str) -> Full:
    """The cache that `kv_cache` names, with its options. ValueError in one line."""
    return one_of(KV_CACHES, text, "kv_cache")
