"""Writes text with a trained model: `python sample.py --prompt "To be"` takes the newest run under out/."""

import json
import os
import select
import stat
import sys
from collections.abc import Callable
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
    interactive: bool = False
    """a session: what you type is read after what there is, from its cache, and the text goes on; an empty line goes on without, and
    end of input (Ctrl-D) ends it, as Ctrl-C does; while text is written Ctrl-C stops that"""
    num_samples: int = 1
    """texts for each prompt"""
    max_new_tokens: int = 500
    """tokens of each text"""
    overflow: Literal["half", "slide", "refuse"] | None = None
    """text beyond block_size: half goes on from its last half, and a longer prompt counts by its end; slide goes on in a state that
    takes any length; refuse ends it, and refuses such a prompt (None: slide with a kv_cache that drops keys, else half)"""
    kv_cache: str | None = None
    """what attention keeps: full, int8, int4, "streaming(sinks=4, window=252)", "h2o(budget=256)", "snapkv(budget=256)"; eval.py says
    what that costs (None: as the model was trained with, which is full)"""
    rope_scaling: str | None = None
    """for text longer than it was trained on, e.g. "yarn(factor=4)", see tools.extend (None: as the checkpoint says)"""
    temperature: float = 0.8
    """below 1 likelier, above 1 stranger, 0 always the likeliest token"""
    top_k: int | None = None
    """draw from so many likeliest tokens"""
    top_p: float | None = None
    """draw from the fewest tokens that make up this probability"""
    min_p: float | None = None
    """draw from tokens at least this times as likely as the likeliest"""
    stop: Repeated[str] = ()
    """a text that ends the sample, and is not printed; may be given several times"""
    ignore_eot: bool = False
    """go on after an end-of-text token, which otherwise ends the sample"""
    min_new_tokens: int = 0
    """before so many neither end-of-text nor --stop ends it"""
    repetition_penalty: float = 1.0
    """above 1: what prompt or text has already is less likely; its logit is divided by this, or multiplied where below 0"""
    presence_penalty: float = 0.0
    """taken off the logit of every token that the text has already"""
    frequency_penalty: float = 0.0
    """taken off once for each time that it has it"""
    logit_bias: Repeated[str] = ()
    """id=bias: added to a token's logit, for example 42=-100 against it; may be given several times"""
    logprobs: int | None = None
    """with --json: the log probability of every token, and of so many likeliest in its place, by the model alone"""
    compile: bool = False
    """torch.compile the step of one token: about a minute at the start; worth it for long texts with --quantize"""
    draft: str | None = None
    """a smaller run of the same tokenizer that guesses tokens ahead: the same text, sooner where it often guesses right"""
    lookup: bool = False
    """guess what followed the last few tokens when they came before: for texts that repeat their prompt"""
    ahead: int | None = None
    """tokens guessed at once (None: 4 by a draft, 8 by look-up)"""
    json: bool = False
    """a line of JSON for each text: prompt, text, ids, why it ended"""
    seed: int = 1337
    """same seed, same text"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the weights and of the cache"""
    quantize: Literal["int8", "int4"] | None = None
    """weights of the linear layers in 8 or 4 bits: as many bytes less to read for a token; eval.py says what that costs"""

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "temperature", least=0)
        for name in ["num_samples", "max_new_tokens", "top_k", "top_p", "repetition_penalty"]:
            check_range(self, name, above=0)
        check_range(self, "min_new_tokens", least=0, most=self.max_new_tokens)
        check_range(self, "logprobs", least=0)
        check_range(self, "ahead", above=0)
        if (self.draft and self.lookup) or (self.ahead and not (self.draft or self.lookup)):
            raise ValueError("give --draft or --lookup, one of them" + ("" if self.ahead is None else ", to --ahead"))
        biases(self)
        if self.logprobs is not None and not self.json:
            raise ValueError("--logprobs needs --json")
        if self.interactive and (self.json or self.num_samples > 1 or self.prompt_file is not None or self.prompt == "-"):
            raise ValueError("--interactive is one text, typed: it goes with none of --json, --num_samples, --prompt_file, --prompt=-")
        check_range(self, "top_p", most=1)
        check_range(self, "min_p", least=0, most=1)
        check_range(self, "seed", least=0, most=2**32 - 1)
        if self.prompt is not None and self.prompt_file is not None:
            raise ValueError("give --prompt or --prompt_file, not both")


def biases(config: SampleConfig) -> tuple[tuple[int, float], ...]:
    found = []
    for text in config.logit_bias:
        i, _, bias = text.partition("=")
        try:
            found.append((int(i), float(bias)))
        except ValueError:
            raise ValueError(f"logit_bias={text!r}: write a token's id and a number, for example 42=-100") from None
    return tuple(found)


if __name__ == "__main__":
    config = parse(SampleConfig)     # before torch is imported, so that --help and mistakes answer at once

import torch

from data.tokenizer import Tokenizer
from engine.checkpoint import find_step, load_model, read_progress
from engine.decode import prepare
from engine.device import pick_device
from engine.generate import Batch, Drawn, Options, Text
from engine.speculate import Guesser, guesser
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


