"""From documents to a prepared folder: what every `data/<name>/prepare.py` calls.

Documents are read twice: once to survey them (hash, size, which are for validation) and to fit the tokenizer, once to
encode them on all cores. Memory stays flat: about 1 MB of text a piece, two pieces a worker, 8 bytes a document.
The end-of-text id stands between the documents of a split. Everything is written into `<out>/.building` and moved in
place at the end, meta.json last, so that a run that dies at any point leaves nothing that looks finished.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import numpy as np
from tqdm import tqdm

from data import published
from data import tokenizer as tokenizers
from data.documents import PIECE, Documents, Piece, pieces, survey
from data.shards import UNFINISHED, Corpus, ShardWriter
from data.tokenizer import Bytes, Characters, Published, Tokenizer, train_bpe

DATA = Path(__file__).resolve().parent
FORMAT = 1   # raise when the same text and settings give other files
SPLITS = ("train", "val")


def fit(kind: str, vocab_size: int, text: Iterable[Piece]) -> Tokenizer:
    """The tokenizer of a corpus: a published one, all its characters, or merges learned from the training split."""
    if kind == "byte":
        return Bytes()
    if kind in get_args(Published):
        return published.load(kind)
    if kind == "bpe":
        bpe = train_bpe((t for split, _, t in text if split == "train"), vocab_size)
        if bpe.vocab_size < vocab_size:
            print(f"the corpus is small: {bpe.vocab_size} tokens instead of {vocab_size}")
        return bpe
    seen = np.zeros(0x110000, dtype=bool)
    for _, _, t in text:
        seen[np.frombuffer(t.encode("utf-32-le"), dtype="<u4")] = True
    return Characters(map(chr, np.flatnonzero(seen)))


def encode_all(text: Iterable[Piece], tokenizer: Tokenizer, workers: int,
               begun: Iterable[str] = ()) -> Iterator[tuple[str, np.ndarray, int, int]]:
    """(split, ids, documents begun, bytes) in the order of the text, encoded by `workers` threads (tiktoken and numpy
    release the interpreter's lock, so threads scale, and there is nothing that spawn could start twice). begun: splits
    that hold documents already, so that end-of-text goes before the first one too."""
    work: deque[Future[list[tuple[str, np.ndarray, int, int]]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for group in _groups(text, set(begun)):
            work.append(pool.submit(_encode, group, tokenizer))
            if len(work) > 2 * workers:
                yield from work.popleft().result()
        while work:
            yield from work.popleft().result()


def _groups(text: Iterable[Piece], begun: set[str]) -> Iterator[list[tuple[Piece, bool]]]:
    """Pieces gathered to about PIECE characters, each with whether end-of-text goes before it."""
    group: list[tuple[Piece, bool]] = []
    size = 0
    for piece in text:
        split, new, t = piece
        group.append((piece, new and split in begun))
        begun.add(split)
        size += len(t)
        if size >= PIECE:
            yield group
            group, size = [], 0
    if group:
        yield group


def _encode(group: list[tuple[Piece, bool]], tokenizer: Tokenizer) -> list[tuple[str, np.ndarray, int, int]]:
    out = []
    end = np.array([] if tokenizer.eot is None else [tokenizer.eot], dtype=np.int64)
    for name in SPLITS:
        mine = [(t, new, before) for (split, new, t), before in group if split == name]
        if mine:
            ids = [part for t, _, before in mine for part in ((end,) if before else ()) + (tokenizer.encode_array(t),)]
            size = sum(len(t.encode("utf-8")) for t, _, _ in mine)
            out.append((name, np.concatenate(ids), sum(new for _, new, _ in mine), size))
    return out


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """The folder, made if need be, for this process alone: others wait."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "a+b") as f:
        with contextlib.suppress(OSError):   # a file system without locks: go on without
            if sys.platform == "win32":
                import msvcrt

                while True:
                    with contextlib.suppress(OSError):   # it gives up after 10 seconds
                        msvcrt.locking(f.fileno(), msvcrt.LK_LOCK, 1)
                        break
            else:
                import fcntl

                fcntl.flock(f, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def workplace(out: Path) -> Iterator[Path]:
    """`<out>/.building`, empty, for this process alone: others wait. Removed at the end, whatever happens."""
    place, finished = out / UNFINISHED, False
    with locked(out):
        try:
            shutil.rmtree(place, ignore_errors=True)   # what a killed run left
            place.mkdir()
            yield place
            finished = True
        finally:
            if finished or (out / "meta.json").exists() or not any(out.glob("*.bin")):
                shutil.rmtree(place, ignore_errors=True)   # else it stays, the mark of a folder half replaced


def install(place: Path, out: Path) -> None:
    """Move the finished files into the folder; the old meta.json goes first, the new one comes last."""
    clear(out)
    for path in sorted(place.iterdir(), key=lambda p: p.name == "meta.json"):
        os.replace(path, out / path.name)


def clear(out: Path) -> None:
    """Delete an older version: meta.json first, so that it does not look finished from then on."""
    (out / "meta.json").unlink(missing_ok=True)
    for name in SPLITS:
        for old in out.glob(f"{name}_*.bin"):
            old.unlink()


def prepared(out: Path, sources: str, settings: dict[str, Any]) -> bool:
    """Whether the folder already holds this very thing; says why not if it holds something else."""
    if not (out / "meta.json").exists():
        return False
    try:
        corpus = Corpus(out)
        for name in SPLITS:
            corpus.split(name)
        old = corpus.meta
    except (ValueError, KeyError, FileNotFoundError) as e:
        print(f"preparing {out} again: {e}")
        return False
    if old.get("sources") == sources and old.get("settings") == json.loads(json.dumps(settings)):
        print(f"already prepared: {describe(out, old)}")
        return True
    print(f"preparing {out} again: the {'settings' if old.get('sources') == sources else 'sources'} have changed")
    return False


def describe(out: Path, meta: dict[str, Any]) -> str:
    """One line of what a folder holds, and the command that uses it."""
    name = out.name if out.resolve().parent == DATA else str(out)
    tokens, size = meta["tokens"], sum(meta["bytes"].values())
    text = f", {size / 1e6:.2f} MB of text, {size / max(1, sum(tokens.values())):.2f} bytes a token" if size else ""
    return (
        f"{tokens['train']:,} training and {tokens['val']:,} validation tokens, vocabulary {meta['vocab_size']:,} "
        f"({meta['tokenizer']['kind']}){text} in {out}; next: python train.py config/demo.py --dataset {name} --out_dir out/{out.name}"
    )


def write(place: Path, stream: Iterable[tuple[str, np.ndarray, int, int]], tokenizer: Tokenizer,
          sources: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Write the shards, tokenizer.json and meta.json into `place`; returns the meta. stream: as from `encode_all`."""
    return write_meta(place, write_ids(place, stream, tokenizer.vocab_size), tokenizer, sources, settings)


def write_ids(place: Path, stream: Iterable[tuple[str, np.ndarray, int, int]], vocab_size: int) -> dict[str, Any]:
    """Write the shards of both splits into `place`; returns the tokens, documents and bytes of each."""
    writers = {name: ShardWriter(place, name, vocab_size) for name in SPLITS}
    counts = {name: [0, 0] for name in SPLITS}   # documents, bytes
    try:
        for name, ids, documents, size in stream:
            writers[name].write(ids)
            counts[name][0] += documents
            counts[name][1] += size
    finally:
        for writer in writers.values():
            writer.close()
    return {
        "dtype": str(writers["train"].dtype),
        "tokens": {name: writers[name].tokens for name in SPLITS},
        "documents": {name: counts[name][0] for name in SPLITS},
        "bytes": {name: counts[name][1] for name in SPLITS},
    }


def write_meta(place: Path, counts: dict[str, Any], tokenizer: Tokenizer, sources: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Write tokenizer.json and meta.json into `place`; returns the meta. counts: as from `write_ids`."""
    tokenizers.save(tokenizer, place / "tokenizer.json")
    meta = {
        "tokenizer": {"kind": tokenizer.kind, "hash": tokenizer.hash},
        "vocab_size": tokenizer.vocab_size,
        **counts,
        "sources": sources,
        "settings": settings,
    }
    with open(place / "meta.json", "w", encoding="utf-8") as f:
        json.dump(meta, f, indent=1)
        f.flush()
        os.fsync(f.fileno())
    return meta


def build(out: str | Path, documents: Documents, tokenizer: str, vocab_size: int = 4096, val_fraction: float = 0.1,
          workers: int = 0) -> Path:
    """Prepare a folder from documents, unless it holds the same already; returns it.

    tokenizer: one of `data.tokenizer.Kind`. workers: threads, 0 for all cores; the files are the same for any number.
    ValueError, before anything is replaced, for input that cannot be used.
    """
    out = Path(out)
    if not 0 < val_fraction < 1:
        raise ValueError(f"val_fraction={val_fraction}: it must lie between 0 and 1")
    if tokenizer == "bpe" and vocab_size < 257:
        raise ValueError(f"vocab_size={vocab_size}: BPE needs at least 257, the 256 bytes and the end-of-text id")
    settings = {"format": FORMAT, "tokenizer": tokenizer, "val_fraction": val_fraction}
    if tokenizer == "bpe":
        settings["vocab_size"] = vocab_size
    found = survey(documents)
    with workplace(out) as place:
        if prepared(out, found.hash, settings):
            return out
        fitted = fit(tokenizer, vocab_size, pieces(documents, found, val_fraction))
        threads = workers if workers > 0 else os.cpu_count() or 1
        with tqdm(total=found.bytes, unit="B", unit_scale=True, desc=f"preparing {out.name}", leave=False) as bar:
            def watched() -> Iterator[tuple[str, np.ndarray, int, int]]:
                for item in encode_all(pieces(documents, found, val_fraction, fitted.cuts), fitted, threads):
                    bar.update(item[3])
                    yield item

            meta = write(place, watched(), fitted, found.hash, settings)
        install(place, out)
        print(f"prepared: {describe(out, meta)}")
    return out
