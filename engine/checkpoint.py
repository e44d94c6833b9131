"""Checkpoints: out/<run>/step_000123/ with the model, the optimizer, the settings and the tokenizer, nothing pickled.

Written under another name, synced, renamed: a folder that is there is whole. `latest` and `best` hold the name of one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from config import GPTConfig, from_dict
from data import tokenizer as tokenizers
from data.tokenizer import Tokenizer
from model import GPT
from ops.rope import ROPE_SCALING, Unscaled, rope_scaling

Config = TypeVar("Config", bound=GPTConfig)


@dataclass
class Progress:
    """How far a run has come: what resuming needs beside weights and optimizer. The position in the data is `iter` itself."""

    iter: int = 0                     # optimizer steps done
    tokens: int = 0
    val_loss: float | None = None     # of the last evaluation
    best_iter: int | None = None
    best_val_loss: float | None = None
    stale: int = 0                    # evaluations since the best
    scaler: dict | None = None        # float16's loss scale, and what it remembers

    def note(self, val_loss: float) -> bool:
        """Whether this is the best so far; a loss that is no number never is."""
        best = val_loss < (math.inf if self.best_val_loss is None else self.best_val_loss)
        if best:
            self.best_iter, self.best_val_loss = self.iter, val_loss
        self.stale = 0 if best else self.stale + 1
        return best


def save(out_dir: Path, model: GPT, optimizer: torch.optim.Optimizer | None, config: GPTConfig, tokenizer: Tokenizer,
         progress: Progress) -> Path:
    """Saves this step and lets go of those that are neither the last nor the best; without an optimizer nothing resumes from it. OSError
    leaves the older ones as they were."""
    step = out_dir / f"step_{progress.iter:06d}"
    new = out_dir / f".{step.name}"
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        tied = {"head.weight"} if config.tie_embeddings else set()
        weights = {name: t.contiguous() for name, t in model.state_dict().items() if name not in tied}
        save_file(weights, new / "model.safetensors", {"format": "pt"})
        if optimizer:
            save_file(optimizer_tensors(model, optimizer), new / "optimizer.safetensors", {"format": "pt"})
        write_json(new / "config.json", asdict(config))
        write_json(new / "progress.json", asdict(progress))
        tokenizers.save(tokenizer, new / "tokenizer.json")
        for file in new.iterdir():
            sync(file)
        shutil.rmtree(step, ignore_errors=True)     # of a run that was killed before it pointed here
        os.replace(new, step)
    except (OSError, SafetensorError) as e:
        shutil.rmtree(new, ignore_errors=True)
        raise OSError(f"the checkpoint of step {progress.iter} could not be written ({e}); the one before it is untouched") from None
    point(out_dir / "latest", step.name)
    if progress.best_iter == progress.iter:
        point(out_dir / "best", step.name)
    kept = {(out_dir / name).read_text(encoding="utf-8") for name in ("latest", "best") if (out_dir / name).exists()}
    for old in out_dir.glob("step_*"):
        if old.name not in kept:
            shutil.rmtree(old, ignore_errors=True)
    return step


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def sync(path: Path) -> None:
    with open(path, "rb+") as f:
        os.fsync(f.fileno())


def point(pointer: Path, name: str) -> None:
    new = pointer.with_name(f".{pointer.name}")
    new.write_text(name, encoding="utf-8")
    sync(new)
    os.replace(new, pointer)


def optimizer_tensors(model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """{"blocks.0.mlp.up.weight.exp_avg": tensor, ...}: by the parameters' names, so that no order is to be kept."""
    states = {name: optimizer.state.get(p, {}) for name, p in model.named_parameters()}
    return {f"{name}.{key}": torch.as_tensor(t).contiguous() for name, state in states.items() for key, t in state.items()}


def load_optimizer(step: Path, model: GPT, optimizer: torch.optim.Optimizer) -> None:
    """The inverse, strictly: every parameter has its moments and its step."""
    if not (step / "optimizer.safetensors").exists():
        raise ValueError(f"{step} has no optimizer to go on with: start from it, with --init_from={step} and another --out_dir")
    with damage_is_one_line(step):
        tensors = load_file(step / "optimizer.safetensors")
        named = {p: name for name, p in model.named_parameters()}
        for part in getattr(optimizer, "optimizers", [optimizer]):
            adamw = isinstance(part, torch.optim.AdamW)
            keys = ("exp_avg", "exp_avg_sq") if adamw else ("momentum_buffer",)
            for p in (p for group in part.param_groups for p in group["params"]):
                part.state[p] = {key: tensors[f"{named[p]}.{key}"].to(p.device) for key in keys}
                part.state[p]["step"] = tensors[f"{named[p]}.step"].to(p.device if adamw else "cpu")   # Muon reads it each step


