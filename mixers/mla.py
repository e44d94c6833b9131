"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434; V3, arXiv 2412.19437): keys and values of all heads are products of
one small latent a token, and order is told by a few rotary channels beside it, whose key all heads share.

    c_t = RMSNorm(W_DKV x_t)          k^R_t = RoPE(W_KR x_t)          the state keeps these two, and nothing of any head
    k_t,h = [W_UK,h c_t, k^R_t]       v_t,h = W_UV,h c_t              q_t,h = [q^C_t,h, RoPE(q^R_t,h)]

    expanded    softmax(q_h . k_h) v_h: ordinary attention, in training and for many new tokens at once
    absorbed    q^C_h . W_UK,h c = (W_UK,h^T q^C_h) . c, and the sum over W_UV,h c is W_UV,h times the sum over c: attention to the
                latents themselves, as if to one wide key/value head, in decoding
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import GPTConfig
from config.check import check_fields, check_range
from mixers.mixer import Mixer
from ops.attend import How, attend, choose, opened, see
from ops.norm import rms_norm
from ops.positions import Keys, Positions, write
from ops.rope import Rotation, rotate


@dataclass
class MLAOptions:
    """The widths default to the paper's proportions of h = head_dim (n_embd / n_head): the state of GQA with 2.25 key/value heads."""

    kv_lora_rank: int | None = None
    """width of the latent that keys and values are made of (None: 4 h, at most n_embd)"""
    q_lora_rank: int | None = None
    """width of the queries' latent, which saves parameters and memory in training, none in decoding (None: queries straight from x)"""
    qk_nope_head_dim: int | None = None
    """channels of a head's queries and keys that are not rotated (None: h)"""
    qk_rope_head_dim: int | None = None
    """rotary channels beside them, whose key all heads share (None: h / 2, rounded down to even)"""
    v_head_dim: int | None = None
    """channels of a head's values (None: h)"""
    window: int | None = None
    """keys that a query sees, itself included (None: as the model's field says; 0: all)"""
    sinks: int | None = None
    """first tokens of the document that stay visible outside the window (None: as the model's field says)"""
    rope: bool | None = None
    """whether the rotary channels are rotated (None: where the model's position is rope)"""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            check_range(self, name, above=0)
        check_range(self, "window", least=0)
        check_range(self, "sinks", least=0)


