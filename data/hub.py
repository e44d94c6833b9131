"""Corpora of the Hugging Face Hub: what data/<name>/prepare.py of those calls. Needs the package `datasets`.

The data set is streamed, once; a source shard (a Parquet file) is the unit. Each finished one leaves a folder of token files
and counts in `<out>/.building`, so that a run that was killed goes on after the last of them, to the same bytes. At the end
the files of all shards are moved into place as the shards of one corpus, meta.json last.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from data import tokenizer as tokenizers
from data.build import DATA, FORMAT, SPLITS, clear, describe, encode_all, fit, locked, prepared, write_ids, write_meta
from data.documents import CUTS, Piece, cut
from data.shards import HEADER, UNFINISHED, ShardWriter, open_shard, width
from data.tokenizer import Published, Tokenizer
from engine.cli import one_line_errors, parse

LEAST = 32   # validation documents to expect of --limit


@dataclass(frozen=True)
class Repository:
    """A data set of the Hub. tokens: about so many of GPT-2."""

    name: str
    path: str
    licence: str
    tokens: float
    config: str | None = None
    column: str = "text"


@dataclass
class Options:
    tokenizer: Literal[Published, "bpe", "byte"] = "gpt2"
    """a published tokenizer, byte-pair encoding learned from the first 64 million characters for training, or bytes"""
    vocab_size: int = 32_768
    """tokens of the BPE, end-of-text included"""
    limit: int = 0
    """documents to take, from the beginning; 0 for all"""
    val_fraction: float = 0.0005
    """share of the documents for validation, chosen by a hash of their text; with --limit at least 32 / limit, at most half"""
    source: str | None = None
    """a folder of Parquet files, or another repository of the Hub, with the same column"""
    config: str | None = None
    """configuration of the data set, if not the usual one"""
    out: str | None = None
    """folder to write; by default data/<name>, with _<tokenizer> behind it for another tokenizer than gpt2"""
    workers: int = 0
    """threads that encode, 0 for all cores; the files are the same for any number"""


def main(repository: Repository, options: type[Options], argv: list[str] | None = None) -> None:
    with one_line_errors():
        prepare(repository, parse(options, argv, prog=f"python -m data.{repository.name}.prepare"))


def prepare(repository: Repository, options: Options) -> Path:
    """Prepare as the options say, going on where a run with the same ones was stopped; returns the folder. ValueError for what
    a user can mend: no network, no package, a full disk, too few documents."""
    check(options)
    name = repository.name if options.tokenizer == "gpt2" else f"{repository.name}_{options.tokenizer}"
    out = Path(options.out or DATA / name)
    share = max(options.val_fraction, min(0.5, LEAST / options.limit)) if options.limit else options.val_fraction
    path = options.source or repository.path
    settings = {
        "format": FORMAT, "repository": path, "config": options.config or (None if options.source else repository.config),
        "column": repository.column, "tokenizer": options.tokenizer, "val_fraction": share, "limit": options.limit,
        **({"vocab_size": options.vocab_size} if options.tokenizer == "bpe" else {}),
    }  # fmt: skip
    folder = Path(path).resolve() if options.source and Path(path).is_dir() else None
    if folder:
        settings["repository"] = str(folder)
    print(f"{repository.path}: licence {repository.licence}")
    with locked(out):
        work = out / UNFINISHED
        sources = fingerprint(folder) if folder else str(read_json(out / "meta.json").get("sources"))
        if prepared(out, sources, settings):
            shutil.rmtree(work, ignore_errors=True)
            return out
        with space(work):
            if not (resume(work, sources if folder else None, settings) and (work / "plan.json").exists()):
                make(out, work, repository, options, settings, folder)
            move(out, work)
    print(f"prepared: {describe(out, read_json(out / 'meta.json'))}")
    return out


def check(options: Options) -> None:
    if not 0 < options.val_fraction < 1:
        raise ValueError(f"val_fraction={options.val_fraction}: it must lie between 0 and 1")
    if options.limit < 0 or options.limit == 1:
        raise ValueError(f"limit={options.limit}: give 0 for all documents, or at least 2, one for training and one for validation")
    if options.tokenizer == "bpe" and options.vocab_size < 257:
        raise ValueError(f"vocab_size={options.vocab_size}: BPE needs at least 257, the 256 bytes and the end-of-text id")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, {} where there is none."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(path.read_text(encoding="utf-8")))
    return {}


def write_json(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    os.replace(temporary, path)


def fingerprint(folder: Path) -> str:
    """sha256 of names, sizes and times of the Parquet files in a folder."""
    stats = [(p.relative_to(folder).as_posix(), p.stat()) for p in sorted(folder.rglob("*.parquet"))]
    return hashlib.sha256(json.dumps([(name, s.st_size, s.st_mtime_ns) for name, s in stats]).encode()).hexdigest()


def resume(work: Path, sources: str | None, settings: dict[str, Any]) -> bool:
    """Whether the work folder is of these settings and sources (None: any); else it is emptied."""
    state = read_json(work / "state.json")
    if state and state["settings"] == settings and sources in (None, state["sources"]):
        print(f"going on where an earlier run stopped: {len(list(work.glob('*/counts.json')))} of {state['shards']} source shards are done")
        return True
    if state:
        print(f"starting over: {work} is of other {'settings' if state['settings'] != settings else 'sources'}")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    return False


@contextlib.contextmanager
def space(work: Path) -> Iterator[None]:
    """A full disk is one line; so is any other failure to write."""
    try:
        yield
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        for part in work.glob("*.part"):
            shutil.rmtree(part, ignore_errors=True)
        raise ValueError(f"the disk of {work.parent} is full: make room and run the same command again, finished shards are kept") from None


def make(out: Path, work: Path, repository: Repository, options: Options, settings: dict[str, Any], folder: Path | None) -> None:
    """Encode every source shard that is not done, and plan which file goes where."""
    state = read_json(work / "state.json")
    sources = state.get("sources") or (fingerprint(folder) if folder else revision(settings["repository"]))
    stream = Stream(settings, None if folder else sources)
    if state.get("shards", stream.shards) != stream.shards:
        raise ValueError(f"{settings['repository']} has {stream.shards} shards now, not {state['shards']}: delete {work} and start over")
    write_json(work / "state.json", {"sources": sources, "settings": settings, "shards": stream.shards})
    if (work / "tokenizer.json").exists():
        tokenizer = tokenizers.load(work / "tokenizer.json")
    else:
        tokenizer = fit(options.tokenizer, options.vocab_size, stream.all())
        tokenizers.save(tokenizer, work / "tokenizer.json")
    if not options.source and not options.limit:
        enough(work, repository, tokenizer)
    counts = encode(work, stream, tokenizer, options.workers if options.workers > 0 else os.cpu_count() or 1)
    plan(out, work, counts, tokenizer, sources, settings)


def enough(work: Path, repository: Repository, tokenizer: Tokenizer) -> None:
    """ValueError unless the disk has room for the whole corpus."""
    need = repository.tokens * width(tokenizer.vocab_size).itemsize * (4.5 if tokenizer.kind == "byte" else 1)
    have = shutil.disk_usage(work).free + sum(p.stat().st_size for p in work.rglob("*.bin"))
    if have < need:
        text = f"all of {repository.name} needs about {need / 1e9:.0f} GB of disk, {work.parent} has {have / 1e9:.0f} GB"
        raise ValueError(f"{text}: give --limit, or --out on a larger disk")


def revision(path: str) -> str:
    """The commit of a repository now. ValueError, within seconds, without a network or such a repository."""
    found: list[str | None] = []
    reason = ["no answer in 20 s"]

    def ask() -> None:
        try:
            from huggingface_hub import HfApi

            found.append(HfApi().dataset_info(path, timeout=10).sha)
        except Exception as e:
            reason[0] = first_line(e)

    _datasets()
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        raise ValueError(f"--source {path}: there is no such folder, and a repository of the Hub is written owner/name")
    thread = threading.Thread(target=ask, daemon=True)   # looking a name up has no time limit
    thread.start()
    thread.join(20)
    if not found:
        raise ValueError(
            f"{path} cannot be reached on the Hugging Face Hub ({reason[0]}): give --source FOLDER with its Parquet files, or use "
            "a corpus that needs no download (python -m data.python.prepare, or your own text: python -m data.text.prepare --input FILE)"
        )
    return str(found[0])


def first_line(e: Exception) -> str:
    return f"{type(e).__name__}: {str(e).strip()}".splitlines()[0][:300]


def _datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise ValueError("the corpora of the Hub need the package datasets: pip install datasets") from None
    datasets.disable_progress_bars()
    return datasets


class Stream:
    """The documents of a data set, shard by shard, split by the hash of their text. Empty ones are passed over."""

    def __init__(self, settings: dict[str, Any], revision: str | None):
        self.path, self.column, self.limit = settings["repository"], settings["column"], settings["limit"]
        self.threshold = int(settings["val_fraction"] * 2**64)
        datasets = _datasets()
        try:
            builder = datasets.load_dataset_builder(self.path, settings["config"], revision=revision)
            self.files: list[str] = list(builder.config.data_files["train"])
        except Exception as e:
            raise ValueError(f"{self.path} cannot be opened as a data set of Parquet files ({first_line(e)})") from None
        self.shards = len(self.files)

    def texts(self, shard: int, most: int | None) -> Iterator[str]:
        """The documents of a shard, at most so many. Reads a row group at a time: `datasets` itself reads ahead without bound
        where the reader is slower than the disk."""
        from datasets.utils.file_utils import xopen  # tries again when the network fails
        from pyarrow.parquet import ParquetFile

        done = 0
        try:
            with xopen(self.files[shard], "rb") as f, ParquetFile(f) as table:
                names = table.schema_arrow.names
                if self.column not in names or str(table.schema_arrow.field(self.column).type) not in ("string", "large_string"):
                    raise ValueError(f"no column {self.column!r} of text among {', '.join(names)}")
                groups = range(table.num_row_groups)   # one at a time: iter_batches keeps what it has read until its end
                for batch in (b for i in groups for b in table.iter_batches(batch_size=256, columns=[self.column], row_groups=[i])):
                    for text in filter(None, batch.column(0).to_pylist()):
                        yield text
                        done += 1
                        if done == most:
                            return
        except Exception as e:
            raise ValueError(
                f"{self.path}: reading shard {shard + 1} of {self.shards} failed ({first_line(e)}): "
                "run the same command again, finished shards are kept"
            ) from None

    def pieces(self, shard: int, most: int | None, cuts: Sequence[str] = CUTS) -> Iterator[Piece]:
        """(split, whether a document begins, text), see data/documents.py."""
        for text in self.texts(shard, most):
            place = int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big")
            split, new = ("val" if place < self.threshold else "train"), True
            for part in cut([text], cuts=cuts):
                yield split, new, part
                new = False

    def all(self) -> Iterator[Piece]:
        """The pieces of every shard, within the limit."""
        left = self.limit or None
        for shard in range(self.shards):
            for piece in self.pieces(shard, left):
                yield piece
                left = left and left - piece[1]
            if left == 0:
                return


def encode(work: Path, stream: Stream, tokenizer: Tokenizer, workers: int) -> list[dict[str, Any]]:
    """Make `<work>/000000` and so on, a source shard each; returns their counts. Those that are there stay."""
    done: list[dict[str, Any]] = []
    with tqdm(total=stream.limit or None, unit=" documents", unit_scale=True, leave=False) as bar:
        for shard in range(stream.shards):
            documents = {name: sum(c["documents"][name] for c in done) for name in SPLITS}
            left = stream.limit - sum(documents.values()) if stream.limit else None
            if left == 0:
                break
            bar.set_description(f"source shard {shard + 1} of {stream.shards}")
            place, part = work / f"{shard:06d}", work / f"{shard:06d}.part"
            if not (place / "counts.json").exists():
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir()
                begun = [name for name in SPLITS if documents[name]]
                ids = encode_all(stream.pieces(shard, left, tokenizer.cuts), tokenizer, workers, begun)
                write_json(part / "counts.json", write_ids(part, watched(ids, bar), tokenizer.vocab_size))
                os.replace(part, place)
            else:
                bar.update(sum(read_json(place / "counts.json")["documents"].values()))
            done.append(read_json(place / "counts.json"))
    return done


def watched(stream: Iterator[tuple[str, np.ndarray, int, int]], bar: tqdm) -> Iterator[tuple[str, np.ndarray, int, int]]:
    """The same, shown on the bar with the tokens of a second."""
    tokens, start = 0, bar.format_dict["elapsed"]
    for item in stream:
        tokens += len(item[1])
        bar.update(item[2])
        bar.set_postfix_str(f"{tokens / max(1e-3, bar.format_dict['elapsed'] - start) / 1e6:.2f} M tokens/s", refresh=False)
        yield item


def plan(out: Path, work: Path, counts: list[dict[str, Any]], tokenizer: Tokenizer, sources: str, settings: dict[str, Any]) -> None:
    """Gather the little validation text of each shard into one split, write meta.json, delete an older version, and write down
    which file goes where: from then on only files are moved."""
    total = {key: {name: sum(c[key][name] for c in counts) for name in SPLITS} for key in ("tokens", "documents", "bytes")}
    for name, n in total["documents"].items():
        if not n:
            raise ValueError(
                f"none of the {sum(total['documents'].values()):,} documents fell to {'training' if name == 'train' else 'validation'}: "
                f"change --val_fraction (now {settings['val_fraction']:g}), or take more documents"
            )
    final = work / "final"
    shutil.rmtree(final, ignore_errors=True)
    final.mkdir()
    writer = ShardWriter(final, "val", tokenizer.vocab_size)
    for path in sorted(work.glob("[0-9]*/val_*.bin")):
        shard = open_shard(path)
        for i in range(0, shard.tokens, 1 << 22):
            writer.write(np.fromfile(path, shard.dtype, min(1 << 22, shard.tokens - i), offset=shard.start + i * shard.dtype.itemsize))
    writer.close()
    write_meta(final, {"dtype": counts[0]["dtype"], **total}, tokenizer, sources, settings)
    train = [p for p in sorted(work.glob("[0-9]*/train_*.bin")) if p.stat().st_size > HEADER]
    moves = {str(p.relative_to(work)): f"train_{i:06d}.bin" for i, p in enumerate(train)}
    last = sorted(final.iterdir(), key=lambda p: (p.name == "meta.json", p.name))
    clear(out)
    write_json(work / "plan.json", moves | {str(p.relative_to(work)): p.name for p in last})


def move(out: Path, work: Path) -> None:
    """Do what the plan says, or the rest of it."""
    for source, target in read_json(work / "plan.json").items():
        if (work / source).exists():
            os.replace(work / source, out / target)
        elif not (out / target).exists():
            raise ValueError(f"{out / target} has disappeared while the corpus was made: delete {work} and run again")
    shutil.rmtree(work)
