"""OpenAI's completions: what a request may say, and what is answered."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from config.check import check_fields, check_range
from data.tokenizer import Tokenizer
from engine.generate import Drawn, Options, Text
from engine.worker import Worker


@dataclass
class Completion:
    """What a request may say: OpenAI's names, and those of vLLM for what OpenAI lacks."""

    prompt: Any = None
    model: str | None = None
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int = 1
    seed: int | None = None
    stop: Any = None
    stream: bool = False
    stream_options: Any = None
    logprobs: int | None = None
    logit_bias: Any = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    user: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("max_tokens", "n", "top_k", "top_p", "repetition_penalty"):
            check_range(self, name, above=0)
        for name, most in (("temperature", None), ("min_p", 1), ("logprobs", 20), ("min_tokens", self.max_tokens), ("seed", 2**32 - 1)):
            check_range(self, name, least=0, most=most)
        check_range(self, "n", most=128)
        check_range(self, "top_p", most=1)
        self.stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if not (isinstance(self.stop, list) and all(isinstance(s, str) for s in self.stop)):
            raise ValueError("stop must be a text or a list of texts")
        if not isinstance(self.stream_options, dict | None):
            raise ValueError("stream_options must be an object")
        try:
            self.logit_bias = tuple((int(i), float(b)) for i, b in (self.logit_bias or {}).items())
        except (AttributeError, ValueError, TypeError):
            raise ValueError("logit_bias must be an object of token ids and numbers") from None

    def ids(self, tokenizer: Tokenizer, context: int) -> list[list[int]]:
        """The prompts: a text, a list of them, ids, or lists of ids."""
        p = [""] if self.prompt is None else self.prompt if isinstance(self.prompt, list) else [self.prompt]
        p = [p] if p and all(type(i) is int for i in p) else p
        found = []
        for one in p:
            if isinstance(one, str):
                if unknown := tokenizer.unknown(one.replace("<|endoftext|>", "")):
                    raise ValueError(f"the vocabulary lacks {' '.join(map(repr, unknown))}")
                one = tokenizer.encode(one, special=True) or [tokenizer.eot or 0]
            if not (isinstance(one, list) and one and all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in one)):
                raise ValueError(f"prompt must be a text, a list of texts, or token ids below {tokenizer.vocab_size}")
            if len(one) > context:
                raise ValueError(f"the prompt has {len(one)} tokens, and the context is {context}")
            found.append(one)
        if not found or any(i >= tokenizer.vocab_size or i < 0 for i, _ in self.logit_bias):
            raise ValueError("prompt is an empty list" if not found else f"logit_bias: token ids must be below {tokenizer.vocab_size}")
        return found

    def options(self, eot: int | None) -> Options:
        stop = () if eot is None or self.ignore_eos else (eot,)
        return Options(self.repetition_penalty, self.presence_penalty, self.frequency_penalty, self.logit_bias, self.min_tokens,
                       self.temperature, self.top_k, self.top_p, self.min_p, self.max_tokens, stop, self.logprobs)


class Writing:
    """The texts of one request as they come."""

    def __init__(self, asked: Completion, worker: Worker, tokenizer: Tokenizer, context: int):
        self.tokenizer, self.prompts = tokenizer, asked.ids(tokenizer, context)
        ids = [p for p in self.prompts for _ in range(asked.n)]
        seed = random.getrandbits(32) if asked.seed is None else asked.seed
        self.worker, self.queue, loop = worker, asyncio.Queue[Drawn | Exception](), asyncio.get_running_loop()
        self.keys = worker.submit(ids, asked.options(tokenizer.eot), [seed * 1_000_003 + i for i in range(len(ids))],
                                  lambda d: loop.call_soon_threadsafe(self.queue.put_nowait, d))
        self.texts = {key: Text(tokenizer, asked.stop, asked.ignore_eos, asked.min_tokens) for key in self.keys}
        self.written, self.tokens = dict.fromkeys(self.keys, 0), 0        # characters, and ids of all

    async def choices(self) -> AsyncIterator[dict]:
        """What is new, a choice at a time."""
        left = set(self.keys)
        while left:
            d = await self.queue.get()
            if isinstance(d, Exception):
                raise d
            if d.key not in left:          # drawn before it was known that the text had ended
                continue
            text, self.tokens = self.texts[d.key], self.tokens + 1
            new = text.push(d.id) + (text.end() if d.last and not text.done else "")
            if text.done:
                left.discard(d.key)
                self.worker.cancel([d.key])
            name = self.tokenizer.token_bytes(d.id).decode("utf-8", "replace")
            logprobs = None if d.logprob is None else {
                "tokens": [name], "token_logprobs": [d.logprob], "text_offset": [self.written[d.key]],
                "top_logprobs": [{self.tokenizer.token_bytes(i).decode("utf-8", "replace"): p for i, p in reversed(d.top)}]}
            self.written[d.key] += len(new)
            yield {"index": self.keys.index(d.key), "text": new, "logprobs": logprobs,
                   "finish_reason": None if not text.done else "stop" if text.stopped else "length"}

    def close(self) -> None:
        """Frees the rows, whether or not anybody has begun to listen."""
        self.worker.cancel(self.keys)

    def usage(self) -> dict:
        read = sum(map(len, self.prompts))
        return {"prompt_tokens": read, "completion_tokens": self.tokens, "total_tokens": read + self.tokens}


def together(pieces: list[dict]) -> list[dict]:
    """Pieces of choices -> whole ones, in order."""
    whole: dict[int, dict] = {}
    for p in pieces:
        w = whole.setdefault(p["index"], {**p, "text": "", "logprobs": p["logprobs"] and {key: [] for key in p["logprobs"]}})
        w["text"], w["finish_reason"] = w["text"] + p["text"], p["finish_reason"]
        for key, values in (p["logprobs"] or {}).items():
            w["logprobs"][key] += values
    return [whole[i] for i in sorted(whole)]
