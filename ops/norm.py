"""RMSNorm in float32."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


def rms_norm(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    """norm(x), computed and given in float32, whatever the model's dtype or autocast."""
    return F.rms_norm(x.float(), norm.normalized_shape, norm.weight.float(), norm.eps)
