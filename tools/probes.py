"""Trains a small model with each way of mixing tokens on synthetic tasks whose answers are known (data/probes.py), and says how many
answers are right, on rows that it has not seen. `python -m tools.probes --layers attention "attention(window=8)"`"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from config.check import check_fields, check_range, nearest
from engine.cli import Repeated, one_line_errors, parse


@dataclass
class ProbesConfig:
    """Accuracy on multi-query associative recall, induction, selective copying, and a needle in a haystack. Two layers (or as many as
    the pattern has) of 64 channels; half a minute a word and probe on two cores."""

    layers: Repeated[str] = ()
    """patterns of layers (none: attention)"""
    probes: Repeated[str] = ()
    """which (none: all): mqar, induction, selective_copying, needle"""
    steps: int = 480
    """of training at most; it ends sooner where nearly all answers are right"""
    rows: int = 32
    """of a step"""
    n_embd: int = 64
    """width"""
    n_head: int = 2
    """heads"""
    learning_rate: float = 3e-3
    """AdamW's, of embedding, head and vectors"""
    muon_lr: float = 0.04
    """Muon's, of the hidden matrices"""
    seed: int = 1337
    """of weights and training rows; the rows that count are the same for all"""
    out: str = "out/probes"
    """folder of probes.json"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps"""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("steps", "rows", "n_embd", "n_head", "learning_rate", "muon_lr"):
            check_range(self, name, above=0)


if __name__ == "__main__":
    config = parse(ProbesConfig)

import torch
from tqdm import tqdm

from config import TrainConfig
from data.probes import IGNORE, LEVELS, PROBES, VOCAB
from engine.device import keep_memory, pick_device
from engine.log import say
from engine.optim import make_optimizer, set_learning_rate
from mixers import parse as parse_words
from model import GPT

HELD_OUT, CHECKS, ENOUGH = 2**31, 12, 0.995   # seed of the rows that count; looks at them; accuracy that ends the training


def settings(word: str, T: int, config: ProbesConfig) -> TrainConfig:
    """The demo's kind of model, by Muon: attention learns these tasks in a quarter of the steps that AdamW takes."""
    words = len(parse_words(word))
    return TrainConfig(vocab_size=VOCAB, block_size=T, n_layer=words * -(-2 // words), n_head=config.n_head, n_embd=config.n_embd,
                       layers=word, norm="layernorm", mlp="relu2", qk_norm=True, tie_embeddings=False, init="zero", optimizer="muon",
                       learning_rate=config.learning_rate, muon_lr=config.muon_lr, max_iters=config.steps,
                       warmup_iters=min(20, config.steps // 10), lr_schedule="linear", seed=config.seed)


@torch.no_grad()
def accuracy(model: GPT, name: str, level: int, rows: int = 64) -> float:
    """The share of what is asked for that is the likeliest token, in rows that training never draws."""
    x, y = PROBES[name](rows, HELD_OUT, **{LEVELS[name][0]: level})
    model.eval()
    right = (model(x.to(model.wte.weight.device)).argmax(-1).cpu() == y)[y != IGNORE].float().mean()
    model.train()
    return float(right)


def learn(word: str, name: str, config: ProbesConfig) -> dict[str, Any]:
    """A model with these layers, trained on one probe, its levels in turn -> its accuracy at the hardest level, and at each."""
    option, levels = LEVELS[name]
    device, probe = pick_device(config.device), PROBES[name]
    cfg = settings(word, probe(1, 0, **{option: levels[-1]})[0].shape[1], config)
    torch.manual_seed(config.seed)
    model = GPT(cfg.model()).to(device)
    optimizer, started, i = make_optimizer(model, cfg), time.perf_counter(), 0
    with tqdm(total=config.steps, desc=f"{name} {word[:30]}", unit="step", leave=False, disable=None) as bar:
        for i in range(1, config.steps + 1):
            set_learning_rate(optimizer, cfg, i - 1)
            x, y = probe(config.rows, config.seed * 100_003 % 2**30 + i, **{option: levels[i % len(levels)]})
            model(x.to(device), y.to(device)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
            optimizer.step()
            optimizer.zero_grad()
            bar.update()
            if i % max(1, config.steps // CHECKS) == 0 and accuracy(model, name, levels[-1]) >= ENOUGH:
                break
    by_level = {str(level): accuracy(model, name, level) for level in levels}
    return {"word": word, "probe": name, "accuracy": by_level[str(levels[-1])], "by": option, "levels": by_level, "steps": i,
            "seconds": time.perf_counter() - started, "parameters": sum(p.numel() for p in model.parameters())}


def report(results: list[dict[str, Any]]) -> str:
    """A line a word, a column a probe; what is asked at random would be right in 1 to 2 % of the cases."""
    words, names = (list(dict.fromkeys(r[key] for r in results)) for key in ("word", "probe"))
    wide = max(map(len, words))
    lines = [f"{'':{wide}} " + " ".join(f"{n:>18}" for n in names)]
    for word in words:
        mine = {r["probe"]: r for r in results if r["word"] == word}
        lines.append(f"{word:{wide}} " + " ".join(f"{mine[n]['accuracy']:18.1%}" if n in mine else f"{'-':>18}" for n in names))
    return "\n".join(lines)


def main(config: ProbesConfig) -> list[dict[str, Any]]:
    keep_memory()
    for name in config.probes:
        if name not in PROBES:
            raise ValueError(f"probes: unknown {name!r}{nearest(name, PROBES)}")
    words = config.layers or ("attention",)
    for word in words:
        settings(word, 8, config)
    results = []
    for word in words:
        for name in config.probes or PROBES:
            r = learn(word, name, config)
            results.append(r)
            levels = ", ".join(f"{level} {a:.1%}" for level, a in r["levels"].items())
            say(f"{word} on {name}: {r['accuracy']:.1%} after {r['steps']} steps in {r['seconds']:.0f} s ({r['by']}: {levels})")
            out = Path(config.out)
            out.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"settings": asdict(config), "results": results}, indent=1)
            (out / "probes.json").write_text(text + "\n", encoding="utf-8")
    print(f"\nright answers at the hardest level\n{report(results)}\n{out / 'probes.json'}")
    return results


if __name__ == "__main__":
    with one_line_errors():
        main(config)
    sys.stdout.flush()