class MLA(Mixer):
    """Its state is (B, S, kv_lora_rank + qk_rope_head_dim): each token's latent and rotary key side by side, so that both products of
    the absorbed form read one buffer as it lies. `qk_norm` and `n_kv_head` say nothing here: the latents are normalised, and shared."""

    Options = MLAOptions

    def __init__(self, cfg: GPTConfig, options: MLAOptions):
        super().__init__()
        self.cfg, self.H, h = cfg, cfg.n_head, cfg.head_dim or cfg.n_embd // cfg.n_head
        self.rank = options.kv_lora_rank or min(4 * h, cfg.n_embd)
        self.nope, self.rot = options.qk_nope_head_dim or h, options.qk_rope_head_dim or max(2, h // 4 * 2)
        self.V, self.D = options.v_head_dim or h, self.nope + self.rot
        self.wide = max(self.D, self.V)
        self.window = cfg.window if options.window is None else options.window
        self.sinks = (cfg.sinks if options.sinks is None else options.sinks) if self.window else 0
        rope = cfg.position == "rope" if options.rope is None else options.rope
        if options.sinks and not self.window:
            raise ValueError(f"layers: mla(sinks={options.sinks}) needs a window; without one every token is visible anyway")
        if rope and self.rot % 2:
            raise ValueError(f"layers: mla turns pairs of channels, and qk_rope_head_dim={self.rot} is odd")
        if cfg.position == "alibi":
            raise ValueError("layers: mla has no ALiBi: set position to rope or none")
        self.turn = Rotation(self.rot, cfg.rope_theta, cfg.rope_scaling) if rope else None
        self.scale = self.D**-0.5 * (self.turn.scaling.logit_scale() if self.turn else 1)
        self.q_rank = options.q_lora_rank
        if self.q_rank:
            self.q_down, self.q_norm = nn.Linear(cfg.n_embd, self.q_rank, bias=cfg.bias), self.norm(self.q_rank)
        self.q_up = nn.Linear(self.q_rank or cfg.n_embd, self.H * self.D, bias=False)
        self.kv_down, self.kv_norm = nn.Linear(cfg.n_embd, self.rank + self.rot, bias=cfg.bias), self.norm(self.rank)
        self.kv_down.parts = [self.rank, self.rot]   # type: ignore[assignment] # two matrices to Muon
        self.k_up = nn.Linear(self.rank, self.H * self.nope, bias=False)
        self.v_up = nn.Linear(self.rank, self.H * self.V, bias=False)
        self.out = nn.Linear(self.H * self.V, cfg.n_embd, bias=cfg.bias)
        # Operations a head and key for T queries: expanded r (nope + V) + T (nope + rot + V), absorbed T (2 r + rot). So many tokens
        # at once pay for the expansion: 170 of them in DeepSeek-V3.
        up = self.nope + self.V
        self.many = self.rank * up / (2 * self.rank - up) if 2 * self.rank > up else math.inf

    def norm(self, width: int) -> nn.RMSNorm:
        return nn.RMSNorm(width, eps=self.cfg.norm_eps)

    def forward(self, x: Tensor, at: Positions, state: dict[str, Tensor] | None = None) -> Tensor:
        B, T, _ = x.shape
        q, kv = self.queries_and_latents(x, at)
        y = self.expanded(q, kv, at) if state is None else self.attend_past(q, kv, at, state["kv"])
        return self.out(y.transpose(1, 2).reshape(B, T, self.H * self.V))

    def queries_and_latents(self, x: Tensor, at: Positions) -> tuple[Tensor, Tensor]:
        """x (B, T, C) -> q (B, H, T, nope + rot) and kv (B, T, rank + rot), rotated, the latents normalised."""
        q = self.q_up(rms_norm(self.q_down(x), self.q_norm).type_as(x) if self.q_rank else x)
        q, q_rot = q.unflatten(-1, (self.H, self.D)).transpose(1, 2).split([self.nope, self.rot], -1)
        c, k_rot = self.kv_down(x).split([self.rank, self.rot], -1)
        if self.turn:
            cos, sin = self.turn.table(at)
            q_rot = rotate(q_rot, cos, sin, self.cfg.rope_layout)
            k_rot = rotate(k_rot[:, None], cos, sin, self.cfg.rope_layout)[:, 0]
        return torch.cat([q, q_rot], -1), torch.cat([rms_norm(c, self.kv_norm).type_as(c), k_rot], -1)

    def expanded(self, q: Tensor, kv: Tensor, at: Positions, keys: Keys | None = None) -> Tensor:
        """q (B, H, T, nope + rot), kv (B, S, rank + rot) -> (B, H, T, V): every head's keys and values, by any backend."""
        c, k_rot = kv.split([self.rank, self.rot], -1)
        k = self.k_up(c).unflatten(-1, (self.H, self.nope)).transpose(1, 2)                  # (B, H, S, nope)
        k = torch.cat([k, k_rot[:, None].expand(-1, self.H, -1, -1)], -1)                    # (B, H, S, nope + rot)
        v = self.v_up(c).unflatten(-1, (self.H, self.V)).transpose(1, 2)                     # (B, H, S, V)
        q, k, v = (t if t.shape[-1] == self.wide else F.pad(t, (0, self.wide - t.shape[-1])) for t in (q, k, v))    # see `backend`
        return attend(q, k, v, at, keys=keys, backend=self.cfg.attention_backend, window=self.window, sinks=self.sinks, scale=self.scale,
                      softcap=self.cfg.attn_softcap, dropout=self.cfg.attn_dropout if self.training else 0.0)[..., :self.V]

    def absorbed(self, q: Tensor, kv: Tensor, at: Positions, keys: Keys | None = None) -> Tensor:
        """The same without any head's keys or values. Plain products, which a CPU does in half the time of its fused kernel, and whose
        scores are few: CUDA's would copy the latents for every head."""
        H, T = q.shape[1:3]
        q, q_rot = q.split([self.nope, self.rot], -1)
        q = torch.cat([torch.einsum("bhtn,hnr->bhtr", q, self.k_up.weight.view(H, self.nope, self.rank)), q_rot], -1)
        s = (kv @ q.flatten(1, 2).mT).mT.unflatten(1, (H, T)).float() * self.scale         # (B, H, T, S)
        if self.cfg.attn_softcap:
            s = self.cfg.attn_softcap * torch.tanh(s / self.cfg.attn_softcap)
        mask, empty = opened(see(at, keys or at.keys_new(), How(window=self.window, sinks=self.sinks), H), None, s.dtype)
        w = s.masked_fill(~mask, -torch.inf).softmax(-1).masked_fill(empty, 0).type_as(kv)
        c = (w.flatten(1, 2) @ kv[..., :self.rank]).unflatten(1, (H, T))                     # (B, H, T, rank)
        return torch.einsum("bhtr,hvr->bhtv", c, self.v_up.weight.view(H, self.V, self.rank))

    def attend_past(self, q: Tensor, kv: Tensor, at: Positions, past: Tensor) -> Tensor:
        """past (B, sinks + ring + 1, rank + rot) is the state's; the last slot takes what need not be kept."""
        T, sinks = q.shape[2], self.sinks
        ring = past.shape[1] - 1 - sinks
        slot = at.once(("slot", ring, sinks), lambda: at.slot(ring, sinks))
        form = self.expanded if self.many < T else self.absorbed
        if T == 1 or not (self.window or at.given or at.plain):    # what these tokens overwrite, none of them sees: no copy
            write(slot, (past[:, None], kv[:, None]))
            keys = at.keys_after(ring, sinks)
            return form(q, past[:, :keys.pos.shape[1]].type_as(kv), at, keys)
        if at.plain:               # nothing but these tokens to expand
            y = self.expanded(q, kv, at)
        else:
            keys = at.keys_before(ring, sinks)
            y = form(q, torch.cat([past[:, :keys.pos.shape[1] - T].type_as(kv), kv], 1), at, keys)
        write(slot, (past[:, None], kv[:, None]))
        return y

    def init_state(self, B: int, max_len: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        n = self.sinks + min(self.window or max_len, max_len) + 1
        return {"kv": torch.zeros(B, n, self.rank + self.rot, dtype=dtype, device=device)}

    def endless(self, max_len: int) -> bool:
        return 0 < self.window <= max_len

    def cuts(self) -> bool:
        return not self.window

    def flops(self, T: int) -> float:
        """q k^T and w v in the expanded form, by the convention of attention.py."""
        return 2 * self.H * (self.D + self.V) * min(T, self.window + self.sinks if self.window else T)

    def backend(self, device: str, dtype: torch.dtype, training: bool) -> str:
        """Of the expanded form. Its heads are padded with zeros to one width, which every kernel takes: where keys and values differ,
        a CPU's fused kernel and CUDA's flash refuse, and what torch runs then holds all T x S scores."""
        how = How(window=self.window, sinks=self.sinks, softcap=self.cfg.attn_softcap, dropout=self.cfg.attn_dropout if training else 0.0)
        return choose(self.cfg.attention_backend, device, dtype, self.wide, how, grad=training)
