"""Positions by rotation (RoPE, Su et al. 2021, arXiv 2104.09864) and its extensions to longer contexts, by sinusoids (Vaswani et al. 2017,
arXiv 1706.03762) and by distance (ALiBi, Press et al. 2022, arXiv 2108.12409). No table with a largest length anywhere."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from config.check import check_fields, check_range, one_of
from ops.positions import Positions


def inverse_frequencies(D: int, theta: float | Tensor = 10000.0, device: torch.device | None = None) -> Tensor:
    """(D/2,): radians a position for each pair of channels, theta^(-2i/D)."""
    return theta ** (-torch.arange(0, D, 2, device=device, dtype=widest(device)) / D)


def widest(device: torch.device | None) -> torch.dtype:
    """float64, where the device has it: float32 angles at position 131,072 change scores by 2e-3."""
    return torch.float32 if device is not None and device.type == "mps" else torch.float64


def angles(pos: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """pos (B, T), inv_freq (D/2,) or (B, 1, 1, D/2) -> cos and sin (B, 1, T, D/2) in float32, whatever the model's dtype or autocast."""
    a = pos.clamp(min=0)[:, None, :, None].to(inv_freq.dtype) * inv_freq
    return a.cos().float(), a.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str = "half") -> Tensor:
    """Turns the pairs of x (B, H, T, D) by their angles. Pairs are (i, i + D/2) in the "half" layout of Hugging Face's
    checkpoints, (2i, 2i + 1) in the "interleaved" one of Meta's; scores agree after permuting the rows of W_q and W_k."""
    if layout == "half":
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).type_as(x)
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)                   # (B, H, T, D/2) each
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).type_as(x)


# Longer contexts. Each kind is a rule from a model's frequencies w_i = theta^(-2i/D) to others, and a factor of the rotated queries and
# keys. s is `factor`, L `original`, the context that the model was trained on.