def find_step(path: str | Path | None, prefer: str = "best") -> Path:
    """The step folder that `path` names: one itself, a run's folder (its best, or what `prefer` says), a folder of runs (the
    newest), or None: the newest under out/. FileNotFoundError in one line."""
    root = Path(path or "out")
    if (root / "model.safetensors").is_file():
        return root
    runs = [root] if (root / "latest").is_file() else [p.parent for p in root.glob("*/latest")]
    if not runs:
        where = f"{root}{os.sep if path is None else ''}"
        raise FileNotFoundError(f"no checkpoint in {where}: train one first, for example python train.py config/demo.py")
    run = max(runs, key=lambda p: (p / "latest").stat().st_mtime)
    pointer = next(run / name for name in (prefer, "latest") if (run / name).is_file())
    step = run / pointer.read_text(encoding="utf-8").strip()
    if not (step / "model.safetensors").is_file():
        raise FileNotFoundError(f"{pointer} names {step.name}, which is not there: name another step with --checkpoint")
    return step


@contextlib.contextmanager
def damage_is_one_line(step: Path) -> Iterator[None]:
    """What goes wrong in reading a checkpoint is a ValueError that names it."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as e:
        reason = " ".join(str(e).split())[:200]
        raise ValueError(f"{step} is damaged or of another version ({type(e).__name__}: {reason}): name another step") from None


def read_json(step: Path, name: str) -> dict[str, Any]:
    with damage_is_one_line(step):
        value = json.loads((step / name).read_text(encoding="utf-8"))
        if not isinstance(value, dict) or not value:
            raise ValueError(f"{name} holds no settings")
        return value


def read_config(step: Path) -> dict[str, Any]:
    return read_json(step, "config.json")


def read_progress(step: Path) -> Progress:
    return from_dict(Progress, read_json(step, "progress.json"))


def read_tokenizer(step: Path) -> Tokenizer:
    with damage_is_one_line(step):
        return tokenizers.load(step / "tokenizer.json")


def load_weights(model: GPT, step: Path) -> None:
    """Strictly: every tensor, by its name; a tied head stays tied."""
    with damage_is_one_line(step):
        tensors = load_file(step / "model.safetensors")
        if model.cfg.tie_embeddings:
            tensors["head.weight"] = tensors["wte.weight"]
        model.load_state_dict(tensors, strict=True)


def longer(cfg: Config, scaling: str) -> Config:
    """`cfg` for contexts `factor` times as long, by a scaling of RoPE such as yarn(factor=4); `original`, where it is left out, is its
    block_size. ValueError where it has another already."""
    if scaling == cfg.rope_scaling:
        return cfg
    if cfg.rope_scaling != "none":
        raise ValueError(f"rope_scaling is {cfg.rope_scaling} in this checkpoint, not {scaling}: leave it out, or take the checkpoint that "
                         "this one was extended from")
    scaling = scaling if "(" in scaling else f"{scaling}()"
    kind = ROPE_SCALING.get(scaling.partition("(")[0], Unscaled)
    if "original" in {f.name for f in fields(kind)} and "original" not in scaling and scaling.endswith(")"):
        scaling = f"{scaling[:-1]}, original={cfg.block_size})".replace("(, ", "(")
    rule = rope_scaling(scaling)
    if (original := getattr(rule, "original", cfg.block_size)) != cfg.block_size:
        raise ValueError(f"rope_scaling: original={original} is not the context of {cfg.block_size} that this checkpoint was trained on: "
                         "leave it out")
    return replace(cfg, rope_scaling=scaling, block_size=times(cfg.block_size, getattr(rule, "factor", 1)))


def times(block_size: int, factor: float) -> int:
    """Rounded up, but not for what floats add: 100 times 1.1 is 110."""
    return math.ceil(round(block_size * factor, 6))


def load_model(path: str | Path | None = None, device: str | torch.device = "cpu", kv_cache: str | None = None,
               rope_scaling: str | None = None) -> tuple[GPT, Tokenizer]:
    """A checkpoint's model, ready for evaluation, and its tokenizer; `path` as in find_step, kv_cache instead of its own, and `longer` by
    rope_scaling."""
    step = find_step(path)
    cfg = from_dict(GPTConfig, read_config(step))
    if rope_scaling is not None:
        cfg = longer(cfg, rope_scaling)
    model = GPT(cfg if kv_cache is None else replace(cfg, kv_cache=kv_cache))
    load_weights(model, step)
    return model.to(device).eval(), read_tokenizer(step)
