"""How well a model predicts a corpus: `python eval.py --split val` measures the newest run under out/."""

import math
import sys
from dataclasses import dataclass, replace
from typing import Any, Literal

from config.check import check_fields, check_range
from engine.cli import one_line_errors, parse


@dataclass
class EvalConfig:
    """Loss and bits per byte over a whole split, in fixed windows that do not overlap: the same figure every time."""

    checkpoint: str | None = None
    """a run's folder, one of its steps, or a folder of runs (None: the newest run under out/); a run gives its best step"""
    dataset: str | None = None
    """a corpus under data/ or a prepared folder (None: what it was trained on, each corpus of a mixture by itself)"""
    split: Literal["val", "train"] = "val"
    """which part of it"""
    block_size: int | None = None
    """tokens a window (None: the model's)"""
    batch_size: int = 16
    """windows at once"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps"""
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """of the matrix products"""
    kv_cache: str | None = None
    """instead: what this cache costs and saves, such as int8 or "h2o(budget=64, recent=32)", see sample.py: bits per byte of the second
    half of each window, read a token at a time after the first half, against the full cache's"""
    quantize: Literal["int8", "int4"] | None = None
    """with the weights of the linear layers in 8 or 4 bits, as sample.py has them"""
    limit: int | None = None
    """so many windows at least, spread evenly over the split (None: all of it; with --context_lengths 16 of the longest)"""
    rope_scaling: str | None = None
    """for contexts longer than it was trained on, e.g. "yarn(factor=4)"; see tools.extend (None: as the checkpoint says)"""
    context_lengths: str | None = None
    """instead: e.g. 256,512,1024, bits per byte at each, over the same tokens: windows one after another (strided) and overlapping by three
    quarters (sliding); by position in the longest; and whether a pass key and a needle are found, by depth and length. Texts of the corpus
    follow one another as one"""
    trials: int = 4
    """of finding, for each depth and length (0: none)"""
    out: str = "out/context"
    """folder of context.json and context.png"""

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "batch_size", above=0)
        check_range(self, "block_size", above=0)
        check_range(self, "limit", above=0)
        check_range(self, "trials", least=0)
        self.lengths()
        if self.kv_cache and self.quantize:
            raise ValueError("--kv_cache and --quantize are measured one at a time: leave one of them")
        if self.context_lengths and (self.kv_cache or self.quantize or self.block_size):
            raise ValueError("--context_lengths goes with none of --kv_cache, --quantize, --block_size")

    def lengths(self) -> list[int]:
        """context_lengths as numbers, in order."""
        try:
            found = sorted({int(n) for n in (self.context_lengths or "").split(",") if n.strip()})
        except ValueError:
            found = [0]
        if self.context_lengths is not None and (not found or found[0] < 2):
            raise ValueError(f"context_lengths={self.context_lengths!r}: write lengths of at least 2 tokens, for example 256,512,1024")
        return found


if __name__ == "__main__":
    config = parse(EvalConfig)       # before torch is imported, so that --help and mistakes answer at once

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from data.find import find
from data.loader import FixedWindows
from data.mixture import Mixture
from data.shards import Corpus, Split
from data.tokenizer import Tokenizer
from engine import context
from engine.checkpoint import find_step, load_model, read_config, read_progress
from engine.decode import for_generation
from engine.device import autocast, keep_memory, pick_device, pick_dtype
from ops.few_rows import BITS
from ops.loss import IGNORE, count_valid
from ops.positions import document_positions, within_documents


@torch.no_grad()
def evaluate(config: EvalConfig) -> dict[str, Any]:
    """{"loss": nats a token, "bits_per_byte", "tokens", "bytes", ...}: tokens are those predicted, all but the split's first, and
    bytes the UTF-8 text they stand for; an end-of-text token costs nats and stands for no byte."""
    keep_memory()
    device = pick_device(config.device)
    step = find_step(config.checkpoint)
    model, tokenizer = load_model(step, device, rope_scaling=config.rope_scaling)
    if config.quantize:
        for_generation(model, BITS[config.quantize])
    trained = read_config(step)
    corpus = same_tokenizer(find(config.dataset or trained["dataset"]), tokenizer, step)
    windows = cut(config, corpus.split(config.split), model.cfg.block_size)
    lengths = torch.from_numpy(tokenizer.byte_lengths())
    dtype = pick_dtype(config.dtype, device, model.cfg.n_embd)
    run = within_documents(model, tokenizer.eot) if trained.get("documents") and tokenizer.eot is not None else model
    nats, tokens, size = 0.0, 0, 0
    for x, y in tqdm(windows, total=len(windows), unit="batch", disable=None, leave=False):
        with autocast(device, dtype):
            nats += float(run(x.to(device), y.to(device)) * count_valid(y))
        known = y[y != IGNORE]
        tokens, size = tokens + len(known), size + int(lengths[known].sum())
    return {"checkpoint": str(step), "step": read_progress(step).iter, "split": config.split, "loss": nats / tokens,
            "bits_per_byte": nats / math.log(2) / size if size else None, "tokens": tokens, "bytes": size,
            "unit": "character" if tokenizer.kind == "char" else "token"}


def same_tokenizer(corpus: Corpus, tokenizer: Tokenizer, step: Path) -> Corpus:
    if corpus.tokenizer.hash != tokenizer.hash:
        raise ValueError(f"{corpus.folder} has another tokenizer than {step}: prepare it with the same one")
    return corpus


