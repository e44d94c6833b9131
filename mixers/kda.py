"""Kimi Delta Attention (Kimi Linear, arXiv 2510.26692): Gated DeltaNet whose state decays by channel of the keys. Decay and output gate
are products with small matrices, through as many channels as a head has.

    log decay = -exp(A_log) softplus(W_f W_f' x + dt_bias)     y = W_O (RMSNorm(o) sigmoid(W_g W_g' x))
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from config import GPTConfig
from mixers.deltanet import DeltaNet, DeltaOptions, decay_start, heads


class KDA(DeltaNet):
    def __init__(self, cfg: GPTConfig, options: DeltaOptions):
        super().__init__(cfg, options)
        self.f_down, self.f_up = nn.Linear(cfg.n_embd, self.V, bias=False), nn.Linear(self.V, self.H * self.K, bias=False)
        self.g_down, self.g_up = nn.Linear(cfg.n_embd, self.V, bias=False), nn.Linear(self.V, self.H * self.V, bias=cfg.bias)
        self.A_log, self.dt_bias = decay_start(self.H, self.H * self.K, 1)

    def log_decay(self, x: Tensor) -> Tensor:
        steps = F.softplus(self.f_up(self.f_down(x)).float() + self.dt_bias.float())     # (B, T, H K)
        return -self.A_log.float().exp()[:, None, None] * heads(steps, self.H)

    def gate(self, x: Tensor) -> Tensor:
        return self.g_up(self.g_down(x)).float().sigmoid()
