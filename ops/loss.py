"""The loss of a language model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -1   # a target that is not predicted


def nll_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """logits (B, T, V), targets (B, T) -> the summed negative log-likelihood of the valid targets, in nats and float32."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def count_valid(targets: Tensor) -> Tensor:
    """How many targets count, as a float32 tensor."""
    return (targets != IGNORE).sum().to(torch.float32)
