"""How fast the 10.7 M preset trains on this machine, next to the same shape written the usual way, both in one run."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from config.check import check_fields, check_range
from engine.cli import ROOT, one_line_errors, parse


@dataclass
class SpeedConfig:
    """tokens/s of config/shakespeare_char.py over those of bench/baseline.py, each in its own process, in turns."""

    rounds: int = 2
    """turns of each"""
    steps: int = 2
    """timed steps a turn of the baseline (ours: three times as many), after one that does not count"""
    batch_size: int = 64
    """rows of a step"""
    loss_steps: int = 0
    """train both for so many steps of loss_batch rows, with two seeds each, and compare their validation losses; 150 take 10 minutes"""
    loss_batch: int = 8
    """rows of those steps"""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("rounds", "steps", "batch_size", "loss_batch"):
            check_range(self, name, above=0)
        check_range(self, "loss_steps", least=0)


def baseline(steps: int, batch_size: int, *flags: str) -> dict:
    """One run of bench/baseline.py."""
    command = [sys.executable, "-m", "bench.baseline", f"--steps={steps}", f"--batch_size={batch_size}", *flags]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)


def ours(steps: int, batch_size: int, *flags: str) -> dict:
    """One run of train.py with the preset: the lines of its metrics.jsonl, and the last validation loss."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", "config/shakespeare_char.py", f"--max_iters={steps}", f"--batch_size={batch_size}",
                   "--log_interval=1", "--eval_iters=1", "--eval_interval=1000000000", f"--out_dir={folder}/run", *flags]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {"tokens_per_s": [line["tokens_per_s"] for line in lines if line.get("tokens_per_s")], "val_loss": lines[-1].get("val_loss")}


def main(config: SpeedConfig) -> dict:
    n = config.batch_size * 256
    theirs, mine = [], []
    for _ in range(config.rounds):
        theirs += [n / s for s in baseline(1 + config.steps, config.batch_size)["seconds"][1:]]
        mine += ours(1 + 3 * config.steps, config.batch_size)["tokens_per_s"]
    result = {"baseline_tokens_per_s": median(theirs), "tokens_per_s": median(mine), "ratio": median(mine) / median(theirs)}
    if config.loss_steps:
        steps, rows = config.loss_steps, config.loss_batch
        seeds, constant = ("--seed=1", "--seed=2"), "--lr_decay_iters=1000000000"     # as the baseline's learning rate
        result |= {"loss_steps": steps,
                   "baseline_val_loss": [baseline(steps, rows, "--val_batches=40", seed)["val_loss"] for seed in seeds],
                   "val_loss": [ours(steps, rows, "--eval_iters=40", constant, seed)["val_loss"] for seed in seeds]}
    return result


if __name__ == "__main__":
    config = parse(SpeedConfig)
    with one_line_errors():
        r = main(config)
        print("10.7 M parameters, 256 context, dropout 0.2; tokens/s, median of the steps")
        print(f"  float32, eager, the usual way   {r['baseline_tokens_per_s']:9,.0f}")
        print(f"  config/shakespeare_char.py      {r['tokens_per_s']:9,.0f}")
        print(f"  ratio                           {r['ratio']:9.2f}")
        if "val_loss" in r:
            both = [" and ".join(f"{loss:.4f}" for loss in r[key]) for key in ("val_loss", "baseline_val_loss")]
            print(f"validation loss after {r['loss_steps']} steps, two seeds: {both[0]}; the usual way {both[1]}")
        print(json.dumps(r))
