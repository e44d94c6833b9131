"""Attention along a pattern: strided and fixed (Sparse Transformer, Child et al. 2019, arXiv 1904.10509), global and local
(Longformer, Beltagy et al. 2020, arXiv 2004.05150), random blocks (BigBird, Zaheer et al. 2020, arXiv 2007.14062), chunks
(Llama 4), and whatever is composed of them. What they mean is ops/patterns.py, how they are computed ops/sparse.py."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from config import GPTConfig
from config.check import nearest
from mixers.attention import Attention, AttentionOptions, HeadOptions
from ops import patterns
from ops.attend import How, choose
from ops.patterns import Alternate, Pattern
from ops.positions import Keys, Positions
from ops.sparse import sparse

PATTERNS: dict[str, Callable[..., Pattern]] = {
    "full": patterns.Full, "local": patterns.Local, "first": patterns.First, "strided": patterns.Strided, "columns": patterns.Columns,
    "chunk": patterns.Chunk, "fixed": patterns.Fixed, "local_blocks": patterns.LocalBlocks, "random_blocks": patterns.RandomBlocks,
}


def parse(text: str) -> Pattern:
    """Read by ast, never run: | and & and brackets; a / b gives every second head a and the others b.

    ValueError, in one line that names the nearest right word, for what cannot be read.
    """
    try:
        kinds = [read(ast.parse(kind.strip(), mode="eval").body) for kind in text.split("/")]
    except SyntaxError:
        raise ValueError(f"pattern: cannot read {text!r}; write for example 'first(4) | local(128)'") from None
    return kinds[0] if len(kinds) == 1 else Alternate(tuple(kinds))


def read(node: ast.expr) -> Pattern:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return read(node.left) | read(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        return read(node.left) & read(node.right)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError(f"pattern: cannot read {ast.unparse(node)!r}; write for example 'first(4) | local(128)'")
    name, said = node.func.id, ast.unparse(node)
    if name not in PATTERNS:
        raise ValueError(f"pattern: unknown {name!r}{nearest(name, PATTERNS)}")
    signature = inspect.signature(PATTERNS[name])
    for keyword in node.keywords:
        if keyword.arg and keyword.arg not in signature.parameters:
            raise ValueError(f"pattern: {said}: unknown {keyword.arg!r}{nearest(keyword.arg, signature.parameters)}")
    try:
        given = signature.bind(*map(ast.literal_eval, node.args), **{str(n.arg): ast.literal_eval(n.value) for n in node.keywords})
    except (TypeError, ValueError):
        raise ValueError(f"pattern: cannot read {said!r}; write {name}{signature_of(signature)} with whole numbers") from None
    for key, value in given.arguments.items():
        if type(value) is not int or value < (key != "seed"):
            raise ValueError(f"pattern: {said}: {key}={value!r} must be a whole number, at least {int(key != 'seed')}")
    return PATTERNS[name](**given.arguments)


def signature_of(signature: inspect.Signature) -> str:
    """(size, summary=1)"""
    return "(" + ", ".join(n if p.default is p.empty else f"{n}={p.default}" for n, p in signature.parameters.items()) + ")"


@dataclass(kw_only=True)
class SparseOptions(HeadOptions):
    pattern: str = "local(32) | strided(32)"
    """who sees whom; every query sees earlier keys only, of its own document. Put together with | (either), & (both), brackets, and
    outermost / (heads take turns) from full(), local(window), first(count), strided(stride), columns(size, summary=1), chunk(size),
    fixed(size, summary=1), local_blocks(count, size=64), random_blocks(count, size=64, seed=0): ops/patterns.py. The default is
    strided attention for a context of 1024 = 32 squared"""

    def __post_init__(self) -> None:
        super().__post_init__()
        parse(self.pattern)


class Sparse(Attention):
    """Its state is attention's: a ring of the longest window after the first tokens where the pattern has these bounds (local,
    chunk, first), and every key where it has not (strided, fixed, random blocks), whatever few of them a token looks at."""

    Options = SparseOptions  # type: ignore[assignment]

    def __init__(self, cfg: GPTConfig, options: SparseOptions):
        pattern = parse(options.pattern)
        first, window = pattern.bound()
        bounded = window < math.inf
        window, first = (int(window), int(first)) if bounded else (0, 0)
        super().__init__(cfg, AttentionOptions(window=window, sinks=first, **options.of(HeadOptions)))
        self.pattern = pattern
        kinds = len(pattern.kinds) if isinstance(pattern, Alternate) else 1
        if self.H % kinds:
            raise ValueError(f"layers: sparse: n_head={self.H} heads cannot take turns at {kinds} patterns: no multiple")

    def attend_keys(self, q: Tensor, k: Tensor, v: Tensor, *, at: Positions, keys: Keys | None = None) -> Tensor:
        return sparse(q, k, v, at, self.pattern, keys=keys, **self.asked(q, at))

    def flops(self, T: int) -> float:
        """As attention's: the keys that the last of T queries sees are what every query counts, on the mean of the heads."""
        last = torch.tensor(T - 1)
        seen = self.pattern.see(last, torch.arange(T), torch.arange(self.H)[:, None])
        return 4 * self.D * float(seen.expand(self.H, T).sum())

    def backend(self, device: str, dtype: torch.dtype, training: bool) -> str:
        dropout = self.cfg.attn_dropout if training else 0.0
        how = How(keep=self.pattern, softcap=self.cfg.attn_softcap, sink_logit=self.sink_logit, dropout=dropout)
        name = choose(self.cfg.attention_backend, device, dtype, self.D, how, grad=training)
        return name if name == "flex" or self.cfg.attention_backend == "reference" else "gathered"
