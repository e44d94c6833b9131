"""Token ids on disk: `<split>_000000.bin` behind llm.c's header, beside `meta.json` and `tokenizer.json`.

The header is 256 int32, of which three count: 20240520, 1, n for n ids of 2 bytes; 20240801, 7, n for 4 bytes. llm.c's
and modded-nanogpt's FineWeb shards are the same; nanoGPT's headerless `train.bin` of uint16 is read too, its pickle is not.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from data import tokenizer as tokenizers

HEADER = 1024
FORMATS: dict[int, tuple[int, np.dtype]] = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
UNFINISHED = ".building"   # a folder in the corpus's folder while it is being made


def width(vocab_size: int) -> np.dtype:
    """The narrowest type for ids 0 to vocab_size - 1: uint16 up to 65536 of them, else uint32."""
    if vocab_size > 2**32:
        raise ValueError(f"a vocabulary of {vocab_size:,} does not fit into 32 bits")
    return np.dtype("<u2") if vocab_size <= 65536 else np.dtype("<u4")


class ShardWriter:
    """Writes ids to `<folder>/<split>_000000.bin` and so on, each under a temporary name until it is whole."""

    def __init__(self, folder: str | Path, split: str, vocab_size: int, shard_tokens: int = 100_000_000):
        self.folder, self.split, self.vocab_size, self.shard_tokens = Path(folder), split, vocab_size, shard_tokens
        self.dtype = width(vocab_size)
        self.tokens = self.shards = self.count = 0   # ids in all, finished shards, ids in the open shard
        self.file: BinaryIO | None = None

    def write(self, ids: np.ndarray) -> None:
        """Append ids (n,). ValueError, before anything is written, if one is outside 0 .. vocab_size - 1."""
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size):
            bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise ValueError(f"token id {bad} is outside the vocabulary of {self.vocab_size}: raise --vocab_size or check the ids")
        while len(ids):
            if self.file is None:
                self.begin()
            part, ids = np.split(ids, [self.shard_tokens - self.count])
            assert self.file is not None
            self.file.write(part.astype(self.dtype).tobytes())
            self.count += len(part)
            self.tokens += len(part)
            if self.count == self.shard_tokens:
                self.finish()

    def path(self, suffix: str = "") -> Path:
        return self.folder / f"{self.split}_{self.shards:06d}.bin{suffix}"

    def begin(self) -> None:
        self.file = open(self.path(".tmp"), "wb")  # noqa: SIM115
        self.file.write(bytes(HEADER))

    def finish(self) -> None:
        """Close the open shard: header, flush to the disk, final name."""
        assert self.file is not None
        magic, version = next((m, v) for m, (v, dtype) in FORMATS.items() if dtype == self.dtype)
        header = np.zeros(256, dtype="<i4")
        header[:3] = magic, version, self.count
        self.file.seek(0)
        self.file.write(header.tobytes())
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.path(".tmp"), self.path())
        self.file, self.count, self.shards = None, 0, self.shards + 1

    def close(self) -> None:
        """Finish the last shard; a split without ids gets one empty shard."""
        if self.file is None and self.shards == 0:
            self.begin()
        if self.file is not None:
            self.finish()


class Shard(NamedTuple):
    path: Path
    dtype: np.dtype
    start: int   # byte where the ids begin
    tokens: int


def open_shard(path: Path, headerless: np.dtype | None = None) -> Shard:
    """Read and check a shard's header; `headerless` says the type of files that have none. ValueError if it does not fit."""
    size = path.stat().st_size
    with open(path, "rb") as f:
        start = f.read(HEADER)
    magic, version, count = np.frombuffer(start[:12].ljust(12, b"\0"), dtype="<i4").tolist()
    known = FORMATS.get(magic)
    if known is None or (headerless is not None and HEADER + count * known[1].itemsize != size):
        if headerless is None:
            raise ValueError(f"{path} is no token file: it does not begin with llm.c's header (20240520 or 20240801)")
        if size % headerless.itemsize:
            raise ValueError(f"{path} has {size} bytes, not a multiple of {headerless.itemsize}: cut short, or other ids")
        return Shard(path, headerless, 0, size // headerless.itemsize)
    if version != known[0]:
        raise ValueError(f"{path}: version {version} of the token file; this reads version {known[0]}")
    if count < 0 or HEADER + count * known[1].itemsize != size:
        there = max(0, size - HEADER) // known[1].itemsize
        raise ValueError(f"{path} is cut short or damaged: its header says {count} tokens, it has {there}; prepare it again")
    return Shard(path, known[1], HEADER, count)


class Split:
    """The ids of one split, over all its shards, as one sequence; reads from the files, so that memory stays flat."""

    def __init__(self, folder: str | Path, name: str, vocab_size: int | None = None):
        self.folder, self.name, self.vocab_size = Path(folder), name, vocab_size
        pattern = re.compile(rf"(.*_)?{re.escape(name)}_\d+\.bin|.+_{re.escape(name)}\.bin")
        paths = sorted(p for p in self.folder.glob("*.bin") if pattern.fullmatch(p.name))
        plain = self.folder / f"{name}.bin"
        if paths:
            self.shards = [open_shard(p) for p in paths]
        elif plain.exists():
            self.shards = [open_shard(plain, headerless=np.dtype("<u2"))]
        else:
            raise FileNotFoundError(f"no split {name!r} in {self.folder}: there is no {name}_000000.bin")
        self.ends = np.cumsum([shard.tokens for shard in self.shards])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, start: int, n: int) -> np.ndarray:
        """Ids start .. start + n - 1, (n,) int64; they may lie in several shards. ValueError outside the split or the vocabulary."""
        if start < 0 or n < 0 or start + n > len(self):
            raise ValueError(f"tokens {start} to {start + n} are outside the split {self.name!r} of {len(self)} tokens")
        out = np.empty(n, dtype=np.int64)
        done, k = 0, int(np.searchsorted(self.ends, start, side="right"))
        while done < n:
            shard = self.shards[k]
            first = start + done - (int(self.ends[k]) - shard.tokens)
            take = min(n - done, shard.tokens - first)
            part = np.fromfile(shard.path, shard.dtype, take, offset=shard.start + first * shard.dtype.itemsize)
            if len(part) != take:
                raise ValueError(f"{shard.path} has become shorter since it was opened: prepare the corpus again")
            out[done : done + take] = part
            done, k = done + take, k + 1
        if self.vocab_size is not None and n and out.max() >= self.vocab_size:
            raise ValueError(
                f"{self.folder} holds the id {out.max()}, outside its vocabulary of {self.vocab_size}: "
                'a meta.json there says the size, such as {"vocab_size": 65536}'
            )
        return out


