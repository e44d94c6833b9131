"""Multi-head attention (Vaswani et al. 2017, arXiv 1706.03762) with shared key/value heads (GQA, Ainslie et al. 2023,
arXiv 2305.13245; one of them is MQA), a window and attention sinks (Xiao et al. 2023, arXiv 2309.17453), learned sinks (gpt-oss,
arXiv 2508.10925), an output gate (Qiu et al. 2025, arXiv 2505.06708; Qwen3-Next), and a rotation of a part of each head."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from config import GPTConfig
from config.check import check_fields, check_range
from mixers.kv_cache import Full, kv_cache
from mixers.mixer import Mixer
from ops.attend import How, attend, choose
from ops.norm import rms_norm
from ops.positions import Keys, Positions
from ops.rope import Rotation, alibi_slopes, rotate


@dataclass(kw_only=True)
class RotaryOptions:
    """How a word tells order; shared by all whose mixers are attention of some kind."""

    rope: bool | None = None
    """whether queries and keys are rotated (None: where the model's position is rope)"""
    theta: float | None = None
    """base of the frequencies, e.g. 1e4 in local and 1e6 in global layers (Gemma 3; None: the model's rope_theta)"""
    scaling: str | None = None
    """how they are scaled, e.g. "none" in local layers (Gemma 3; None: as the model's rope_scaling says)"""
    rotary: int | None = None
    """channels of a head that are rotated, the first ones, an even number (Qwen3-Next has 64 of 256; None: all)"""

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "theta", above=0)
        check_range(self, "rotary", above=0)

    def of(self, kind: type) -> dict[str, Any]:
        """Those of them that the options `kind` have too."""
        return {f.name: getattr(self, f.name) for f in fields(kind)}


@dataclass(kw_only=True)
class HeadOptions(RotaryOptions):
    """And what it does with its weights and outputs."""

    sink_logit: bool = False
    """a learned score for each head that takes weight and gives nothing: a head may attend to nothing at all (gpt-oss). It starts
    at 0, as if there were one key more, orthogonal to every query"""
    gate: bool = False
    """each channel of each head's output times a sigmoid of x (Qwen3-Next)"""


