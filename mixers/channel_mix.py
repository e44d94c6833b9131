"""RWKV's channel mix: a feed-forward half of a block that also sees the token before.

mlp="rwkv7" is that of arXiv 2503.14456, relu(x_k W_up)^2 W_down; mlp="rwkv6" that of arXiv 2404.05892, the same times sigmoid(x_r W_gate).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import GPTConfig
from mixers.mixer import Mixer
from ops.positions import Positions
from ops.shift import shift


class ChannelMix(Mixer):
    """Its state is the last input. Hidden width (n_inner=None): 4 n_embd, and 3.5 n_embd, rounded down to 32, where there is a gate."""

    def __init__(self, cfg: GPTConfig, layer: int = 0):
        super().__init__()
        C, gated = cfg.n_embd, cfg.mlp == "rwkv6"
        self.gated = gated
        inner = cfg.n_inner or (7 * C // 64 * 32 if gated else 4 * C)
        rest, c = 1 - layer / cfg.n_layer, torch.arange(C) / C
        self.mix = nn.Parameter(1 - c ** (rest if gated else rest**4))         # how much of the shifted input is in x_k
        self.up, self.down = nn.Linear(C, inner, bias=cfg.bias), nn.Linear(inner, C, bias=cfg.bias)
        if gated:
            self.gate, self.gate_mix = nn.Linear(C, C, bias=cfg.bias), nn.Parameter(1 - c**rest)

    def forward(self, x: Tensor, at: Positions, state: dict[str, Tensor] | None = None) -> Tensor:
        (x, before), tail = shift(x, 1, at, None if state is None else state["shift"])
        if state is not None:
            state["shift"].copy_(tail)
        y = self.down(F.relu(self.up(x + (before - x) * self.mix)).square())
        return self.gate(x + (before - x) * self.gate_mix).sigmoid() * y if self.gated else y

    def init_state(self, B: int, max_len: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        return {"shift": torch.zeros(B, 1, self.up.in_features, dtype=dtype, device=device)}
