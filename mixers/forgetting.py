"""Forgetting attention (Forgetting Transformer, Lin et al. 2025, arXiv 2503.02130): softmax attention whose scores fade with what
the tokens between say, by a forget gate f_t = sigmoid(w_f x_t + b_f) of each head.

    s_ij = q_i . k_j / sqrt(D) + log f_(j+1) + ... + log f_i

The gates tell order, so that the paper has no RoPE (`position="none"`, or the word's rope=False). Its "Pro" block has qk_norm, gate=True,
a norm of the outputs and a shift of keys and values; the last two are not here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import GPTConfig
from mixers.attention import Attention, AttentionOptions
from ops.attend import attend
from ops.forgetting import decayed
from ops.positions import Keys, Positions


class Forgetting(Attention):
    """Its state is attention's, and each key's own log f in float32, of which the sums are made anew in float64.

    Gates start as the paper's data-independent ones do, by decay times: log f = -1 / t, t even in the logarithm over the heads, here
    from 16 tokens to block_size. Its data-dependent ones start at 1/2, and have to unlearn to forget.
    """

    def __init__(self, cfg: GPTConfig, options: AttentionOptions):
        super().__init__(cfg, options)
        if self.sinks:
            raise ValueError("layers: forgetting has no sinks: what was forgotten between them and the window is not kept")
        if cfg.attn_softcap:
            raise ValueError("layers: forgetting has no attn_softcap, which would cap the decay")
        t = torch.logspace(4, max(4, torch.tensor(cfg.block_size).log2().item()), self.H, base=2)
        self.forget = nn.Linear(cfg.n_embd, self.H, bias=False)
        self.forget_bias = nn.Parameter(-(1 / t).expm1().log())                               # sigmoid(it) = exp(-1 / t)

    def beside(self, x: Tensor) -> tuple[Tensor, ...]:
        return (F.logsigmoid(self.forget(x).float() + self.forget_bias.float()).transpose(1, 2)[..., None],)      # (B, H, T, 1)

    def attend_keys(self, q: Tensor, k: Tensor, v: Tensor, f: Tensor, *, at: Positions, keys: Keys | None = None) -> Tensor:   # type: ignore[override]
        q, k = decayed(q, k, f[..., 0], at, keys)
        return attend(q, k, v, at, keys=keys, window=self.window, scale=self.D**-0.5, **self.asked(q, at))

    def init_state(self, B: int, max_len: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        state = super().init_state(B, max_len, dtype, device)
        return state | {"f": torch.zeros(B, self.H, state["k"].shape[2], 1, device=device)}
