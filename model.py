"""GPT: embedding, blocks, norm, head, loss. What mixes tokens is mixers/; what mixes channels is MLP below.

Letters: B rows, T new tokens, C width of the residual stream, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import GPTConfig as GPTConfig
from mixers import build
from mixers.channel_mix import ChannelMix
from mixers.mixer import Mixer, joined, part
from ops.dropout import Dropout
from ops.loss import count_valid, nll_sum_of
from ops.positions import Positions
from ops.rope import sinusoids


@dataclass
class State:
    """The past of a batch. Every tensor is (B, ...), so repeating, reordering and dropping rows is `rows(index)`."""

    length: Tensor                      # (B,) int64: where the next token of each row stands in its document
    layers: list[dict[str, Tensor]]     # one dict of tensors a layer, the mixer's own
    reach: Tensor                       # (B,) int64: tokens that a row may come to, by which some RoPE scalings choose their frequencies
    past: int                           # a bound on length that the host knows without asking the device
    max_len: int

    def rows(self, index: Tensor) -> State:
        layers = [{name: t[index] for name, t in layer.items()} for layer in self.layers]
        return State(self.length[index], layers, self.reach[index], self.past, self.max_len)


def make_norm(cfg: GPTConfig) -> nn.Module:
    if cfg.norm == "rmsnorm":
        return nn.RMSNorm(cfg.n_embd, eps=cfg.norm_eps)
    return nn.LayerNorm(cfg.n_embd, eps=cfg.norm_eps, bias=cfg.bias)


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202), GELU, or squared ReLU (So et al. 2021, arXiv 2109.08668)."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.kind, gated = cfg.mlp, cfg.mlp == "swiglu"
        inner = cfg.n_inner or (-(-8 * cfg.n_embd // 96) * 32 if gated else 4 * cfg.n_embd)
        self.up = nn.Linear(cfg.n_embd, inner * (2 if gated else 1), bias=cfg.bias)        # swiglu's rows: all gate, all up
        self.up.parts = [inner, inner] if gated else None   # type: ignore[assignment] # two matrices to Muon
        self.down = nn.Linear(inner, cfg.n_embd, bias=cfg.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.kind == "swiglu":
            gate, x = x.chunk(2, -1)
            x = F.silu(gate) * x
        elif self.kind == "relu2":
            x = F.relu(x).square()
        else:
            x = F.gelu(x, approximate="tanh" if self.kind == "gelu_tanh" else "none")
        return self.down(x)


class Block(nn.Module):
    def __init__(self, cfg: GPTConfig, mixer: Mixer, layer: int = 0):
        super().__init__()
        self.shifts = cfg.mlp.startswith("rwkv")             # then both halves look back, and the state is of both
        self.norm1, self.mixer, self.norm2 = make_norm(cfg), mixer, make_norm(cfg)
        self.mlp = ChannelMix(cfg, layer) if self.shifts else MLP(cfg)
        self.drop = Dropout(cfg.dropout)

    def forward(self, x: Tensor, at: Positions, state: dict[str, Tensor] | None = None) -> Tensor:
        x = x + self.drop(self.mixer(self.norm1(x), at, part(state, "mixer") if self.shifts else state))
        return x + self.drop(self.mlp(self.norm2(x), *((at, part(state, "mlp")) if self.shifts else ())))

    def init_state(self, *args) -> dict[str, Tensor]:
        state = self.mixer.init_state(*args)
        return joined({"mixer": state, "mlp": self.mlp.init_state(*args)}) if self.shifts else state  # type: ignore[operator]


class GPT(nn.Module):
    def __init__(self, cfg: GPTConfig):
        super().__init__()
        if not cfg.vocab_size:
            raise ValueError("GPT needs a vocab_size")
        self.cfg = cfg
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.wpe = nn.Embedding(cfg.block_size, cfg.n_embd) if cfg.position == "learned" else None
        self.drop = Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(Block(cfg, mixer, i) for i, mixer in enumerate(build(cfg)))
        self.norm = make_norm(cfg)
        self.head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        if cfg.tie_embeddings:
            self.head.weight = self.wte.weight
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """All of it, but what a mixer's own parameters (decays, gates) start from.

                                   gpt2                      zero
        embeddings, head           N(0, s)                   N(0, 1), 0
        linear weights             N(0, 0.02)                uniform, deviation 1 / sqrt(fan in)
        ... that write to the      N(0, 0.02 / sqrt(2 L))    0
            residual stream
        biases                     0                         0

        s is 0.02, or less where wide models have small vocabularies: logits of variance C s^2 add half of it to the first loss,
        and that is kept to 1.5 % of ln V.
        """
        zero = self.cfg.init == "zero"
        s = min(0.02, (0.03 * math.log(self.cfg.vocab_size) / self.cfg.n_embd) ** 0.5)
        for name, m in self.named_modules():
            if isinstance(m, nn.Embedding):
                nn.init.normal_(m.weight, std=1.0 if zero else s)
            elif isinstance(m, nn.Linear) and m is not self.head:
                writes = name.endswith((".out", ".down"))
                if zero and writes:
                    nn.init.zeros_(m.weight)
                elif zero:
                    nn.init.uniform_(m.weight, -((3 / m.in_features) ** 0.5), (3 / m.in_features) ** 0.5)
                else:
                    nn.init.normal_(m.weight, std=0.02 / (2 * self.cfg.n_layer) ** 0.5 if writes else 0.02)
                if m.bias is not None:
                    nn.init.zeros_(m.bias)
        if not self.cfg.tie_embeddings:
            nn.init.normal_(self.head.weight, std=0.0 if zero else s)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, pos: Tensor | None = None, state: State | None = None) -> Tensor:
        """tokens (B, T) int64 -> logits (B, T, V) in float32; with targets (B, T) the mean loss over those that are not -1.

        pos (B, T): see ops/positions.py. With a state, it is the past, and takes these tokens in; no gradients then.
        """
        with contextlib.nullcontext() if state is None else torch.no_grad():
            x = self.hidden(tokens, pos, state)
            if targets is None:
                return self.logits(x)
            return nll_sum_of(self.logits, x, targets, self.cfg.loss_chunk) / count_valid(targets).clamp(min=1)

    def hidden(self, tokens: Tensor, pos: Tensor | None = None, state: State | None = None) -> Tensor:
        """What the head reads: (B, T, C). Its last column is all that the next token needs."""
        with contextlib.nullcontext() if state is None else torch.no_grad():
            B, T = tokens.shape
            before = (None, 0, tokens, None) if state is None else (state.length, state.past, tokens, state.reach)
            at = Positions(B, T, tokens.device, pos, *before)
            past = self.room(at, state)
            x = self.drop(self.embed(tokens, at))
            for i, block in enumerate(self.blocks):
                x = block(x, at, None if state is None else state.layers[i])
            if state is not None:
                state.length.copy_(at.next(state.length))
                state.past = past
            return self.norm(x)

    def logits(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, V) in float32."""
        logits = self.head(x).float()
        return self.cfg.logit_softcap * torch.tanh(logits / self.cfg.logit_softcap) if self.cfg.logit_softcap else logits

    def embed(self, tokens: Tensor, at: Positions) -> Tensor:
        x = self.wte(tokens)
        if self.wpe is not None:
            x = x + self.wpe(at.pos.clamp(min=0))
        if self.cfg.position == "sinusoidal":
            x = x + sinusoids(at.pos, self.cfg.n_embd).type_as(x)
        return x

    def room(self, at: Positions, state: State | None) -> int:
        """The bound on length after these tokens. ValueError where they do not fit, before anything is written."""
        T = at.pos.shape[1]
        past = at.past + T
        if self.wpe is not None and past > self.cfg.block_size and int(at.pos.max()) >= self.cfg.block_size:
            raise ValueError(f"learned positions end at block_size={self.cfg.block_size}, and this is position {int(at.pos.max())}")
        if state is None or past <= state.max_len:
            return past
        past = int(at.next(state.length).max())
        if past > state.max_len and not all(block.mixer.endless(state.max_len) for block in self.blocks):  # type: ignore[operator,union-attr]
            raise ValueError(f"the state holds {state.max_len} tokens a row, and this would make {past}: give init_state a larger max_len")
        return past

    def init_state(self, B: int, max_len: int, dtype: torch.dtype | None = None) -> State:
        """The empty past of B rows of up to max_len tokens; dtype (None: the weights') is that of keys and values."""
        w = self.wte.weight
        layers = [block.init_state(B, max_len, dtype or w.dtype, w.device) for block in self.blocks]  # type: ignore[operator]
        length = torch.zeros(B, dtype=torch.long, device=w.device)
        return State(length, layers, torch.full_like(length, max_len), 0, max_len)

    def flops_per_token(self, T: int) -> float:
        """Forward and backward at a context of T: 6 for every weight of a matrix product, and three times the mixers' own."""
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 6 * weights + 3 * sum(block.mixer.flops(T) for block in self.blocks)  # type: ignore[operator,union-attr,misc]
