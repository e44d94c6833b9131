"""Multi-head attention (Vaswani et al. 2017, arXiv 1706.03762) with shared key/value heads (GQA, Ainslie et al. 2023,
arXiv 2305.13245; one of them is MQA), a window and attention sinks (Xiao et al. 2023, arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import GPTConfig
from config.check import check_fields, check_range
from mixers.mixer import Mixer
from ops.attend import How, attend, choose
from ops.positions import Keys, Positions
from ops.rope import alibi_slopes, rope_table, rotate


@dataclass
class AttentionOptions:
    """None: as the model's field of that name says."""

    window: int | None = None
    sinks: int | None = None
    rope: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "window", least=0)
        check_range(self, "sinks", least=0)


class Attention(Mixer):
    """Its state is the keys and values of the positions that can still be seen: all, or a ring of `window` after the sinks."""

    Options = AttentionOptions

    def __init__(self, cfg: GPTConfig, options: AttentionOptions):
        super().__init__()
        self.cfg, self.H, self.G = cfg, cfg.n_head, cfg.n_kv_head or cfg.n_head
        self.D = cfg.head_dim or cfg.n_embd // cfg.n_head
        self.window = cfg.window if options.window is None else options.window
        self.sinks = (cfg.sinks if options.sinks is None else options.sinks) if self.window else 0
        self.rope = cfg.position == "rope" if options.rope is None else options.rope
        if options.sinks and not self.window:
            raise ValueError(f"layers: attention(sinks={options.sinks}) needs a window; without one every token is visible anyway")
        if self.rope and self.D % 2:
            raise ValueError(f"layers: attention(rope=True) turns pairs of channels, and head_dim={self.D} is odd")
        self.qkv = nn.Linear(cfg.n_embd, (self.H + 2 * self.G) * self.D, bias=cfg.bias)   # rows: all q, all k, all v
        self.qkv.parts = [self.H * self.D, self.G * self.D, self.G * self.D]   # type: ignore[assignment] # three matrices to Muon
        self.out = nn.Linear(self.H * self.D, cfg.n_embd, bias=cfg.bias)
        if cfg.qk_norm:
            self.q_norm, self.k_norm = nn.RMSNorm(self.D, eps=cfg.norm_eps), nn.RMSNorm(self.D, eps=cfg.norm_eps)

    def forward(self, x: Tensor, at: Positions, state: dict[str, Tensor] | None = None) -> Tensor:
        q, k, v = self.heads(x, at)
        y = self.attend_keys(q, k, v, at) if state is None else self.attend_past(q, k, v, at, state["k"], state["v"])
        return self.out(y.transpose(1, 2).reshape(*x.shape[:2], self.H * self.D))

    def heads(self, x: Tensor, at: Positions) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, C) -> q (B, H, T, D), k and v (B, G, T, D), normalised and rotated."""
        q, k, v = self.qkv(x).view(*x.shape[:2], -1, self.D).transpose(1, 2).split([self.H, self.G, self.G], 1)
        if self.cfg.qk_norm:       # in float32, which the rotation takes anyway
            q, k = (F.rms_norm(t.float(), (self.D,), norm.weight.float(), norm.eps) for t, norm in ((q, self.q_norm), (k, self.k_norm)))
        if self.rope:
            pos = at.pos[:1] if at.plain else at.pos     # plain rows are alike
            cos, sin = at.once(("rope", self.D), lambda: rope_table(pos, self.D, self.cfg.rope_theta))
            q, k = rotate(q, cos, sin, self.cfg.rope_layout), rotate(k, cos, sin, self.cfg.rope_layout)
        return q.type_as(v), k.type_as(v), v

    def attend_keys(self, q: Tensor, k: Tensor, v: Tensor, at: Positions, keys: Keys | None = None) -> Tensor:
        slopes = at.once("slopes", lambda: torch.tensor(alibi_slopes(self.H), device=q.device)) if self.cfg.position == "alibi" else None
        return attend(q, k, v, at, keys=keys, backend=self.cfg.attention_backend, window=self.window, sinks=self.sinks,
                      slopes=slopes, softcap=self.cfg.attn_softcap, dropout=self.cfg.attn_dropout if self.training else 0.0)

    def attend_past(self, q: Tensor, k: Tensor, v: Tensor, at: Positions, K: Tensor, V: Tensor) -> Tensor:
        """K and V (B, G, sinks + ring + 1, D) are the state's; the last slot takes what need not be kept."""
        T, sinks = q.shape[2], self.sinks
        ring = K.shape[2] - 1 - sinks
        slot = at.once(("slot", ring, sinks), lambda: at.slot(ring, sinks))[:, None, :, None].expand_as(k)

        def write() -> None:
            K.scatter_(2, slot, k.to(K.dtype))
            V.scatter_(2, slot, v.to(V.dtype))

        if T == 1 or not (self.window or at.given or at.plain):    # what these tokens overwrite, none of them sees: no copy
            write()
            keys = at.keys_after(ring, sinks)
            n = keys.pos.shape[1]
            return self.attend_keys(q, K[:, :, :n].type_as(q), V[:, :, :n].type_as(q), at, keys)
        if at.plain:
            y = self.attend_keys(q, k, v, at)
        else:
            keys = at.keys_before(ring, sinks)
            n = keys.pos.shape[1] - T
            y = self.attend_keys(q, torch.cat([K[:, :, :n].type_as(k), k], 2), torch.cat([V[:, :, :n].type_as(v), v], 2), at, keys)
        write()
        return y

    def init_state(self, B: int, max_len: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        n = self.sinks + min(self.window or max_len, max_len) + 1
        return {name: torch.zeros(B, self.G, n, self.D, dtype=dtype, device=device) for name in "kv"}

    def endless(self, max_len: int) -> bool:
        return 0 < self.window <= max_len

    def flops(self, T: int) -> float:
        """q k^T and w v, 2 operations each a channel and key; every key counts, also those that the causal mask hides (PaLM's
        convention, arXiv 2204.02311), but not those outside the window."""
        return 4 * self.H * self.D * min(T, self.window + self.sinks if self.window else T)

    def backend(self, device: str, dtype: torch.dtype, training: bool) -> str:
        slopes = torch.ones(self.H) if self.cfg.position == "alibi" else None
        dropout = self.cfg.attn_dropout if training else 0.0
        how = How(window=self.window, sinks=self.sinks, slopes=slopes, softcap=self.cfg.attn_softcap, dropout=dropout)
        return choose(self.cfg.attention_backend, device, dtype, self.D, how, grad=training)
