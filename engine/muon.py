"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): momentum whose matrices are made orthogonal.

Equal shapes are orthogonalised together, in one batch; torch.optim.Muon, which takes them one by one, is the oracle in tests.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ops.processor import cpu_multiplies_bf16

COEFFICIENTS = (3.4445, -4.7750, 2.0315)   # of the quintic iteration: steep at 0, so that five steps bring singular values near 1


def orthogonalize(G: Tensor, steps: int = 5) -> Tensor:
    """(N, rows, cols) -> the nearest semi-orthogonal matrices, singular values within about 0.7 to 1.2, in bfloat16; in float32 on a
    CPU without it, whose bfloat16 products take 90 times as long (AVX2, 1024 x 1024)."""
    a, b, c = COEFFICIENTS
    X = G.float() if G.device.type == "cpu" and not cpu_multiplies_bf16() else G.bfloat16()
    tall = G.shape[-2] > G.shape[-1]
    X = X.mT if tall else X
    X = X / X.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X.mT if tall else X


class Muon(torch.optim.Optimizer):
    """For matrices alone. A group's `rows` says where a parameter holds several matrices (q, k, v; gate, up): their rows."""

    def __init__(self, params, lr: float = 0.02, momentum: float = 0.95, warmup: int = 300, weight_decay: float = 0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, warmup=warmup, weight_decay=weight_decay, rows=None))

    @torch.no_grad()
    def step(self, closure=None) -> None:  # type: ignore[override]
        shapes: dict[torch.Size, list[tuple[Tensor, Tensor, float]]] = {}      # shape -> (its update, where it goes, learning rate)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["momentum_buffer"] = torch.zeros(()), torch.zeros_like(p)
                state["step"] += 1
                warm = min(1.0, float(state["step"]) / max(1, group["warmup"]))
                beta = 0.85 + (group["momentum"] - 0.85) * warm                # a long memory of the first, wild gradients hurts
                buffer = state["momentum_buffer"].lerp_(p.grad, 1 - beta)
                update = p.grad.lerp(buffer, beta)                             # Nesterov
                p.mul_(1 - group["lr"] * group["weight_decay"])
                rows = group["rows"] or [p.shape[0]]
                for u, part in zip(update.split(rows), p.split(rows)):
                    shapes.setdefault(u.shape, []).append((u, part, group["lr"]))
        for shape, items in shapes.items():
            scale = max(1, shape[0] / shape[1]) ** 0.5
            for o, (_, part, lr) in zip(orthogonalize(torch.stack([u for u, _, _ in items])), items):
                part.add_(o.to(part.dtype), alpha=-lr * scale)


def matrices(model: nn.Module) -> list[tuple[Tensor, list[int] | None]]:
    """The hidden matrices, and the rows of those that are several: every Linear but the head."""
    head = getattr(model, "head", None)
    return [(m.weight, getattr(m, "parts", None)) for m in model.modules() if isinstance(m, nn.Linear) and m is not head]


class Both(torch.optim.Optimizer):
    """Two optimizers as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer):    # nothing of its own: no super().__init__()
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict]:  # type: ignore[override]
        return [g for o in self.optimizers for g in o.param_groups]

    @property
    def state(self) -> dict:  # type: ignore[override]
        return {p: s for o in self.optimizers for p, s in o.state.items()}

    def step(self, closure=None) -> None:  # type: ignore[override]
        for o in self.optimizers:
            o.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for o in self.optimizers:
            o.zero_grad(set_to_none)
