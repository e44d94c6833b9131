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

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "batch_size", above=0)
        check_range(self, "block_size", above=0)


if __name__ == "__main__":
    config = parse(EvalConfig)       # before torch is imported, so that --help and mistakes answer at once

import torch
from tqdm import tqdm

from data.find import find
from data.loader import FixedWindows
from data.mixture import Mixture
from engine.checkpoint import find_step, load_model, read_config, read_progress
from engine.device import autocast, keep_memory, pick_device, pick_dtype
from ops.loss import IGNORE, count_valid
from ops.positions import within_documents


@torch.no_grad()
def evaluate(config: EvalConfig) -> dict[str, Any]:
    """{"loss": nats a token, "bits_per_byte", "tokens", "bytes", ...}: tokens are those predicted, all but the split's first, and
    bytes the UTF-8 text they stand for; an end-of-text token costs nats and stands for no byte."""
    keep_memory()
    device = pick_device(config.device)
    step = find_step(config.checkpoint)
    model, tokenizer = load_model(step, device)
    trained = read_config(step)
    corpus = find(config.dataset or trained["dataset"])
    if corpus.tokenizer.hash != tokenizer.hash:
        raise ValueError(f"{corpus.folder} has another tokenizer than {step}: prepare it with the same one")
    windows = FixedWindows(corpus.split(config.split), config.block_size or model.cfg.block_size, config.batch_size)
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
            show(evaluate(replace(config, checkpoint=str(step), dataset=folder)), f"{name} " if len(where) > 1 else "")