def started(config: SampleConfig, tokenizer: Tokenizer) -> tuple[Options, Callable[[], Text]]:
    """How every text goes on, and what shows one."""
    eot = () if tokenizer.eot is None or config.ignore_eot else (tokenizer.eot,)
    options = Options(config.repetition_penalty, config.presence_penalty, config.frequency_penalty, biases(config), config.min_new_tokens,
                      config.temperature, config.top_k, config.top_p, config.min_p, config.max_new_tokens, eot, config.logprobs)
    return options, lambda: Text(tokenizer, [as_utf8(s) for s in config.stop], config.ignore_eot, config.min_new_tokens)


def session(config: SampleConfig, model: GPT, tokenizer: Tokenizer, speculate: Guesser | None) -> None:
    """Text by turns: a line of the reader's, then the model's."""
    options, fresh = started(config, tokenizer)
    begin = lambda: Batch(model, 1, tokenizer.vocab_size, config.overflow, speculate, config.compile)
    batch, prompt, before = begin(), config.prompt, list[int]()
    while True:
        if prompt is None:
            try:
                prompt = input("> " if sys.stdin.isatty() else "")
            except (EOFError, KeyboardInterrupt):
                return
            prompt += "\n" * (prompt != "" and not tokenizer.unknown("\n"))
        try:
            ids = encode(as_utf8(prompt), tokenizer) if prompt or not (batch.rows or before) else []
        except ValueError as e:
            print(f"error: {e}", file=sys.stderr)
            prompt = None
            continue
        if batch.rows:
            batch.go_on(ids)
        else:
            batch.add(0, before + ids, options, config.seed * 1_000_003, batch.context)
        text, prompt, before = fresh(), None, []
        try:
            while not text.done:
                for d in batch.step():
                    print("" if text.done else text.push(d.id) + (text.end() if d.last else ""), end="", flush=True)
        except KeyboardInterrupt:              # what the state holds now is not known: the next turn reads all of it
            before, batch = batch.rows[0].ids if batch.rows else [], begin()
        print(flush=True)


def write(config: SampleConfig, prompts: list[str], model: GPT, tokenizer: Tokenizer, speculate: Guesser | None) -> None:
    """Prints the texts in order; those that are not yet their turn are written side by side with it, and wait."""
    options, fresh = started(config, tokenizer)
    batch = Batch(model, ROWS, tokenizer.vocab_size, config.overflow, speculate, config.compile)
    for row, prompt in enumerate(prompts):
        batch.add(row, encode(prompt, tokenizer), options, config.seed * 1_000_003 + row)
    texts = [fresh() for _ in prompts]
    tokens: list[list[Drawn]] = [[] for _ in prompts]                               # of --json
    waiting = ["" if config.json else p + " " * (tokenizer.kind == "ids" and p != "") for p in prompts]   # what each has to print yet
    over, turn = [False] * len(prompts), 0

    def print_ready() -> None:
        nonlocal turn
        while turn < len(texts) and (over[turn] or not config.json):
            if config.json:
                print(json.dumps(as_json(prompts[turn], waiting[turn], texts[turn], tokens[turn]), ensure_ascii=False), flush=True)
            else:
                print(waiting[turn], end="", flush=True)
            waiting[turn], tokens[turn] = "", []
            if not over[turn]:
                return
            turn += 1
            if not config.json:
                print(BETWEEN if turn < len(texts) else "", flush=True)

    print_ready()
    while drawn := batch.step():
        for d in drawn:
            text = texts[d.key]
            if text.done:
                continue
            waiting[d.key] += text.push(d.id)
            if config.json:
                tokens[d.key].append(d)
            over[d.key] = text.done or d.last
            if text.done:
                batch.drop(d.key)
            elif d.last:
                waiting[d.key] += text.end()
        print_ready()
    if speculate:
        print(f"{batch.drawn / max(1, batch.steps):.2f} tokens a step by guessing {speculate.ahead} ahead", file=sys.stderr)


def as_json(prompt: str, written: str, text: Text, tokens: list[Drawn]) -> dict:
    """What a text's line says; `logprobs` where they were asked for."""
    out: dict = {"prompt": prompt, "text": written, "ids": [d.id for d in tokens], "finish_reason": "stop" if text.stopped else "length"}
    if tokens and tokens[0].logprob is not None:
        out["logprobs"] = [{"id": d.id, "logprob": d.logprob, "top": [{"id": i, "logprob": p} for i, p in d.top]} for d in tokens]
    return out


def main(config: SampleConfig) -> None:
    device = pick_device(config.device)
    step = find_step(config.checkpoint)
    progress = read_progress(step)
    loss = "" if progress.val_loss is None else f", validation loss {progress.val_loss:.4f}"
    print(f"{step}: step {progress.iter}{loss}", file=sys.stderr)
    model, tokenizer = load_model(step, device, config.kv_cache, config.rope_scaling)
    model = model.to(getattr(torch, config.dtype))
    if told := prepare(model, config.quantize):
        print(told, file=sys.stderr)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    for i, _ in biases(config):
        if not 0 <= i < tokenizer.vocab_size:
            raise ValueError(f"logit_bias: there is no token {i} in a vocabulary of {tokenizer.vocab_size}")
    speculate = guesser(config.draft, config.lookup, config.ahead, model, tokenizer, config.quantize, config.rope_scaling)
    if config.interactive:
        return session(config, model, tokenizer, speculate)
    prompts = [p for p in read_prompts(config) for _ in range(config.num_samples)]
    for p in prompts:
        encode(p, tokenizer)                               # all of them are good before the first is written
    write(config, prompts, model, tokenizer, speculate)


if __name__ == "__main__":
    with one_line_errors():
        main(config)
