"""A model made ready for generation, in place: its linear layers as ops/few_rows.py has them, rounded or as they are, and where the kernel
takes a half of a block whole, a single call: from Python an operation takes as long as a small product."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from mixers.attention import Attention
from mixers.kv_cache import Full
from model import MLP, Block
from ops.attend import How, see
from ops.few_rows import BITS, GROUP, FewRows
from ops.positions import Positions

LARGE = 30e6   # parameters from which a CPU's generation gains enough for half a minute's build


def prepare(model: nn.Module, quantize: str | None) -> str:
    """`for_generation` where weights are to be rounded, or where a CPU gains by it; what is worth telling."""
    large = next(model.parameters()).device.type == "cpu" and sum(p.numel() for p in model.parameters()) > LARGE
    if not (quantize or large):
        return ""
    share = for_generation(model, BITS.get(quantize or ""))
    return f"{share:.0%} of the linear layers' weights in {quantize}" if quantize else ""


def for_generation(model: nn.Module, bits: int | None = None) -> float:
    """Replaces every linear layer, the head too (a tied embedding keeps its own matrix), in place; int4 leaves those whose inputs are no
    multiple of 32. Returns the share of the layers' weights that were."""
    of = done = 0
    for parent in list(model.modules()):
        for name, m in list(parent.named_children()):
            if isinstance(m, nn.Linear):
                fits = bits != 4 or m.in_features % GROUP == 0
                of, done = of + m.weight.numel(), done + m.weight.numel() * fits
                if fits:
                    setattr(parent, name, FewRows(m, bits))
    for block in [m for m in model.modules() if isinstance(m, Block)]:
        if type(block.mlp) is MLP and not isinstance(block.norm2, nn.Identity) and fast(block.mlp.up, block.mlp.down):
            block.mlp.forward = mlp(block.mlp, block.norm2)                           # type: ignore[method-assign,assignment]
            block.mlp.norm, block.norm2 = block.norm2, nn.Identity()                  # type: ignore[assignment]
        mixer = block.mixer
        if type(mixer) is Attention and not isinstance(block.norm1, nn.Identity) and fast(mixer.qkv, mixer.out) and one_call(mixer):
            mixer.forward = attention(mixer, block.norm1)                             # type: ignore[method-assign]
            mixer.norm, block.norm1 = block.norm1, nn.Identity()
    return done / max(1, of)


def fast(*layers: nn.Module) -> bool:
    return all(isinstance(layer, FewRows) and layer.fast for layer in layers)


def normed(norm: nn.Module) -> tuple:
    return norm.weight, getattr(norm, "bias", None), norm.eps, isinstance(norm, nn.RMSNorm)


def weights(layer: nn.Module) -> tuple:
    layer = cast(FewRows, layer)
    return layer.codes, layer.scale, layer.bias


def mlp(m: MLP, norm: nn.Module) -> Callable[[Tensor], Tensor]:
    """m behind the norm."""
    up = cast(FewRows, m.up)

    def forward(x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or not up.few(x):
            return MLP.forward(m, norm(x))
        return torch.ops.heed.mlp(x, *normed(norm), m.kind, *weights(m.up), *weights(m.down))

    return forward


def one_call(m: Attention) -> bool:
    """Whether the kernel does all that m does with a token a row."""
    cfg = m.cfg
    beside = len(m.counts) > 3 or m.sink_logit is not None or cfg.attn_softcap or cfg.position == "alibi"
    return not beside and type(m.cache) is Full and m.D % 16 == 0 and cfg.attention_backend in ("auto", "sdpa")


def attention(m: Attention, norm: nn.Module) -> Callable[..., Tensor]:
    """m behind the norm."""
    qkv, (window, sinks) = cast(FewRows, m.qkv), m.cache.sees(m)

    def forward(x: Tensor, at: Positions, state: dict[str, Tensor] | None = None) -> Tensor:
        few = state is not None and x.shape[1] == 1 and qkv.few(x) and not at.given and not (m.training and m.cfg.attn_dropout)
        few = few and state is not None and state["k"].dtype == x.dtype and x.dtype in (torch.float32, torch.bfloat16)
        if state is None or not few or torch.is_grad_enabled() or torch.compiler.is_compiling():       # a compiler copies the caches
            return Attention.forward(m, norm(x), at, state)
        ring = state["k"].shape[2] - 1 - sinks
        slot = at.once(("slot", ring, sinks), lambda: at.slot(ring, sinks))
        seen = lambda: torch.zeros(1).masked_fill(~see(at, at.keys_after(ring, sinks), How(window=window, sinks=sinks)), -torch.inf)
        norms = (m.q_norm.weight, m.k_norm.weight, m.q_norm.eps) if m.cfg.qk_norm else (None, None, 0.0)
        table = m.turn.table(at) if m.turn else (None, None)
        mask, interleaved = at.once(("one query", ring, sinks, window), seen), m.cfg.rope_layout == "interleaved"
        return torch.ops.heed.attention(x, *normed(norm), *weights(m.qkv), *weights(m.out), *norms, *table, interleaved, state["k"],
                                        state["v"], slot, mask)

    return forward
