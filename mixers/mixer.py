"""The contract of every sequence mixer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ops.positions import Positions


class Mixer(nn.Module):
    """Mixes information along time, inside a block. A subclass is one file and one line in MIXERS.

    `Options` is a dataclass of what may stand in brackets behind its word in `layers`; `__init__(cfg, options)`.
    """

    Options: type

    def forward(self, x: Tensor, at: Positions, state: dict[str, Tensor] | None = None) -> Tensor:
        """x (B, T, C) -> (B, T, C), causal, any T >= 1.

        state None: nothing came before, nothing is remembered (training). state given: it is the left context; read it, and
        write the new past into it (in place, without gradients). A prompt fed whole, in uneven pieces, or token by token gives
        the same numbers; `at` says where documents begin (nothing is seen across) and what is padding (which leaves no trace).
        """
        raise TypeError(f"{type(self).__name__} has no forward")

    def init_state(self, B: int, max_len: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """The empty past of B rows of at most max_len tokens: every tensor is (B, ...)."""
        return {}

    def place(self, layer: int, before: list[Mixer]) -> None:
        """Told once, when a stack is built: the layer, and all mixers that run before, for what depends on depth or is handed on."""

    def endless(self, max_len: int) -> bool:
        """Whether a state made for max_len takes more tokens than that."""
        return True

    def cuts(self) -> bool:
        """Whether a state goes back to fewer tokens by the model's length alone: what lies beyond is never read."""
        return False

    def by_pieces(self) -> bool:
        """Whether a state holds the same however many tokens are read at once."""
        return True

    def flops(self, T: int) -> float:
        """Forward operations a token in a context of T, beside the products with weight matrices."""
        return 0

    def backend(self, device: str, dtype: torch.dtype, training: bool) -> str:
        """What computes it, for the log ('' if there is no choice)."""
        return ""


class Parallel(Mixer):
    """`a|b` in `layers`: mixers side by side on the same input, their outputs added."""

    def __init__(self, mixers: list[Mixer]):
        super().__init__()
        self.mixers = nn.ModuleList(mixers)

    def forward(self, x: Tensor, at: Positions, state: dict[str, Tensor] | None = None) -> Tensor:
        outputs = [m(x, at, part(state, str(i))) for i, m in enumerate(self.mixers)]
        return torch.stack(outputs).sum(0)

    def init_state(self, B: int, max_len: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        return joined({str(i): m.init_state(B, max_len, dtype, device) for i, m in enumerate(self.mixers)})  # type: ignore[operator]

    def endless(self, max_len: int) -> bool:
        return all(m.endless(max_len) for m in self.mixers)  # type: ignore[operator]

    def cuts(self) -> bool:
        return all(m.cuts() for m in self.mixers)  # type: ignore[operator]

    def by_pieces(self) -> bool:
        return all(m.by_pieces() for m in self.mixers)  # type: ignore[operator]

    def flops(self, T: int) -> float:
        return sum(m.flops(T) for m in self.mixers)  # type: ignore[operator]

    def backend(self, device: str, dtype: torch.dtype, training: bool) -> str:
        return "|".join(m.backend(device, dtype, training) for m in self.mixers)  # type: ignore[operator]


def joined(states: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    """Several states as one: each tensor's name behind its owner's and a dot."""
    return {f"{owner}.{name}": t for owner, state in states.items() for name, t in state.items()}


def part(state: dict[str, Tensor] | None, owner: str) -> dict[str, Tensor] | None:
    """The owner's own of `joined`."""
    return None if state is None else {name[len(owner) + 1:]: t for name, t in state.items() if name.startswith(owner + ".")}
