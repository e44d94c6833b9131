"""Writes text with a trained model: `python sample.py --prompt "To be"` takes the newest run under out/."""

import os
import select
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from config.check import check_fields, check_range
from engine.cli import Repeated, as_utf8, one_line_errors, parse


@dataclass
class SampleConfig:
    """Text from a checkpoint. It streams to standard output as it is produced; everything else goes to standard error."""

    checkpoint: str | None = None
    """a run's folder, one of its steps, or a folder of runs (None: the newest run under out/); a run gives its best step"""
    prompt: str | None = None
    """what the text begins with; - reads standard input, as does a pipe without any prompt (None: a line's beginning)"""
    prompt_file: str | None = None
    """a file of prompts, one a line"""
    num_samples: int = 1
    """texts for each prompt"""
    max_new_tokens: int = 500
    """tokens of each text; beyond block_size it goes on from the last half of the context"""
    temperature: float = 0.8
    """below 1 likelier, above 1 stranger, 0 always the likeliest token"""
    top_k: int | None = None
    """draw from so many likeliest tokens"""
    top_p: float | None = None
    """draw from the fewest tokens that make up this probability"""
    min_p: float | None = None
    """draw from tokens at least this times as likely as the likeliest"""
    stop: Repeated[str] = ()
    """a text that ends the sample, and is not printed; may be given several times (end-of-text always ends it)"""
    seed: int = 1337
    """same seed, same text"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the weights and of the cache"""

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "temperature", least=0)
        for name in ["num_samples", "max_new_tokens", "top_k", "top_p"]:
            check_range(self, name, above=0)
        check_range(self, "top_p", most=1)
        check_range(self, "min_p", least=0, most=1)
        check_range(self, "seed", least=0, most=2**32 - 1)
        if self.prompt is not None and self.prompt_file is not None:
            raise ValueError("give --prompt or --prompt_file, not both")


if __name__ == "__main__":
    config = parse(SampleConfig)     # before torch is imported, so that --help and mistakes answer at once

import torch

from data.tokenizer import Tokenizer
from engine.checkpoint import find_step, load_model, read_progress
from engine.device import pick_device
from engine.generate import Text, generate
from model import GPT

ROWS = 64   # texts written side by side
BETWEEN = f"\n{'-' * 15}"


def read_prompts(config: SampleConfig) -> list[str]:
    if config.prompt_file is not None:
        if not Path(config.prompt_file).is_file():
            raise ValueError(f"there is no file {config.prompt_file}")
        return Path(config.prompt_file).read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    if config.prompt == "-" or (config.prompt is None and piped()):
        return [sys.stdin.buffer.read().decode("utf-8", "replace")]
    return [as_utf8(config.prompt or "")]


def piped() -> bool:
    """Whether standard input is a file, or a pipe that has something to say: one that stays silent must not block."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    if not stat.S_ISFIFO(mode) or sys.platform == "win32":     # Windows cannot ask a pipe
        return stat.S_ISREG(mode) or stat.S_ISFIFO(mode)
    speaks = bool(select.select([0], [], [], 0.2)[0])
    if not speaks:
        print("standard input is silent and not waited for; --prompt=- waits", file=sys.stderr)
    return speaks


def encode(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """The prompt's ids; <|endoftext|> in it is the token. An empty one is a line's beginning, or the end of a text before."""
    if unknown := tokenizer.unknown(prompt.replace("<|endoftext|>", "")):
        raise ValueError(f"the vocabulary lacks {' '.join(map(repr, unknown))}: leave them out of the prompt")
    if prompt:
        return tokenizer.encode(prompt, special=True)
    if tokenizer.kind == "ids" or tokenizer.unknown("\n"):
        return [tokenizer.eot or 0]
    return tokenizer.encode("\n")


def show(config: SampleConfig, prompts: list[str], first_row: int, model: GPT, tokenizer: Tokenizer) -> None:
    """Prints the texts in order; those that are not yet their turn are written side by side with it, and wait."""
    texts = [Text(tokenizer, [as_utf8(s) for s in config.stop]) for _ in prompts]
    waiting = [p + " " * (tokenizer.kind == "ids" and p != "") for p in prompts]    # what each text has to print yet
    turn = 0

    def print_ready(over: bool = False) -> None:
        nonlocal turn
        while True:
            print(waiting[turn], end="", flush=True)
            waiting[turn] = ""
            if turn + 1 == len(texts) or not (texts[turn].done or over):
                return
            turn += 1
            print(BETWEEN)

    print_ready()
    for ids in generate(model, [encode(p, tokenizer) for p in prompts], config.max_new_tokens, temperature=config.temperature,
                        top_k=config.top_k, top_p=config.top_p, min_p=config.min_p, seed=config.seed, first_row=first_row,
                        ends=lambda row: texts[row].done, vocab_size=tokenizer.vocab_size):
        for row, i in ids.items():
            waiting[row] += texts[row].push(i)
        print_ready()
    for row, text in enumerate(texts):
        waiting[row] += text.end()
    print_ready(over=True)


def main(config: SampleConfig) -> None:
    device = pick_device(config.device)
    step = find_step(config.checkpoint)
    progress = read_progress(step)
    loss = "" if progress.val_loss is None else f", validation loss {progress.val_loss:.4f}"
    print(f"{step}: step {progress.iter}{loss}", file=sys.stderr)
    model, tokenizer = load_model(step, device)
    model = model.to(getattr(torch, config.dtype))
    prompts = [p for p in read_prompts(config) for _ in range(config.num_samples)]
    for p in prompts:
        encode(p, tokenizer)                               # all of them are good before the first is written
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    for i in range(0, len(prompts), ROWS):
        show(config, prompts[i:i + ROWS], i, model, tokenizer)
        print(BETWEEN if i + ROWS < len(prompts) else "", flush=True)


if __name__ == "__main__":
    with one_line_errors():
        main(config)
