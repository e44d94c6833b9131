"""Native Sparse Attention (Yuan et al. 2025, arXiv 2502.11089): compressed blocks, the blocks chosen by them, and a window."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import GPTConfig
from config.check import check_range
from mixers.attention import Attention, AttentionOptions, RotaryOptions
from ops.norm import rms_norm
from ops.nsa import Sizes, compressed, exact, selected
from ops.positions import Positions, lined_up, write


@dataclass(kw_only=True)
class NSAOptions(RotaryOptions):
    compress: int = 32
    """positions that a compressed row stands for"""
    stride: int = 16
    """positions from one compressed row to the next"""
    select: int = 64
    """positions of a block that is chosen or not; it need not be a multiple of the stride"""
    blocks: int = 16
    """blocks that a query reads: the document's first, its own, the one before it, and the best others"""
    window: int = 512
    """last keys that a query sees in any case, itself included"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("compress", "stride", "select", "window"):
            check_range(self, name, least=1)
        check_range(self, "blocks", least=3)
        if self.stride > self.compress:
            raise ValueError(f"stride={self.stride} leaves tokens out of every compressed row: make it at most compress={self.compress}")


class Compress(nn.Module):
    """A block (..., G, l, D) to one row (..., G, D): its mean, plus what two layers make of all of it and of who stands where.
    It starts near the mean, where a row's scores already say something about its block."""

    def __init__(self, l: int, G: int, D: int, bias: bool):
        super().__init__()
        self.place = nn.Parameter(torch.randn(G, l, D) * 0.02)
        self.up, self.down = nn.Linear(l * D, D, bias=bias), nn.Linear(D, D, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(-2) + self.down(F.gelu(self.up((x + self.place).flatten(-2))))


class NSA(Attention):
    """The window is Attention's. Each branch has its own keys and values; their outputs are added, times sigmoid gates a head.

    Rows are made of keys without rotation, which their own places replace, and read by queries without it. The choice of blocks
    (ops.nsa.compressed says how, and what decides between equals) has no gradient.

    State: keys and values of every position, which may yet be chosen; compressed rows, a stride apart; the window's ring; and
    the tail, the last compress - 1 tokens' inputs to the next row. What a token reads: rows, blocks and window.
    """

    Options = NSAOptions  # type: ignore[assignment]

    def __init__(self, cfg: GPTConfig, options: NSAOptions):
        super().__init__(cfg, AttentionOptions(window=options.window, sinks=0, **options.of(RotaryOptions)))
        if cfg.position == "alibi" or cfg.attn_softcap or cfg.attn_dropout:
            raise ValueError("layers: nsa has no ALiBi, attn_softcap or attn_dropout; leave them off")
        self.sizes = Sizes(options.compress, options.stride, options.select, options.blocks)
        C, G, D = cfg.n_embd, self.G, self.D
        self.kv = nn.Linear(C, 4 * G * D, bias=cfg.bias)                      # rows: k and v to compress, k and v to select
        self.kv.parts = [G * D] * 4   # type: ignore[assignment]
        self.gate = nn.Linear(C, 3 * self.H, bias=cfg.bias)
        self.compress_k, self.compress_v = (Compress(options.compress, G, D, cfg.bias) for _ in "kv")
        if cfg.qk_norm:
            self.row_norm, self.block_norm = nn.RMSNorm(D, eps=cfg.norm_eps), nn.RMSNorm(D, eps=cfg.norm_eps)

    def forward(self, x: Tensor, at: Positions, state: dict[str, Tensor] | None = None) -> Tensor:
        B, T, _ = x.shape
        q, k, v = self.qkv(x).view(B, T, -1, self.D).transpose(1, 2).split([self.H, self.G, self.G], 1)   # (B, H or G, T, D)
        raw, kv = self.kv(x).chunk(2, -1)                                                                 # (B, T, 2 G D) each
        block_k, block_v = kv.view(B, T, 2, self.G, self.D).transpose(1, 3).unbind(2)                     # (B, G, T, D)
        if self.cfg.qk_norm:
            q, k, block_k = rms_norm(q, self.q_norm), rms_norm(k, self.k_norm), rms_norm(block_k, self.block_norm)
        turned, k, block_k = self.rotated(at, q, k, block_k)
        q, turned, k, block_k = (t.type_as(v) for t in (q, turned, k, block_k))

        row_k, row_v, first = self.rows(raw, at, state)
        by_rows, blocks = compressed(q, row_k, row_v, at.pos, first, self.sizes, at.past)
        block_k, block_v, start = self.blocks(block_k, block_v, at, state)
        by_blocks = selected(turned, block_k, block_v, blocks, at.pos, start, self.sizes.select)
        by_window = self.attend_keys(turned, k, v, at=at) if state is None else \
            self.cache.extend(self, turned, (k, v), at, {"k": state["window_k"], "v": state["window_v"]})
        gate = exact(self.gate(x)).sigmoid().view(B, T, 3, self.H, 1).permute(2, 0, 3, 1, 4)             # (3, B, H, T, 1)
        y = gate[0] * by_rows + gate[1] * by_blocks + gate[2] * by_window
        return self.out(y.type_as(v).transpose(1, 2).reshape(B, T, self.H * self.D))

    def rows(self, raw: Tensor, at: Positions, state: dict[str, Tensor] | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """raw (B, T, 2 G D) -> keys and values of rows (B, G, N, D), and the index of row 0 of each token's document (None: 0)."""
        (B, T, _), l, s, tokens, shift = raw.shape, self.sizes.compress, self.sizes.stride, raw[:, None], 0
        made, end, upto = at.once(("rows", l, s), lambda: self.completed(at))
        if state is not None:
            shift = state["tail"].shape[2] - 1
            tokens = lined_up(state["tail"], tokens, shift, shift, at.before, at.first)
            write(at.slot(shift, 0), (state["tail"], raw[:, None]))
        index = (end[..., None] + torch.arange(1 - l, 1, device=raw.device) + shift).clamp(min=0)         # (B, N, l)
        index = index + torch.arange(B, device=raw.device)[:, None, None] * tokens.shape[2]
        block = F.embedding(index, tokens.flatten(0, 2)).view(*index.shape, 2, self.G, self.D).movedim(2, 4)   # (B, N, 2, G, l, D)
        k, v = (make(t).transpose(1, 2) for make, t in zip((self.compress_k, self.compress_v), block.unbind(2)))   # (B, G, N, D)
        k, v = (rms_norm(k, self.row_norm) if self.cfg.qk_norm else k).to(raw.dtype), v.to(raw.dtype)
        seen = self.sizes.rows(at.pos + 1)
        if state is None:
            return k, v, None if at.plain else upto - seen
        K, V, ring = state["row_k"], state["row_v"], state["row_k"].shape[2] - 1
        kept = made & (at.doc.gather(1, end) == at.doc.gather(1, (at.end[:, None] - 1).clamp(min=0)))     # of the last document
        slot = torch.where(kept, (at.pos.gather(1, end) + 1 - l) // s, ring)
        if T == 1 or not at.given:
            write(slot, (K, k), (V, v))
            n = min(ring, max(1, self.sizes.rows(at.past + T)))
            return K[:, :, :n].to(raw.dtype), V[:, :, :n].to(raw.dtype), None
        n, before = min(ring, self.sizes.rows(at.past)), self.sizes.rows(at.before)
        both = [lined_up(old, new, n, ring, before, torch.zeros_like(before)) for old, new in ((K, k), (V, v))]
        write(slot, (K, k), (V, v))
        return both[0], both[1], n + upto - seen

    def completed(self, at: Positions) -> tuple[Tensor, Tensor, Tensor]:
        """A row is made of the l tokens up to its last. Which of the N rows that there may be are made (B, N), the index of each
        one's last token (B, N), and how many are made up to each token (B, T)."""
        (B, T), l, s = at.pos.shape, self.sizes.compress, self.sizes.stride
        done = (at.pos >= l - 1) & ((at.pos + 1 - l) % s == 0)
        upto, N = done.cumsum(1), -(-T // s)
        t = torch.arange(T, device=done.device)
        end = at.pos.new_zeros(B, N + 1).scatter(1, torch.where(done, upto - 1, N), t.expand(B, T))[:, :N]
        return t[:N] < upto[:, -1:], end, upto

    def blocks(self, k: Tensor, v: Tensor, at: Positions, state: dict[str, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values (B, G, T, D), behind those of the past, and the index of position 0 of each token's document (B, T)."""
        T = k.shape[2]
        start = torch.arange(T, device=k.device) - at.pos
        if state is None:
            return k, v, start
        K, V, ring = state["k"], state["v"], state["k"].shape[2] - 1
        slot = at.once(("slot", ring, 0), lambda: at.slot(ring, 0))
        if T == 1 or not at.given:
            write(slot, (K, k), (V, v))
            return K, V, torch.zeros_like(start)
        both = [lined_up(old, new, at.past, ring, at.before, at.first) for old, new in ((K, k), (V, v))]
        write(slot, (K, k), (V, v))
        return both[0], both[1], at.past + start

    def init_state(self, B: int, max_len: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """One slot more each, for what need not be kept."""
        lengths = {"": max_len, "row_": max(1, self.sizes.rows(max_len)), "window_": min(self.window, max_len)}
        shapes = {name + kv: (self.G, n + 1, self.D) for name, n in lengths.items() for kv in "kv"}
        shapes["tail"] = (1, max(1, self.sizes.compress - 1) + 1, 2 * self.G * self.D)
        return {name: torch.zeros(B, *shape, dtype=dtype, device=device) for name, shape in shapes.items()}

    def endless(self, max_len: int) -> bool:
        return False

    def flops(self, T: int) -> float:
        """What is attended to; and the rows' layers, which a token pays for G / stride times, not once."""
        layers = sum(m.weight.numel() for make in (self.compress_k, self.compress_v) for m in (make.up, make.down))
        keys = self.sizes.rows(T) + min(T, self.sizes.blocks * self.sizes.select) + min(T, self.window)
        return 4 * self.H * self.D * keys + 2 * layers * (self.G / self.sizes.stride - 1)
