"""Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464), as in Qwen3-Next: the delta rule on a state that each head lets decay, and an
output gate.

    log decay = -exp(A_log) softplus(w_a x + dt_bias)     y = W_O (RMSNorm(o) SiLU(W_z x))
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from config import GPTConfig
from mixers.deltanet import DeltaNet, DeltaOptions, decay_start


class GatedDeltaNet(DeltaNet):
    def __init__(self, cfg: GPTConfig, options: DeltaOptions):
        super().__init__(cfg, options)
        self.a = nn.Linear(cfg.n_embd, self.H, bias=False)                              # dt_bias is its bias
        self.z = nn.Linear(cfg.n_embd, self.H * self.V, bias=cfg.bias)
        self.A_log, self.dt_bias = decay_start(self.H, self.H, 0.01)

    def log_decay(self, x: Tensor) -> Tensor:
        return -(self.A_log.float().exp() * F.softplus(self.a(x).float() + self.dt_bias.float())).mT

    def gate(self, x: Tensor) -> Tensor:
        return F.silu(self.z(x).float())
