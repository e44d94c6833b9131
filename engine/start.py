"""How a run begins: from scratch, from where it stopped, or from another run's weights."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from pathlib import Path

from config import GPTConfig, TrainConfig
from config.check import nearest
from data.mixture import Mixture
from engine.checkpoint import find_step, read_config, read_tokenizer

FREE = {"dropout", "attn_dropout", "attention_backend", "loss_chunk", "init"}   # fields of the model that a checkpoint does not bind


def begin(config: TrainConfig, corpus: Mixture) -> tuple[TrainConfig, Path | None]:
    """The settings with what the corpus and the checkpoint say filled in, and the step folder to load (None: from scratch).

    resume demands an old run in out_dir, auto resumes where there is one, scratch begins anew, and anything else is a checkpoint
    whose weights are taken. Nothing is written yet. ValueError where settings contradict the checkpoint or the corpus.
    """
    out = Path(config.out_dir or "out/default")
    if out.exists() and not out.is_dir():
        raise ValueError(f"out_dir={str(out)!r} is a file: name a folder")
    config = replace(config, out_dir=str(out), vocab_size=config.vocab_size or corpus.vocab_size)
    if config.vocab_size < corpus.vocab_size:
        raise ValueError(f"vocab_size={config.vocab_size} is smaller than the {corpus.vocab_size} of {config.dataset}: leave it out")
    if config.documents and corpus.tokenizer.eot is None:
        raise ValueError(f"--documents needs an end-of-text id, and {config.dataset} has none: name it in its meta.json, "
                         f'for example {{"vocab_size": {corpus.vocab_size}, "eot": {corpus.vocab_size - 1}}}')
    step = None
    if config.init_from in ("resume", "auto"):
        if (out / "latest").is_file():
            step = find_step(out, prefer="latest")
        elif config.init_from == "resume":
            older = sorted(str(p) for p in out.parent.glob(f"{out.name}.*") if (p / "latest").is_file())
            aside = f" (older runs: {', '.join(older)})" if older else ""
            raise ValueError(f"nothing to resume in {out}{aside}: leave --init_from out, or say --init_from=auto")
    elif config.init_from != "scratch":
        if not Path(config.init_from).exists():
            raise ValueError(f"init_from={config.init_from!r} is no checkpoint{nearest(config.init_from, ('scratch', 'resume', 'auto'))}")
        step = find_step(config.init_from)
    return (agree(config, step, corpus) if step else config), step


def agree(config: TrainConfig, step: Path, corpus: Mixture) -> TrainConfig:
    """The model's fields are the checkpoint's; resuming, a different one is refused; starting from it, it is noted."""
    if read_tokenizer(step).hash != corpus.tokenizer.hash:
        raise ValueError(f"{config.dataset} has another tokenizer than {step}: prepare it with the same one, or start from scratch")
    saved = read_config(step)
    resuming = config.init_from in ("resume", "auto")
    for f in fields(GPTConfig):
        old, new = saved.get(f.name, f.default), getattr(config, f.name)      # an older version has no other
        if f.name in FREE or old == new:
            continue
        if f.name == "block_size" and not resuming and new < old and saved["position"] != "learned":
            continue
        if resuming:
            raise ValueError(f"{f.name} is {old!r} in {step}, not {new!r}: give that run's preset and flags, or start from scratch")
        if f.name == "rope_scaling" and new != "none":
            raise ValueError(f"rope_scaling is {old!r} in {step}, not {new!r}: python -m tools.extend writes a checkpoint that has it, to "
                             "start from")
        print(f"{f.name}={old!r}, as in {step} (not {new!r})", file=sys.stderr)
        config = replace(config, **{f.name: old})
    return config


def make_room(out: Path, resuming: bool) -> None:
    """The run's folder; an old run of the same name that is not gone on with keeps its files, as <name>.1, <name>.2, ..."""
    if not resuming and ((out / "metrics.jsonl").is_file() or any(out.glob("step_*"))):
        whole = out.resolve()
        free = next(p for n in range(1, 10**6) if not (p := whole.with_name(f"{whole.name}.{n}")).exists())
        out.rename(free)
        print(f"the run that was in {out} is in {free} now")
    out.mkdir(parents=True, exist_ok=True)
