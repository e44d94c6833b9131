"""Takes a model to a longer context: `python -m tools.extend --checkpoint out/demo --method yarn --factor 4` writes a checkpoint whose RoPE
is scaled (ops/rope.py), with --finetune_tokens trained on at that length. `eval.py --context_lengths` says how well it went.

`--method longrope --search` is the recipe of its paper (arXiv 2402.13753): search divisors of the frequencies (engine/longrope.py), and
fine-tune with them; with --finetune_factor below --factor, fine-tune at that shorter length, and search again for the whole one, without
training; then search divisors for the original length, so that short texts lose little. Stopped, the same command goes on.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from config.check import check_fields, check_range
from engine.cli import one_line_errors, parse


@dataclass
class ExtendConfig:
    """A checkpoint for a context `factor` times as long."""

    checkpoint: str | None = None
    """a run's folder, one of its steps, or a folder of runs (None: the newest run under out/); a run gives its best step"""
    method: Literal["linear", "ntk", "dynamic", "yarn", "longrope", "llama3"] = "yarn"
    """how RoPE's frequencies are scaled; longrope without --search has YaRN's divisors"""
    factor: float = 4.0
    """times the context that it was trained on"""
    finetune_tokens: int = 0
    """train on so many at the longer length (0: none)"""
    learning_rate: float | None = None
    """the fine-tuning's highest, which falls to a tenth (None: a third of the run's own, and of Muon's likewise)"""
    search: bool = False
    """with longrope: search its divisors"""
    finetune_factor: float | None = None
    """with --search: fine-tune at this factor, then search again for the whole one (None: fine-tune at `factor`)"""
    population: int = 64
    """of the search: divisors that it begins with"""
    iterations: int = 40
    """generations after that: the best half stays, a quarter is mutations of it, a quarter crossovers"""
    search_documents: int = 5
    """stretches of the training split (of a mixture's first corpus), as long as the longer context, by whose loss divisors are judged"""
    dataset: str | None = None
    """a corpus under data/ or a prepared folder (None: what it was trained on)"""
    out_dir: str | None = None
    """folder of the checkpoint (None: the run's, with the method and the factor behind its name)"""
    seed: int = 1337
    """of the search; the fine-tuning has the run's"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """of the matrix products"""

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "factor", above=1)
        check_range(self, "finetune_factor", above=1, most=self.factor)
        check_range(self, "finetune_tokens", least=0)
        check_range(self, "learning_rate", above=0)
        check_range(self, "population", least=4)
        check_range(self, "iterations", least=0)
        check_range(self, "search_documents", above=0)
        if self.search and self.method != "longrope":
            raise ValueError(f"--search finds longrope's divisors: --method is {self.method}")
        if self.finetune_factor and not (self.search and self.finetune_tokens):
            raise ValueError("--finetune_factor is the first stage of --search with --finetune_tokens")


if __name__ == "__main__":
    config = parse(ExtendConfig)       # before torch is imported, so that --help and mistakes answer at once

from tqdm import tqdm

from config import TrainConfig, from_dict
from data.mixture import Mixture
from engine import checkpoint
from engine.checkpoint import find_step, load_model, longer, read_config, read_progress, read_tokenizer, times
from engine.context import documents, scored, windows
from engine.device import keep_memory, pick_device, pick_dtype
from engine.log import say
from engine.longrope import STARTS, Factors, Losses, Plan, known, largest, search
from engine.start import make_room
from model import GPT
from ops.rope import LongRoPE, Rotation
from train import train


def main(config: ExtendConfig) -> Path:
    """The step folder of the longer model."""
    keep_memory()
    step = find_step(config.checkpoint)
    run = from_dict(TrainConfig, read_config(step))
    run.dataset = config.dataset or run.dataset
    out = Path(config.out_dir or f"{step.parent}-{config.method}{config.factor:g}")
    if out.resolve() == step.parent.resolve():
        raise ValueError(f"out_dir={str(out)!r} is the run itself: name another folder")
    corpus, size = Mixture(run.dataset), times(run.block_size, config.factor)
    if corpus.tokenizer.hash != read_tokenizer(step).hash:
        raise ValueError(f"{run.dataset} has another tokenizer than {step}: prepare it with the same one")
    if config.search or config.finetune_tokens:
        for split in (c.split(name) for c in corpus.corpora.values() for name in ("train", "val")):
            documents(split, size, 1)                # ValueError where it is too short
    begin(out, config, step)
    final = extended(config, run, step, out)
    say(f"{final}: a context of {size:,} tokens, {size / run.block_size:g} times {run.block_size:,}; how well it went: "
        f"python eval.py --checkpoint {out} --context_lengths {run.block_size},{size}")
    return final


def record(config: ExtendConfig, step: Path) -> dict[str, Any]:
    """What decides about the outcome, as JSON has it."""
    return {**asdict(config), "step": str(step), "saved": (step / "model.safetensors").stat().st_mtime}


def recorded(out: Path) -> dict[str, Any] | None:
    file = out / "extend.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def begin(out: Path, config: ExtendConfig, step: Path) -> None:
    """The folder, of which a file says what is made in it. What is finished there is put aside; what is not is gone on with, or ValueError
    where it was something else."""
    now = record(config, step)
    if (out / "latest").is_file():
        make_room(out, resuming=False)
    elif recorded(out) not in (None, now):
        raise ValueError(f"{out} has an unfinished extension of other settings or another checkpoint: name another --out_dir, or remove it")
    out.mkdir(parents=True, exist_ok=True)
    checkpoint.write_json(out / "extend.json", now)


def extended(config: ExtendConfig, run: TrainConfig, step: Path, out: Path) -> Path:
    if config.method != "longrope":
        wide = longer(run, f"{config.method}(factor={config.factor:g})")
        return write(tuned(config, run, wide, step, out), out, wide)
    D, theta = rotation(load_model(step)[0])
    stage, seeds = config.finetune_factor or config.factor, lambda factor: known(D, theta, run.block_size, factor)
    if not config.search:
        wide = longer(run, written(stage, seeds(stage)[0]))
        return write(tuned(config, run, wide, step, out), out, wide)
    long = hunt(config, run, step, out, "long", stage, seeds(stage))
    step = tuned(config, run, longer(run, written(stage, long)), step, out)
    if stage < config.factor:
        most = largest(config.factor)
        stretched = Factors(long.start, tuple(min(most, round(f * config.factor / stage, 2)) for f in long.divisors))
        long = hunt(config, run, step, out, "longer", config.factor, [*seeds(config.factor), stretched])
    short = hunt(config, run, step, out, "short", config.factor, [Factors(0, (1.0,) * (D // 2)), long._replace(start=0)], long)
    return write(step, out, longer(run, written(config.factor, long, short)))


def rotation(model: GPT) -> tuple[int, float]:
    """Channels and base that all layers turn by. ValueError where they differ: one list of divisors would not fit all."""
    found = {turn.key[:2] for turn in rotations(model)}
    if len(found) != 1:
        raise ValueError(f"longrope has one list of divisors, and this model's layers turn {len(found) or 'in no'} ways: take yarn")
    return next(iter(found))


def rotations(model: GPT) -> list[Rotation]:
    return [m.turn for m in model.modules() if isinstance(getattr(m, "turn", None), Rotation)]  # type: ignore[misc]


def written(factor: float, long: Factors, short: Factors | None = None) -> str:
    short_list = f", short={short.divisors}" if short else ""
    return f"longrope(factor={factor:g}, long={long.divisors}{short_list}, start={long.start})"


def write(step: Path, out: Path, config: TrainConfig) -> Path:
    """The weights of `step` with the settings of `config` as a checkpoint of their own."""
    model = GPT(config.model())
    checkpoint.load_weights(model, step)
    progress = replace(read_progress(step), val_loss=None, best_iter=None, best_val_loss=None)
    return checkpoint.save(out, model, None, replace(config, out_dir=str(out)), read_tokenizer(step), progress)


def tuned(config: ExtendConfig, run: TrainConfig, wide: TrainConfig, step: Path, out: Path) -> Path:
    """`step` after finetune_tokens with the settings of `wide`: as many tokens a step as before, in longer rows."""
    if not config.finetune_tokens:
        return step
    rows = max(1, run.batch_size * run.block_size // wide.block_size)
    accumulate = max(1, run.batch_size * run.gradient_accumulation_steps * run.block_size // (rows * wide.block_size))
    steps = max(1, round(config.finetune_tokens / (rows * accumulate * wide.block_size)))
    peak = config.learning_rate or run.learning_rate / 3
    start, folder = out / "start", out / "finetune"
    resume = (folder / "latest").is_file()
    if resume and read_progress(find_step(folder, prefer="latest")).iter >= steps:
        return find_step(folder, prefer="latest")
    if not resume:
        write(step, start, wide)
    train(replace(wide, init_from="resume" if resume else str(start), out_dir=str(folder), batch_size=rows, max_iters=steps,
                  gradient_accumulation_steps=accumulate, learning_rate=peak, muon_lr=run.muon_lr * peak / run.learning_rate,
                  min_lr=peak / 10, warmup_iters=min(20, steps // 10), lr_decay_iters=None, lr_schedule="linear", eval_interval=steps,
                  eval_iters=10, device=config.device, dtype=config.dtype, wandb_log=False))
    done = find_step(folder, prefer="latest")
    if read_progress(done).iter < steps:
        print("tools.extend: the same command goes on", file=sys.stderr)
        raise KeyboardInterrupt
    shutil.rmtree(start, ignore_errors=True)
    return done


def hunt(config: ExtendConfig, run: TrainConfig, step: Path, out: Path, name: str, factor: float, seeds: list[Factors],
         long: Factors | None = None) -> Factors:
    """The best divisors that the search finds for texts of `factor` times the original length; with `long`, those of the long ones, for
    texts of the original length."""
    device = pick_device(config.device)
    base = replace(from_dict(TrainConfig, read_config(step)), rope_scaling="none", block_size=run.block_size)
    wide = longer(base, written(factor, long or seeds[0]))
    model = GPT(wide.model())
    checkpoint.load_weights(model, step)
    model, turns = model.to(device).eval(), [t.scaling for t in rotations(model) if isinstance(t.scaling, LongRoPE)]
    length = run.block_size if long else wide.block_size
    corpus, *_ = Mixture(run.dataset).corpora.values()
    text, cut = documents(corpus.split("train"), length, config.search_documents), windows(config.search_documents, length, length, length)
    dtype = pick_dtype(config.dtype, device, run.n_embd)

    def loss(point: Factors) -> float:
        for scaling in turns:
            if long:
                scaling.short = point.divisors
            else:
                scaling.long, scaling.start = point.divisors, point.start
        return float(scored(model, text, cut[:len(text)], 16, dtype).mean())

    quarter = config.population // 4
    plan = Plan(config.population, config.iterations, config.population // 2, quarter, quarter, seed=config.seed)
    memo = Losses(out / f"search_{name}.json", {**asdict(config), "step": str(step), "plan": asdict(plan)})
    starts = [0] if long else [n for n in STARTS if n <= run.block_size]
    with tqdm(total=plan.evaluations(), desc=f"search {name}", disable=None) as bar:
        def note(best: float) -> None:
            bar.update()
            bar.set_postfix_str(f"best {best:.4f}")
            if bar.n % 20 == 0:
                memo.keep()
        try:
            best, _ = search(loss, seeds, factor, starts, plan, memo, note)
        finally:
            memo.keep()
    say(f"search {name}: {memo[best]:.4f} nats a token in texts of {length:,}; it began with {memo[seeds[0]]:.4f} "
        f"({'as it is' if long else 'YaRN'}); {len(memo):,} points")
    return best


if __name__ == "__main__":
    with one_line_errors():
        main(config)
    sys.stdout.flush()
