"""Sequence mixers: MIXERS names them, and `parse` reads the words of GPTConfig.layers.

    "attention"                                              every layer
    "attention(window=512)*3 attention"                      three local, one global, tiled over n_layer
    "attention(window=64)|attention(rope=False)"             two side by side in one layer

The contract is mixers/mixer.py. A new mixer is one file and one line here.
"""

from __future__ import annotations

import ast
from typing import Any

from config import GPTConfig
from config.check import nearest, options
from mixers.attention import Attention
from mixers.deltanet import DeltaNet
from mixers.forgetting import Forgetting
from mixers.gated_deltanet import GatedDeltaNet
from mixers.gla import GLA
from mixers.hierarchical import Hierarchical
from mixers.kda import KDA
from mixers.kv_cache import Full, kv_cache
from mixers.linear import Linear
from mixers.lowrank import LowRank
from mixers.mamba import Mamba
from mixers.mamba2 import Mamba2
from mixers.mixer import Mixer, Parallel
from mixers.mla import MLA
from mixers.nsa import NSA
from mixers.retention import Retention
from mixers.rwkv6 import RWKV6
from mixers.rwkv7 import RWKV7
from mixers.sparse import Sparse

MIXERS: dict[str, type[Mixer]] = {
    "attention": Attention,
    "deltanet": DeltaNet,
    "forgetting": Forgetting,
    "gated_deltanet": GatedDeltaNet,
    "gla": GLA,
    "hierarchical": Hierarchical,
    "kda": KDA,
    "linear": Linear,
    "lowrank": LowRank,
    "mamba": Mamba,
    "mamba2": Mamba2,
    "mla": MLA,
    "nsa": NSA,
    "retention": Retention,
    "rwkv6": RWKV6,
    "rwkv7": RWKV7,
    "sparse": Sparse,
}

Word = tuple[type[Mixer], Any]   # a mixer's class and its options


def parse(layers: str) -> list[list[Word]]:
    """The pattern, one entry a layer, each a list of the words side by side. Read by ast, never run.

    ValueError, in one line that names the nearest right word, for what cannot be read.
    """
    try:
        nodes = [ast.parse(word, mode="eval").body for word in split(layers)]
    except SyntaxError:
        raise ValueError(f"layers: cannot read {layers!r}; write word, word*3, word(option=value) or word|word") from None
    if not nodes:
        raise ValueError("layers: empty; write for example 'attention'")
    return [layer for node in nodes for layer in read(node)]


def split(layers: str) -> list[str]:
    """Cut at the spaces outside brackets."""
    words, depth = [""], 0
    for c in layers:
        depth += (c in "([{") - (c in ")]}")
        words = words + [""] if c.isspace() and depth <= 0 else words[:-1] + [words[-1] + c]
    return [word for word in words if word]


def read(node: ast.expr) -> list[list[Word]]:
    """One word with its `*n` and its `|`, which binds last: a|b*2 is a|b twice."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        left, right = read(node.left), read(node.right)
        if len(left) != 1:
            raise ValueError(f"layers: {ast.unparse(node)!r}: write *n behind the last word")
        return [left[0] + word for word in right]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        times = node.right.value if isinstance(node.right, ast.Constant) else None
        if type(times) is not int or times < 1:
            raise ValueError(f"layers: {ast.unparse(node)!r}: a word is repeated by *n, n >= 1")
        return read(node.left) * times
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(f"layers: cannot read {ast.unparse(node)!r}; write word, word*3, word(option=value) or word|word")
    cls = lookup(call.func.id)
    return [[(cls, options(call, cls.Options, "layers"))]]


def lookup(word: str) -> type[Mixer]:
    if word not in MIXERS:
        raise ValueError(f"layers: unknown mixer {word!r}{nearest(word, MIXERS)}")
    return MIXERS[word]


def pattern(cfg: GPTConfig) -> list[list[Word]]:
    """The words of each of the n_layer layers."""
    words = parse(cfg.layers)
    if len(words) > cfg.n_layer:
        raise ValueError(f"layers: a pattern of {len(words)} layers does not fit into n_layer={cfg.n_layer}")
    return [words[i % len(words)] for i in range(cfg.n_layer)]


def build(cfg: GPTConfig) -> list[Mixer]:
    """A mixer for each layer."""
    mixers: list[list[Mixer]] = []
    before: list[Mixer] = []
    for layer, words in enumerate(pattern(cfg)):
        mixers.append([cls(cfg, options) for cls, options in words])
        for m in mixers[-1]:
            m.place(layer, before)
            before.append(m)
    if type(kv_cache(cfg.kv_cache)) is not Full and all(type(getattr(m, "cache", Full())) is Full for m in before):
        raise ValueError(f"kv_cache={cfg.kv_cache} is for attention without a window, and layers={cfg.layers!r} has none: leave it full")
    if cfg.rope_scaling != "none" and not any(getattr(m, "turn", None) for m in before):
        raise ValueError(f"rope_scaling={cfg.rope_scaling} is for layers that RoPE turns, and position={cfg.position}, "
                         f"layers={cfg.layers!r} has none")
    return [one[0] if len(one) == 1 else Parallel(one) for one in mixers]