@dataclass(kw_only=True)
class Unscaled:
    """none: as they are."""

    start = 0                # so many first positions keep w_i

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("factor", "original", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"):
            if hasattr(self, name):
                check_range(self, name, above=0)
        if getattr(self, "factor", 1) < 1:
            raise ValueError(f"factor={self.factor:g} would make the context shorter: at least 1")  # type: ignore[attr-defined]

    def frequencies(self, D: int, theta: float, reach: Tensor) -> Tensor:
        """(D/2,) radians a position, or (B, 1, 1, D/2) where they depend on reach (B,), the tokens that each row may come to."""
        return inverse_frequencies(D, theta, reach.device)

    def scale(self) -> float:
        """Of rotated queries, and of keys."""
        return 1.0

    def logit_scale(self) -> float:
        """Of all scores of latent attention, whose unrotated channels `scale` does not reach (DeepSeek-V2's code)."""
        return 1.0


@dataclass(kw_only=True)
class Linear(Unscaled):
    """Position interpolation (Chen et al. 2023, arXiv 2306.15595): w_i / s."""

    factor: float

    def frequencies(self, D: int, theta: float, reach: Tensor) -> Tensor:
        return super().frequencies(D, theta, reach) / self.factor


@dataclass(kw_only=True)
class NTK(Unscaled):
    """NTK-aware (bloc97 2023): the base becomes theta s^(D / (D - 2)), so that the fastest pair keeps its frequency and the slowest is
    divided by s."""

    factor: float

    def frequencies(self, D: int, theta: float, reach: Tensor) -> Tensor:
        return inverse_frequencies(D, theta * self.factor ** (D / max(1, D - 2)), reach.device)


@dataclass(kw_only=True)
class Dynamic(Unscaled):
    """Dynamic NTK (emozilla 2023): NTK with s l / L - (s - 1) in place of s for a text of up to l > L tokens. l is chosen once for a row
    and kept: keys in a cache cannot change their base. A factor of 1 leaves all up to L as it is; beyond, even it scales, by l / L."""

    factor: float
    original: int

    def frequencies(self, D: int, theta: float, reach: Tensor) -> Tensor:
        s = self.factor * (reach.clamp(min=self.original).to(widest(reach.device)) / self.original - 1) + 1
        return inverse_frequencies(D, theta * s[:, None, None, None] ** (D / max(1, D - 2)), reach.device)


@dataclass(kw_only=True)
class YaRN(Unscaled):
    """YaRN (Peng et al. 2023, arXiv 2309.00071): pairs that turn more than beta_fast times in L positions keep w_i, those that turn less
    than beta_slow times get w_i / s, and between lies a ramp, linear in i as in the authors' code (the paper's is linear in turns)."""

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """of queries and keys (None: 1 + 0.1 ln s, or the ratio of those with mscale and mscale_all_dim before ln s)"""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    """of DeepSeek, whose latent attention also multiplies its scores by (1 + 0.1 mscale_all_dim ln s)^2"""
    truncate: bool = True
    """round the ramp's ends to whole pairs (gpt-oss does not)"""

    def ramp(self, D: int, theta: float, device: torch.device | None = None) -> Tensor:
        """(D/2,): 0 where a pair keeps its frequency, 1 where it is interpolated."""
        at = lambda turns: D * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))
        low, high = at(self.beta_fast), at(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, D - 1)                # D - 1, not D / 2 - 1: the authors' code, and all that follow it
        return ((torch.arange(D // 2, device=device, dtype=widest(device)) - low) / (high - low or 0.001)).clamp(0, 1)

    def frequencies(self, D: int, theta: float, reach: Tensor) -> Tensor:
        w, ramp = super().frequencies(D, theta, reach), self.ramp(D, theta, reach.device)
        return w * (1 - ramp) + w / self.factor * ramp

    def grown(self, mscale: float = 1.0) -> float:
        return 1 + 0.1 * mscale * math.log(self.factor)

    def scale(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return self.grown(self.mscale) / self.grown(self.mscale_all_dim) if self.mscale and self.mscale_all_dim else self.grown()

    def logit_scale(self) -> float:
        return self.grown(self.mscale_all_dim or 0) ** 2


@dataclass(kw_only=True)
class LongRoPE(Unscaled):
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): w_i / f_i, with a list f for texts of up to L tokens and one for longer ones. Which,
    is chosen once for a row and kept. `python -m tools.extend --method longrope --search` finds the lists."""

    factor: float
    original: int
    long: tuple[float, ...] = ()
    """D/2 numbers (none: s for all)"""
    short: tuple[float, ...] = ()
    """as many (none: 1 for all)"""
    start: int = 0
    """first positions that keep w_i, in texts of any length"""
    attention_factor: float | None = None
    """of queries and keys (None: sqrt(1 + ln s / ln L))"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "start", least=0)
        if min((*self.long, *self.short, 1)) <= 0:
            raise ValueError("long and short divide frequencies: numbers above 0")

    def frequencies(self, D: int, theta: float, reach: Tensor) -> Tensor:
        w = super().frequencies(D, theta, reach)
        long, short = (torch.tensor(f, device=w.device, dtype=w.dtype) for f in (self.long or (self.factor,), self.short or (1.0,)))
        for name, f in (("long", long), ("short", short)):
            if len(f) not in (1, D // 2):
                raise ValueError(f"rope_scaling: longrope's {name} has {len(f)} numbers, and {D} rotated channels need {D // 2}")
        return torch.where((reach > self.original)[:, None, None, None], w / long, w / short)

    def scale(self) -> float:
        return self.attention_factor or math.sqrt(1 + math.log(self.factor) / math.log(self.original))


@dataclass(kw_only=True)
class Llama3(Unscaled):
    """Llama 3.1's (arXiv 2407.21783): pairs that turn more than high_freq_factor times in L positions keep w_i, those that turn less than
    low_freq_factor times get w_i / s, and between they are mixed, linearly in the turns."""

    factor: float = 8.0
    original: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "low_freq_factor", below=self.high_freq_factor)

    def frequencies(self, D: int, theta: float, reach: Tensor) -> Tensor:
        w = super().frequencies(D, theta, reach)
        keep = ((self.original * w / (2 * math.pi) - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return keep * w + (1 - keep) * w / self.factor


ROPE_SCALING: dict[str, type[Unscaled]] = {"none": Unscaled, "linear": Linear, "ntk": NTK, "dynamic": Dynamic, "yarn": YaRN,
                                           "longrope": LongRoPE, "llama3": Llama3}


def rope_scaling(text: str) -> Unscaled:
    """What `rope_scaling` says, such as "yarn(factor=4, original=1024)". ValueError in one line."""
    return one_of(ROPE_SCALING, text, "rope_scaling")


class Rotation:
    """How D channels are turned: base theta, scaled."""

    def __init__(self, D: int, theta: float, scaling: str = "none"):
        self.D, self.theta, self.key, self.scaling = D, theta, (D, theta, scaling), rope_scaling(scaling)
        self.scaling.frequencies(D, theta, torch.zeros(1))       # what does not fit D is said now

    def frequencies(self, at: Positions) -> Tensor:
        """(D/2,), or (B, 1, 1, D/2) where rows have their own."""
        return self.scaling.frequencies(self.D, self.theta, at.reach)

    def table(self, at: Positions) -> tuple[Tensor, Tensor]:
        """cos and sin (B, 1, T, D/2), or (1, ...) where rows are alike, times the scale; made once for all layers that turn alike."""
        def make() -> tuple[Tensor, Tensor]:
            pos, a = at.pos[:1] if at.plain else at.pos, self.scaling.scale()
            cos, sin = angles(pos, self.frequencies(at))
            if self.scaling.start:
                near, first = (pos < self.scaling.start)[:, None, :, None], angles(pos, inverse_frequencies(self.D, self.theta, pos.device))
                cos, sin = torch.where(near, first[0], cos), torch.where(near, first[1], sin)
            return (cos, sin) if a == 1 else (cos * a, sin * a)
        return at.once(("rope", *self.key), make)


def sinusoids(pos: Tensor, C: int) -> Tensor:
    """pos (B, T) -> (B, T, C): sin and cos in alternating channels, added to the embedding."""
    cos, sin = angles(pos, inverse_frequencies(C + C % 2, device=pos.device))
    return torch.stack([sin, cos], -1).flatten(-2)[:, 0, :, :C]


def alibi_slopes(H: int) -> list[float]:
    """One slope a head: 2^(-8h/H) for a power of two; otherwise those of the next lower power, then every second of the next."""
    n = 1 << (H.bit_length() - 1)
    slopes = [2 ** (-8 * h / n) for h in range(1, n + 1)]
    return slopes + [2 ** (-4 * h / n) for h in range(1, 2 * n + 1, 2)][:H - n]