def cut(config: EvalConfig, split: Split, block_size: int) -> FixedWindows:
    return FixedWindows(split, config.block_size or block_size, config.batch_size, config.limit and -(-config.limit // config.batch_size))


@torch.no_grad()
def cache_cost(config: EvalConfig) -> dict[str, Any]:
    """What `kv_cache` does to the second half of each window, read a token at a time after the first: {"bits_per_byte", "full" (those of
    the cache that keeps everything), "bytes" and "full_bytes" (of a row's state at the window's length), ...}."""
    keep_memory()
    device = pick_device(config.device)
    step = find_step(config.checkpoint)
    model, tokenizer = load_model(step, device, config.kv_cache, config.rope_scaling)
    whole, _ = load_model(step, device, "full", config.rope_scaling)
    trained = read_config(step)
    corpus = same_tokenizer(find(config.dataset or trained["dataset"]), tokenizer, step)
    windows = cut(config, corpus.split(config.split), model.cfg.block_size)
    lengths = torch.from_numpy(tokenizer.byte_lengths())
    dtype = pick_dtype(config.dtype, device, model.cfg.n_embd)
    nats, exact, tokens, size, T = 0.0, 0.0, 0, 0, windows.block_size
    if T < 2:
        raise ValueError("a window needs at least two tokens")
    for x, y in tqdm(windows, unit="batch", disable=None, leave=False):
        x, y = x.to(device), y.to(device)
        pos = document_positions(x, tokenizer.eot) if trained.get("documents") and tokenizer.eot is not None else None
        state, late = model.init_state(len(x), T, dtype=dtype), y[:, T // 2:]
        if pos is not None:
            state.reach.copy_(pos.amax(1) + 1)       # what `whole` chooses its frequencies by
        with autocast(device, dtype):
            out, a = [], 0
            for n in [T // 2] + [1] * (T - T // 2):
                out.append(model.hidden(x[:, a:a + n], pos if pos is None else pos[:, a:a + n], state)[:, -1])
                a += n
            for kind, hidden in (("cache", torch.stack(out[1:], 1)), ("full", whole.hidden(x, pos)[:, T // 2:])):
                lost = float(F.cross_entropy(model.logits(hidden).flatten(0, 1), late.flatten(), ignore_index=IGNORE, reduction="sum"))
                nats, exact = nats + lost * (kind == "cache"), exact + lost * (kind == "full")
        known = late[late != IGNORE].cpu()
        tokens, size = tokens + len(known), size + int(lengths[known].sum())
    per = math.log(2) * size if size else tokens
    bytes_of = lambda m: sum(t.numel() * t.element_size() for layer in m.init_state(1, T, dtype=dtype).layers for t in layer.values())
    return {"kv_cache": model.cfg.kv_cache, "tokens": tokens, "cost": nats / per, "full": exact / per, "block_size": T,
            "unit": "bits per byte" if size else "nats a token", "bytes": bytes_of(model), "full_bytes": bytes_of(whole)}


@torch.no_grad()
def by_context(config: EvalConfig) -> dict[str, Any]:
    """Loss at each of context_lengths and by position, and what is found again, see engine/context.py."""
    keep_memory()
    device = pick_device(config.device)
    step = find_step(config.checkpoint)
    model, tokenizer = load_model(step, device, "full", config.rope_scaling)
    corpus = same_tokenizer(find(config.dataset or read_config(step)["dataset"]), tokenizer, step)
    dtype = pick_dtype(config.dtype, device, model.cfg.n_embd)
    found = context.measure(model, tokenizer, corpus.split(config.split), config.lengths(), config.trials, config.limit or 16,
                            config.batch_size, dtype)
    return {"checkpoint": str(step), "rope_scaling": model.cfg.rope_scaling, "block_size": model.cfg.block_size, **found}


def show_context(r: dict[str, Any], name: str, out: Path) -> None:
    print(f"{name}rope_scaling {r['rope_scaling']}, {r['tokens']:,} tokens\n{context.report(r)}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "context.json").write_text(json.dumps(r, indent=1) + "\n", encoding="utf-8")
    picture = context.draw({"": r}, out / "context.png")
    print(f"{out / 'context.json'}, {picture or 'no picture: pip install matplotlib'}", file=sys.stderr)


def show_cost(r: dict[str, Any], name: str) -> None:
    print(f"{name}kv_cache={r['kv_cache']}: {r['cost']:.4f} {r['unit']}, full {r['full']:.4f} ({r['cost'] / r['full'] - 1:+.2%}), over "
          f"{r['tokens']:,} tokens in the second halves of windows of {r['block_size']:,}; a row's state {r['bytes']:,} bytes, "
          f"full {r['full_bytes']:,} ({r['bytes'] / r['full_bytes']:.0%})")


def show(result: dict[str, Any], name: str) -> None:
    bits = "" if result["bits_per_byte"] is None else f", {result['bits_per_byte']:.4f} bits per byte"
    size = f"{result['tokens']:,} {result['unit']}s" + (f" ({result['bytes']:,} bytes)" if result["bytes"] else "")
    print(f"{name}{result['split']}: loss {result['loss']:.4f} nats a {result['unit']}{bits} over {size}")


if __name__ == "__main__":
    with one_line_errors():
        step = find_step(config.checkpoint)
        print(f"{step}: step {read_progress(step).iter}", file=sys.stderr)
        corpora = {} if config.dataset else Mixture(read_config(step)["dataset"]).corpora
        where = {name: str(corpus.folder) for name, corpus in corpora.items()} or {"": str(config.dataset)}
        for name, folder in where.items():
            of, head = replace(config, checkpoint=str(step), dataset=folder), f"{name} " if len(where) > 1 else ""
            if config.context_lengths:
                show_context(by_context(of), head, Path(config.out, Path(name).name if len(where) > 1 else ""))
            elif config.kv_cache:
                show_cost(cache_cost(of), head)
            else:
                show(evaluate(of), head)
