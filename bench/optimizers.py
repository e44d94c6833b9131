"""How many tokens AdamW and Muon need to the same validation loss, each with its learning rate chosen and its schedule brought to
its end: the same model, data and order."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace

from config.check import check_fields, check_range
from engine.cli import one_line_errors, parse, read_preset


@dataclass
class OptimizersConfig:
    """AdamW runs for `steps`; Muon for shares of them, from the largest down, as long as it gets as low."""

    preset: str = "config/demo.py"
    """the model and everything that is not the optimizer's"""
    steps: int = 600
    """AdamW's"""
    adamw_lrs: str = "4e-3 8e-3 1.6e-2"
    """AdamW's learning rates; the best counts"""
    muon_lrs: str = "0.02 0.04"
    """Muon's learning rates; the best at the largest share is kept"""
    shares: str = "0.48 0.4 0.34 0.28"
    """of AdamW's steps that Muon gets"""
    seed: int = 1337
    """of both"""

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "steps", above=0)


if __name__ == "__main__":
    config = parse(OptimizersConfig)

from config import TrainConfig
from train import train


def final_loss(base: TrainConfig, **changes) -> float:
    with tempfile.TemporaryDirectory() as folder:
        done = train(replace(base, out_dir=folder + "/run", **changes))
    assert done.val_loss is not None
    return done.val_loss


def main(config: OptimizersConfig) -> dict:
    from typing import get_type_hints
    base = TrainConfig(**read_preset(config.preset, get_type_hints(TrainConfig)))
    base = replace(base, seed=config.seed, eval_interval=10**9)
    fields = dict(max_iters=config.steps, warmup_iters=config.steps // 40)
    adamw = {lr: final_loss(base, optimizer="adamw", learning_rate=lr, **fields) for lr in map(float, config.adamw_lrs.split())}
    goal, rows, best = min(adamw.values()), [], None
    for share in map(float, config.shares.split()):
        fields = dict(max_iters=round(config.steps * share), warmup_iters=round(config.steps * share) // 40)
        lrs = [best] if best else list(map(float, config.muon_lrs.split()))
        loss, lr = min((final_loss(base, optimizer="muon", muon_lr=lr, **fields), lr) for lr in lrs)
        rows.append({"share": share, "loss": loss, "muon_lr": lr})
        best = lr
        if loss > goal:
            break
    reached = [r["share"] for r in rows if r["loss"] <= goal]
    return {"tokens": config.steps * base.batch_size * base.block_size, "adamw": adamw, "muon": rows, "share": min(reached, default=None)}


if __name__ == "__main__":
    with one_line_errors():
        r = main(config)
        print(f"\nAdamW, {r['tokens']:,} tokens: " + ", ".join(f"loss {loss:.4f} at {lr:g}" for lr, loss in r["adamw"].items()))
        for row in r["muon"]:
            print(f"Muon, {row['share']:.0%} of them: loss {row['loss']:.4f} at {row['muon_lr']:g}")
        print(f"Muon gets as low with {r['share']:.0%} of AdamW's tokens" if r["share"] else "Muon does not get as low")
        print(json.dumps(r))