@dataclass(kw_only=True)
class AttentionOptions(HeadOptions):
    """window, sinks: None is as the model's field of that name says."""

    window: int | None = None
    """keys that a query sees, itself included (0: all)"""
    sinks: int | None = None
    """first tokens of the document that stay visible outside the window"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "window", least=0)
        check_range(self, "sinks", least=0)


class Attention(Mixer):
    """Its state is its `cache`'s, see mixers/kv_cache.py.

    A word like it overrides `beside` and `attend_keys` (see mixers/forgetting.py), or `attend_keys` alone (mixers/sparse.py).
    """

    Options = AttentionOptions

    def __init__(self, cfg: GPTConfig, options: AttentionOptions):
        super().__init__()
        self.cfg, self.H, self.G = cfg, cfg.n_head, cfg.n_kv_head or cfg.n_head
        self.D = cfg.head_dim or cfg.n_embd // cfg.n_head
        self.window = cfg.window if options.window is None else options.window
        self.sinks = (cfg.sinks if options.sinks is None else options.sinks) if self.window else 0
        rope = cfg.position == "rope" if options.rope is None else options.rope
        self.cache = kv_cache(cfg.kv_cache) if type(self) is Attention and not self.window else Full()
        self.rotary = options.rotary or self.D
        if options.sinks and not self.window:
            raise ValueError(f"layers: attention(sinks={options.sinks}) needs a window; without one every token is visible anyway")
        if options.rotary and (self.rotary % 2 or self.rotary > self.D):
            raise ValueError(f"layers: rotary={self.rotary} must be even, and at most head_dim={self.D}")
        if rope and self.rotary % 2:
            raise ValueError(f"layers: attention(rope=True) turns pairs of channels, and head_dim={self.D} is odd")
        self.turn = Rotation(self.rotary, options.theta or cfg.rope_theta, options.scaling or cfg.rope_scaling) if rope else None
        self.counts = [self.H, self.G, self.G] + [self.H] * options.gate                   # rows: all q, all k, all v, all gates
        self.qkv = nn.Linear(cfg.n_embd, sum(self.counts) * self.D, bias=cfg.bias)
        self.qkv.parts = [n * self.D for n in self.counts]   # type: ignore[assignment] # as many matrices to Muon
        self.out = nn.Linear(self.H * self.D, cfg.n_embd, bias=cfg.bias)
        self.sink_logit = nn.Parameter(torch.zeros(self.H)) if options.sink_logit else None
        if cfg.qk_norm:
            self.q_norm, self.k_norm = nn.RMSNorm(self.D, eps=cfg.norm_eps), nn.RMSNorm(self.D, eps=cfg.norm_eps)

    def forward(self, x: Tensor, at: Positions, state: dict[str, Tensor] | None = None) -> Tensor:
        q, k, v, *gate = self.heads(x, at)
        new = k, v, *self.beside(x)
        y = self.attend_keys(q, *new, at=at) if state is None else self.cache.extend(self, q, new, at, state)
        if gate:
            y = y * gate[0].sigmoid()
        return self.out(y.transpose(1, 2).reshape(*x.shape[:2], self.H * self.D))

    def heads(self, x: Tensor, at: Positions) -> tuple[Tensor, ...]:
        """x (B, T, C) -> q (B, H, T, D), k and v (B, G, T, D), normalised and rotated, and where there is a gate its (B, H, T, D)."""
        q, k, v, *gate = self.qkv(x).view(*x.shape[:2], -1, self.D).transpose(1, 2).split(self.counts, 1)
        if self.cfg.qk_norm:       # in float32, which the rotation takes anyway
            q, k = rms_norm(q, self.q_norm), rms_norm(k, self.k_norm)
        q, k = (t.type_as(v) for t in self.rotated(at, q, k))
        return q, k, v, *gate

    def rotated(self, at: Positions, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Each (B, heads, T, D) with its first `rotary` channels turned."""
        if self.turn is None:
            return tensors
        cos, sin = self.turn.table(at)
        return tuple(self.turned(t, cos, sin) for t in tensors)

    def turned(self, t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned = rotate(t[..., :self.rotary], cos, sin, self.cfg.rope_layout)
        return turned if self.rotary == self.D else torch.cat([turned, t[..., self.rotary:]], -1)

    def beside(self, x: Tensor) -> tuple[Tensor, ...]:
        """What a key has beside k and v, each (B, heads, T, D): the state keeps it, and attend_keys gets it behind v."""
        return ()

    def asked(self, q: Tensor, at: Positions) -> dict[str, Any]:
        """What attend and its like are asked for beside the pattern."""
        slopes = at.once("slopes", lambda: torch.tensor(alibi_slopes(self.H), device=q.device)) if self.cfg.position == "alibi" else None
        return dict(backend=self.cfg.attention_backend, slopes=slopes, softcap=self.cfg.attn_softcap, sink_logit=self.sink_logit,
                    dropout=self.cfg.attn_dropout if self.training else 0.0)

    def attend_keys(self, q: Tensor, k: Tensor, v: Tensor, *, at: Positions, keys: Keys | None = None) -> Tensor:
        return attend(q, k, v, at, keys=keys, window=self.window, sinks=self.sinks, **self.asked(q, at))

    def init_state(self, B: int, max_len: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        return self.cache.allocate(self, B, max_len, dtype, device)

    def endless(self, max_len: int) -> bool:
        return self.cache.endless(self, max_len)

    def cuts(self) -> bool:
        return type(self.cache) is Full and not self.window

    def by_pieces(self) -> bool:
        return self.cache.by_pieces

    def flops(self, T: int) -> float:
        """q k^T and w v, 2 operations each a channel and key; every key counts, also those that the causal mask hides (PaLM's
        convention, arXiv 2204.02311), but not those outside the window."""
        return 4 * self.H * self.D * min(T, self.window + self.sinks if self.window else T)

    def backend(self, device: str, dtype: torch.dtype, training: bool) -> str:
        slopes = torch.ones(self.H) if self.cfg.position == "alibi" else None
        dropout = self.cfg.attn_dropout if training else 0.0
        how = How(window=self.window, sinks=self.sinks, slopes=slopes, softcap=self.cfg.attn_softcap, sink_logit=self.sink_logit,
                  dropout=dropout)
        return choose(self.cfg.attention_backend, device, dtype, self.D, how, grad=training)
