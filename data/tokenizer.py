"""Four tokenizers behind one small interface: characters, bytes, byte-level BPE (own or published), and ready-made ids.

Special tokens in a text are ordinary text: only `encode(text, special=True)`, meant for prompts, turns the literal
`<|endoftext|>` into the end-of-text id, which otherwise stands between documents only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data.documents import CUTS, CUTS_GPT2

END = "<|endoftext|>"
# How BPE cuts text into words: the pattern of Llama 3 (cl100k's with \p{N}{1,3}), which llama.cpp knows as "llama-bpe".
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
Published = Literal["gpt2", "cl100k_base", "o200k_base"]   # see data/published.py
Kind = Literal["char", "byte", "bpe", Published]           # what --tokenizer takes
TRAINING_CHARACTERS = 64_000_000   # BPE learns from the first so many: memory stays flat, the merges hardly change


class Tokenizer(ABC):
    """What all four share. `vocab_size` counts the end-of-text id `eot` too (None: there is none). `cuts`: see data/documents.py."""

    kind: str
    vocab_size: int
    eot: int | None
    cuts: Sequence[str] = CUTS

    @abstractmethod
    def encode_array(self, text: str) -> np.ndarray:
        """The ids of `text`, (n,) of an unsigned or signed integer type, quickly; nothing in it is special."""

    @abstractmethod
    def _bytes(self, i: int) -> bytes: ...

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """A JSON-able description that `from_dict` reads."""

    def encode(self, text: str, special: bool = False) -> list[int]:
        """The ids of `text`. special: the literal "<|endoftext|>" becomes the end-of-text id (for prompts)."""
        if not special or self.eot is None:
            return self.encode_array(text).tolist()
        ids: list[int] = []
        for i, part in enumerate(text.split(END)):
            ids += ([self.eot] if i else []) + self.encode_array(part).tolist()
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; end-of-text reads "<|endoftext|>", bytes that are no UTF-8 become U+FFFD."""
        return b"".join(END.encode() if i == self.eot else self.token_bytes(i) for i in ids).decode("utf-8", "replace")

    def token_bytes(self, i: int) -> bytes:
        """The UTF-8 bytes of one token, b"" for end-of-text. ValueError for an id outside the vocabulary."""
        i = int(i)
        if not 0 <= i < self.vocab_size:
            raise ValueError(f"token id {i} is outside the vocabulary of {self.vocab_size}")
        return b"" if i == self.eot else self._bytes(i)

    def byte_lengths(self) -> np.ndarray:
        """(vocab_size,) int64: the UTF-8 bytes of text that each id stands for (end-of-text 0), for bits per byte."""
        return np.array([len(self.token_bytes(i)) for i in range(self.vocab_size)], dtype=np.int64)

    def unknown(self, text: str) -> list[str]:
        """The distinct characters of `text` that the vocabulary lacks, in order."""
        return []

    @property
    def hash(self) -> str:
        """sha256 of the canonical JSON: two tokenizers with the same hash encode alike."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class Characters(Tokenizer):
    """One id a character, in code point order."""

    kind = "char"

    def __init__(self, characters: Iterable[str]):
        self.characters = sorted(set(characters))
        self.eot = len(self.characters)
        self.vocab_size = self.eot + 1
        codes = np.array([ord(c) for c in self.characters], dtype=np.int64)
        self.table = np.full(int(codes[-1]) + 2 if len(codes) else 1, -1, dtype=np.int32)   # code point -> id
        self.table[codes] = np.arange(self.eot)

    def encode_array(self, text: str) -> np.ndarray:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        ids = self.table[np.minimum(codes, len(self.table) - 1)]
        if (ids < 0).any():
            lacking = " ".join(ascii(c) if not c.isprintable() or c.isspace() else c for c in self.unknown(text)[:50])
            raise ValueError(f"the vocabulary (characters of the training text) lacks: {lacking}")
        return ids

    def _bytes(self, i: int) -> bytes:
        return self.characters[i].encode("utf-8", "replace")

    def unknown(self, text: str) -> list[str]:
        known = set(self.characters)
        return [c for c in dict.fromkeys(text) if c not in known]

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "characters": "".join(self.characters)}


class Bytes(Tokenizer):
    """UTF-8 bytes 0 to 255, then end-of-text."""

    kind, vocab_size, eot = "byte", 257, 256

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def _bytes(self, i: int) -> bytes:
        return bytes([i])

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind}


class BPE(Tokenizer):
    """Byte-level byte-pair encoding (Sennrich et al. 2016; bytes: Radford et al. 2019), run by tiktoken.

    ranks: the bytes of token i at place i, the order in which pairs are merged. pattern: cuts text into words first.
    eot, vocab_size: by default the next id and the one after; published vocabularies leave gaps, ids without bytes.
    """

    kind = "bpe"

    def __init__(self, ranks: Sequence[bytes], pattern: str = PATTERN, eot: int | None = None, vocab_size: int | None = None):
        import tiktoken  # here, so that character and byte models need no tiktoken

        self.ranks, self.pattern = list(ranks), pattern
        self.eot = len(self.ranks) if eot is None else eot
        self.vocab_size = vocab_size or self.eot + 1
        self.cuts = CUTS if r"[\r\n]" in pattern else CUTS_GPT2
        self.encoding = tiktoken.Encoding(
            "heed", pat_str=pattern, mergeable_ranks={b: i for i, b in enumerate(self.ranks)}, special_tokens={END: self.eot}
        )

    def encode_array(self, text: str) -> np.ndarray:
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def _bytes(self, i: int) -> bytes:
        return self.ranks[i] if i < len(self.ranks) else b""

    def to_dict(self) -> dict[str, Any]:
        ranks = [base64.b64encode(b).decode("ascii") for b in self.ranks]
        gaps = {"eot": self.eot, "vocab_size": self.vocab_size} if self.vocab_size != len(ranks) + 1 else {}
        return {"kind": self.kind, "pattern": self.pattern, "ranks": ranks, **gaps}


class Ids(Tokenizer):
    """Ids that stand for no text: written and read as integers with spaces between."""

    kind = "ids"

    def __init__(self, vocab_size: int, eot: int | None = None):
        self.vocab_size, self.eot = vocab_size, eot

    def encode(self, text: str, special: bool = False) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        try:
            ids = np.array([int(word) for word in text.split()], dtype=np.int64)
        except (ValueError, OverflowError):
            raise ValueError("this data has ids without text: write integers with spaces between, such as 1 2 3") from None
        if len(ids) and not (ids.min() >= 0 and ids.max() < self.vocab_size):
            raise ValueError(f"ids must be from 0 to {self.vocab_size - 1}; these go from {ids.min()} to {ids.max()}")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(i)) for i in ids)

    def _bytes(self, i: int) -> bytes:
        return f"{i} ".encode()

    def byte_lengths(self) -> np.ndarray:
        return np.zeros(self.vocab_size, dtype=np.int64)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "vocab_size": self.vocab_size, "eot": self.eot}


def train_bpe(texts: Iterable[str], vocab_size: int) -> BPE:
    """A BPE of `vocab_size` tokens (256 bytes, merges, end-of-text) learned by rustbpe; the same texts give the same one.

    A small corpus runs out of pairs to merge: then there are fewer, and the result's `vocab_size` says how many.
    """
    if not 257 <= vocab_size <= 2**31:   # rustbpe panics below 256, with a BaseException
        raise ValueError(f"vocab_size={vocab_size}: BPE needs at least 257, the 256 bytes and the end-of-text id")
    import rustbpe

    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(_first(texts, TRAINING_CHARACTERS), vocab_size - 1, pattern=PATTERN)
    pairs = sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])
    return BPE([bytes(token) for token, _ in pairs])


def _first(texts: Iterable[str], characters: int) -> Iterator[str]:
    """The texts up to so many characters."""
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return


def from_dict(d: dict[str, Any]) -> Tokenizer:
    """The tokenizer that `to_dict` described."""
    kind = d.get("kind")
    if kind == "char":
        return Characters(d["characters"])
    if kind == "byte":
        return Bytes()
    if kind == "bpe":
        return BPE([base64.b64decode(b) for b in d["ranks"]], d["pattern"], d.get("eot"), d.get("vocab_size"))
    if kind == "ids":
        return Ids(d["vocab_size"], d.get("eot"))
    raise ValueError(f"unknown kind of tokenizer {kind!r}: this version knows char, byte, bpe, ids")


def save(tokenizer: Tokenizer, path: str | Path) -> None:
    """Write JSON under a temporary name and rename it: a file that exists is whole."""
    temporary = Path(f"{path}.tmp")
    with open(temporary, "w", encoding="utf-8") as f:
        json.dump(tokenizer.to_dict(), f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


def load(path: str | Path) -> Tokenizer:
    """Read what `save` wrote. ValueError where it is something else."""
    try:
        return from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as e:
        raise ValueError(f"{path} is no tokenizer of ours ({type(e).__name__}): prepare the corpus again") from None