def has_splits(folder: Path) -> bool:
    """Whether there are token files that we did not make: llm.c's shards or nanoGPT's train.bin."""
    return any(re.fullmatch(r"(.*_)?train(_\d+)?\.bin", p.name) for p in folder.glob("*.bin"))


class Corpus:
    """A prepared folder: `.meta`, `.tokenizer`, `.vocab_size`, `.split("train")`.

    FileNotFoundError where it is missing or unfinished; ValueError where its files contradict each other. Folders
    of other projects have no meta.json, or one with `vocab_size` alone: their ids stand for no text.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise FileNotFoundError(f"there is no folder {self.folder}: prepare the corpus first")
        meta = self.folder / "meta.json"
        if not meta.exists() and ((self.folder / UNFINISHED).exists() or not has_splits(self.folder)):
            raise FileNotFoundError(f"{self.folder} holds no finished corpus (no meta.json): run its prepare script")
        try:
            self.meta: dict[str, Any] = dict(json.loads(meta.read_text(encoding="utf-8"))) if meta.exists() else {}
        except (ValueError, TypeError):
            raise ValueError(f"{meta} is no JSON: delete it and prepare the corpus again") from None
        if (self.folder / "tokenizer.json").exists():
            self.tokenizer = tokenizers.load(self.folder / "tokenizer.json")
            if "tokenizer" in self.meta and self.meta["tokenizer"]["hash"] != self.tokenizer.hash:
                raise ValueError(f"{self.folder}: tokenizer.json is not the one that made the tokens; prepare the corpus again")
        else:
            size = self.meta.get("vocab_size")
            self.tokenizer = tokenizers.Ids(int(size)) if size else self.guess()
        self.vocab_size = self.tokenizer.vocab_size

    def guess(self, few: int = 1 << 26) -> tokenizers.Ids:
        """The vocabulary where nothing says it. llm.c's headers stand for GPT-2's (2 bytes) or Llama 3's (4 bytes), and so do
        many ids without a header for GPT-2's, if a sample of the ids agrees; else all ids are read, for the greatest.
        Ids beyond that are refused when they are read."""
        splits = []
        for name in ("train", "val"):
            with contextlib.suppress(FileNotFoundError):
                splits.append(self.split(name))
        shards = [shard for split in splits for shard in split.shards]
        size, eot = (50257, 50256) if shards and shards[0].dtype.itemsize == 2 else (128256, None)
        known = all(shard.start == HEADER for shard in shards) or sum(map(len, splits)) > few
        if known and top_id(splits, 64) < size:
            return tokenizers.Ids(size, eot)
        return tokenizers.Ids(top_id(splits) + 1)

    def split(self, name: str) -> Split:
        """A split, checked against meta.json."""
        split = Split(self.folder, name, getattr(self, "vocab_size", None))
        dtype, tokens = self.meta.get("dtype"), self.meta.get("tokens", {}).get(name)
        if dtype and any(shard.dtype != np.dtype(dtype) for shard in split.shards):
            raise ValueError(f"{self.folder}: meta.json says {dtype} and {split.shards[0].path.name} is {split.shards[0].dtype}")
        if tokens is not None and tokens != len(split):
            raise ValueError(f"{self.folder}: meta.json says {tokens} tokens in {name!r}, the files have {len(split)}; prepare it again")
        return split


def top_id(splits: list[Split], samples: int = 0, chunk: int = 1 << 18) -> int:
    """The greatest id in the splits, or in so many chunks of each, its ends among them."""
    top = 0
    for split in splits:
        starts = range(0, len(split), chunk)
        for start in starts if not 0 < samples < len(starts) else [starts[i * (len(starts) - 1) // (samples - 1)] for i in range(samples)]:
            top = max(top, int(split.read(start, min(chunk, len(split) - start)).max()))
    return top
