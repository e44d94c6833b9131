"""What a model makes of contexts of any length: loss by length and by position, and whether it finds again what it has read."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from data.shards import Split
from data.tokenizer import Tokenizer
from engine.device import autocast
from model import GPT

PIECE = 1024       # tokens of a row that are read at once,
PAIRS = 1 << 25    # or fewer, where those times the keys, for which there may be a mask, are more than this
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


class Window(NamedTuple):
    """Tokens begin .. end of a document are read, and those from `first` on are scored."""

    document: int
    begin: int
    end: int
    first: int


def documents(split: Split, length: int, limit: int) -> Tensor:
    """(N, length + 1) ids: `limit` stretches of the split at most, one text behind the other, spread evenly over it."""
    n = (len(split) - 1) // length
    if not n:
        raise ValueError(f"the split {split.name!r} in {split.folder} has {len(split):,} tokens, and a context of {length:,} needs one "
                         "more than that")
    chosen = [i * n // min(limit, n) for i in range(min(limit, n))]
    return torch.from_numpy(np.stack([split.read(i * length, length + 1) for i in chosen]))


def windows(N: int, M: int, c: int, stride: int) -> list[Window]:
    """Contexts of c that cover N documents of M tokens; each token is scored once. stride = c: one after another, so that a token has 0 to
    c before it; less: overlapping, so that all but a document's first c have at least c - stride."""
    out = []
    for document in range(N):
        end = min(c, M)
        out.append(Window(document, 0, end, 0))
        while end < M:
            first, end = end, min(end + stride, M)
            out.append(Window(document, first if stride == c else end - c, end, first))
    return out


def pieces(T: int, length: int | None = None) -> Iterator[slice]:
    """T tokens in the pieces in which a context of `length` (None: T) is read."""
    n = max(1, min(PIECE, PAIRS // (length or T)))
    return (slice(a, min(a + n, T)) for a in range(0, T, n))


@torch.no_grad()
def nats(model: GPT, x: Tensor, y: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """(B, T): what each target of y (B, T) costs after x (B, T), a piece at a time."""
    device, T, out = model.wte.weight.device, x.shape[1], []
    x, y = x.to(device), y.to(device)
    with autocast(device, dtype):
        state = model.init_state(len(x), T, dtype=dtype) if T > PIECE else None
        for piece in pieces(T):
            logits = model(x[:, piece], state=state)
            out.append(F.cross_entropy(logits.flatten(0, 1), y[:, piece].flatten(), reduction="none").view(len(x), -1))
    return torch.cat(out, 1).cpu()


def scored(model: GPT, text: Tensor, cut: list[Window], rows: int, dtype: torch.dtype,
           note: Callable[[int], Any] = lambda n: None) -> Tensor:
    """(N, M): what each token of text (N, M + 1) but the first costs, read in these windows, at most `rows` side by side."""
    out = torch.full((len(text), text.shape[1] - 1), math.nan)
    for length in sorted({w.end - w.begin for w in cut}):
        alike = [w for w in cut if w.end - w.begin == length]
        wide = max(1, min(rows, rows * PIECE // length))
        for i in range(0, len(alike), wide):
            batch = alike[i:i + wide]
            both = torch.stack([text[w.document, w.begin:w.end + 1] for w in batch])
            for w, found in zip(batch, nats(model, both[:, :-1], both[:, 1:], dtype)):
                out[w.document, w.first:w.end] = found[w.first - w.begin:]
            note(len(batch) * length)
    return out


# what is found again

def passkey(tokenizer: Tokenizer, draw: random.Random) -> tuple[str, str, str, str | None]:
    """The fact, the question, the answer, and the filler: the same sentences over and over (after Mohtashami and Jaggi 2023,
    arXiv 2305.16300)."""
    digits = "0123456789" if not tokenizer.unknown("0123456789") else "abcdefghij"
    key = "".join(draw.choice(digits) for _ in range(5))
    filler = "The leaves are green. The river is wide. The night is long. Day follows night. "
    return f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n", "\nWhat is the pass key? The pass key is", f" {key}", filler


def needle(tokenizer: Tokenizer, draw: random.Random) -> tuple[str, str, str, str | None]:
    """The same in a real text, and what is asked for is named anew each time."""
    name, word = ("".join(draw.choice("bdfgklmnprst") + draw.choice("aeiou") for _ in range(3)) for _ in range(2))
    return f"\nThe secret word of {name} is {word}.\n", f"\nThe secret word of {name} is", f" {word}", None


KINDS = {"passkey": passkey, "needle": needle}


def asked(kind: str, tokenizer: Tokenizer, text: list[int], length: int, depth: float, seed: int) -> tuple[list[int], int]:
    """ids, `length` of them, that hold a fact at this depth (0: at the front) and end in the question and its answer; and how many of the
    last are the answer. ValueError where that does not fit."""
    fact, question, answer, filler = KINDS[kind](tokenizer, random.Random(f"{kind} {depth} {seed}"))
    if tokenizer.kind == "ids":
        raise ValueError(f"{kind} is text, and this vocabulary is ids alone")
    if missing := tokenizer.unknown(fact + question + answer + (filler or "")):
        raise ValueError(f"the vocabulary lacks {' '.join(map(repr, missing))}, which {kind} needs")
    front, back, end = (tokenizer.encode(t) for t in (fact, question, answer))
    room = length - len(front) - len(back) - len(end)
    if room < 0:
        raise ValueError(f"{kind} takes {length - room} tokens, and the context is {length}")
    around = text if filler is None else tokenizer.encode(filler)
    around = (around * (room // len(around) + 1))[:room]
    at = round(depth * room)
    return [*around[:at], *front, *around[at:], *back, *end], len(end)


@torch.no_grad()
def found(model: GPT, ids: list[int], n: int, dtype: torch.dtype) -> tuple[bool, float]:
    """Whether the last n ids are the likeliest, one after another, and their mean probability."""
    x, device = torch.tensor([ids]), model.wte.weight.device
    with autocast(device, dtype):
        state, T = model.init_state(1, len(ids), dtype=dtype), len(ids) - n - 1
        for piece in pieces(T, len(ids)):
            model.hidden(x[:, piece].to(device), state=state)
        p = model(x[:, T:-1].to(device), state=state)[0].softmax(-1).cpu()
    return bool((p.argmax(-1) == x[0, -n:]).all()), float(p[range(n), x[0, -n:]].mean())


def possible(tokenizer: Tokenizer, text: list[int], lengths: Iterable[int], trials: int) -> tuple[list[tuple[str, int]], list[str]]:
    """What can be asked at which length, and why what cannot."""
    can, cannot = list[tuple[str, int]](), dict[str, str]()
    for kind in KINDS:
        for length in lengths:
            try:
                for seed in range(trials):
                    for depth in DEPTHS:
                        asked(kind, tokenizer, text, length, depth, seed)
                can.append((kind, length))
            except ValueError as e:
                cannot[kind] = str(e)
    return can, list(cannot.values()) if trials else []


def retrieval(model: GPT, tokenizer: Tokenizer, text: list[int], what: Iterable[tuple[str, int]], trials: int, dtype: torch.dtype,
              note: Callable[[int], Any] = lambda n: None) -> Iterator[dict[str, Any]]:
    """A cell a kind, length and depth: {"kind", "length", "depth", "accuracy", "probability"}."""
    for kind, length in what:
        for depth in DEPTHS:
            hits = [found(model, *asked(kind, tokenizer, text, length, depth, seed), dtype) for seed in range(trials)]
            note(length * trials)
            yield {"kind": kind, "length": length, "depth": depth, "accuracy": sum(hit for hit, _ in hits) / trials,
                   "probability": sum(p for _, p in hits) / trials}


def measure(model: GPT, tokenizer: Tokenizer, split: Split, lengths: list[int], trials: int, limit: int = 16, rows: int = 16,
            dtype: torch.dtype = torch.float32, sliding: bool = True) -> dict[str, Any]:
    """{"unit", "tokens", "lengths" (a dict a length: loss strided, and sliding), "positions" (a dict a range of them in the longest),
    "retrieval" (see there), "notes" (what was not measured)}, over the same tokens for all lengths: `limit` documents of the longest."""
    text = documents(split, M := lengths[-1], limit)
    what, notes = possible(tokenizer, text[0].tolist(), lengths, trials)
    nbytes = torch.from_numpy(tokenizer.byte_lengths())[text[:, 1:]]
    strides = {"strided": lambda n: n} | ({"sliding": lambda n: n if n == M else -(-n // 4)} if sliding else {})
    plans = {(n, kind): windows(len(text), M, n, stride(n)) for n in lengths for kind, stride in strides.items()}
    plans.pop((M, "sliding"), None)                  # the same as strided
    total = sum(w.end - w.begin for plan in plans.values() for w in plan) + len(DEPTHS) * trials * sum(n for _, n in what)
    with tqdm(total=total, unit="token", unit_scale=True, disable=None, leave=False) as bar:
        costs = {key: scored(model, text, plan, rows, dtype, bar.update) for key, plan in plans.items()}
        cells = list(retrieval(model, tokenizer, text[0].tolist(), what, trials, dtype, bar.update)) if trials else []
    costs[M, "sliding"] = costs[M, "strided"]

    def loss(n: int, kind: str, a: int = 0, b: int = M) -> float:
        size = math.log(2) * float(nbytes[:, a:b].sum()) or nbytes[:, a:b].numel()
        return float(costs[n, kind][:, a:b].sum()) / size

    return {"unit": "bits per byte" if nbytes.sum() else "nats a token", "tokens": nbytes.numel(),
            "lengths": [{"length": n, **{kind: loss(n, kind) for kind in strides}} for n in lengths],
            "positions": [{"from": a, "to": b - 1, "loss": loss(M, "strided", a, b)} for a, b in buckets(M)],
            "retrieval": cells, "notes": notes}


# what is shown

def buckets(M: int) -> list[tuple[int, int]]:
    """Positions 0 to 63, 64 to 127, 128 to 255, ..., M - 1."""
    edges = [0, *(64 << i for i in range(64) if 64 << i < M), M]
    return list(zip(edges, edges[1:]))


def report(r: dict[str, Any]) -> str:
    lines = [f"{'context':>9}  {'strided':>8}  {'sliding':>8}    {r['unit']}; the same tokens in every line"]
    lines += [f"{row['length']:>9,}  {row['strided']:8.4f}  {row['sliding']:8.4f}" for row in r["lengths"]]
    lines += ["", f"{'positions':>15}  in a context of {r['lengths'][-1]['length']:,}"]
    lines += [f"{row['from']:>7,}-{row['to']:<7,}  {row['loss']:8.4f}" for row in r["positions"]]
    for kind in dict.fromkeys(cell["kind"] for cell in r["retrieval"]):
        cells = [cell for cell in r["retrieval"] if cell["kind"] == kind]
        lines += ["", f"{kind}: found (probability)  " + "  ".join(f"{'depth ' + format(d, '.0%'):>13}" for d in DEPTHS)]
        for length in dict.fromkeys(cell["length"] for cell in cells):
            row = [cell for cell in cells if cell["length"] == length]
            lines.append(f"{length:>28,}  " + "  ".join(f"{c['accuracy']:>6.0%} ({c['probability']:.2f})" for c in row))
    return "\n".join([*lines, *([""] if r["notes"] else []), *r["notes"]])


def draw(results: dict[str, dict[str, Any]], path: Path) -> Path | None:
    """Loss by length and by position, a line a model, dashed where its name says tuned, and what the last of them finds again. None without
    matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    *_, last = results.values()
    kinds = list(dict.fromkeys(cell["kind"] for cell in last["retrieval"]))
    fig = Figure(figsize=(6.5 * (2 + len(kinds)), 5), layout="constrained")
    axes = fig.subplots(1, 2 + len(kinds))
    colors = list(dict.fromkeys(name.partition(",")[0] for name in results))
    for name, r in results.items():
        look = {"color": f"C{colors.index(name.partition(',')[0]) % 10}", "marker": "o", "linestyle": "--" if "," in name else "-"}
        at = [row["length"] for row in r["lengths"]]
        axes[0].plot(at, [row["strided"] for row in r["lengths"]], label=name or "strided", **look)
        if len(results) == 1:
            axes[0].plot(at, [row["sliding"] for row in r["lengths"]], label="sliding", **{**look, "color": "C1"})
        axes[1].plot([row["to"] + 1 for row in r["positions"]], [row["loss"] for row in r["positions"]], label=name, **look)
    for ax, label in zip(axes, ("context", "position")):
        ax.set_xscale("log", base=2)
        ax.set(xlabel=f"{label}, tokens", ylabel=last["unit"])
        ax.grid(True, alpha=0.3)
        if len(results) > 1 or ax is axes[0]:
            ax.legend(fontsize=7)
    for ax, kind in zip(axes[2:], kinds):
        cells = [cell for cell in last["retrieval"] if cell["kind"] == kind]
        lengths = list(dict.fromkeys(cell["length"] for cell in cells))
        grid = [[next(c["accuracy"] for c in cells if (c["length"], c["depth"]) == (n, d)) for n in lengths] for d in DEPTHS]
        ax.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for i, row in enumerate(grid):
            for j, value in enumerate(row):
                ax.text(j, i, f"{value:.0%}", ha="center", va="center")
        ax.set(title=kind, xlabel="context, tokens", ylabel="depth", xticks=range(len(lengths)), xticklabels=[f"{n:,}" for n in lengths],
               yticks=range(len(DEPTHS)), yticklabels=[f"{d:.0%}" for d in DEPTHS])
    fig.savefig(path, dpi=120)
    return path
