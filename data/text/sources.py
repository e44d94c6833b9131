"""Your files as documents: text, JSON lines, Parquet, standard input; and ready-made ids. One line for what cannot be read."""

from __future__ import annotations

import codecs
import glob
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data.documents import Document
from data.shards import FORMATS, open_shard

CHUNK = 1 << 20


def files(inputs: tuple[str, ...], spool: Path) -> list[tuple[Path, str]]:
    """(path, name for messages) of every file: folders are searched through, globs expanded, "-" is copied into `spool`."""
    found: dict[Path, str] = {}
    for word in inputs:
        path = Path(word)
        if word == "-":
            with open(spool / "stdin", "wb") as f:
                shutil.copyfileobj(sys.stdin.buffer, f)
            paths = [spool / "stdin"]
        elif path.is_dir():
            paths = sorted(p for p in path.rglob("*") if p.is_file() and not any(x.startswith(".") for x in p.relative_to(path).parts))
        elif path.is_file():
            paths = [path]
        else:
            paths = sorted(Path(p) for p in glob.glob(word, recursive=True) if Path(p).is_file())
        if not paths:
            raise ValueError(f"--input {word}: there is no such file, and no folder or pattern with files in it")
        for p in paths:
            found.setdefault(p, "standard input" if word == "-" else str(p))
    return list(found.items())


def documents(paths: list[tuple[Path, str]], kind: str, field: str, encoding: str) -> Iterator[Document]:
    """A document a line of .jsonl, a row of .parquet, any other file; kind "auto" goes by the suffix."""
    for path, name in paths:
        form = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}.get(path.suffix.lower(), "text") if kind == "auto" else kind
        if form == "jsonl":
            yield from (Document("", [text]) for text in json_lines(path, name, field, encoding))
        elif form == "parquet":
            yield from (Document("", [text]) for text in parquet(path, name, field))
        else:
            yield Document("", decoded(path, name, encoding))


def decoded(path: Path, name: str, encoding: str) -> Iterator[str]:
    """The text of a file in chunks, without its byte order mark."""
    decoder, offset = codecs.getincrementaldecoder(encoding)(), 0
    with open(path, "rb") as f:
        if f.read(3) == codecs.BOM_UTF8 and codecs.lookup(encoding).name == "utf-8":
            offset = 3
        f.seek(offset)
        while data := f.read(CHUNK):
            yield decode(decoder, data, offset, name, encoding)
            offset += len(data)
    yield decode(decoder, b"", offset, name, encoding)


def decode(decoder: Any, data: bytes, offset: int, name: str, encoding: str) -> str:
    """The next text of a file; no data: its end."""
    try:
        return decoder.decode(data, not data)
    except UnicodeDecodeError as e:
        at = offset - (len(e.object) - len(data)) + e.start   # the decoder keeps the bytes of a character that is not whole
        raise ValueError(f"{name}: byte {at} is no {encoding} text: give its --encoding, or choose the files with a pattern") from None


def json_lines(path: Path, name: str, field: str, encoding: str) -> Iterator[str]:
    """The named field of every line that is not blank."""
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            try:
                row = json.loads(line.decode("utf-8-sig" if codecs.lookup(encoding).name == "utf-8" else encoding).strip() or "null")
            except UnicodeDecodeError as e:
                raise ValueError(f"{name}, line {number}: byte {f.tell() - len(line) + e.start} is no {encoding} text") from None
            except json.JSONDecodeError as e:
                raise ValueError(f"{name}, line {number} is no JSON: {e.msg}") from None
            if row is None:
                continue
            if not isinstance(row, dict) or not isinstance(row.get(field), str):
                there = ", ".join(k for k, v in row.items() if isinstance(v, str)) if isinstance(row, dict) else ""
                raise ValueError(f"{name}, line {number} has no text in a field {field!r}: give --field (text fields: {there or 'none'})")
            yield row[field].encode("utf-16", "surrogatepass").decode("utf-16", "replace")   # JSON may hold half a character


def parquet(path: Path, name: str, field: str) -> Iterator[str]:
    """The named column, a few rows at a time."""
    try:
        import pyarrow.parquet as pq
        from pyarrow.lib import ArrowInvalid
    except ModuleNotFoundError:
        raise ValueError(f"{name}: reading .parquet needs pyarrow: pip install pyarrow") from None
    try:
        table = pq.ParquetFile(path)
    except ArrowInvalid as e:
        raise ValueError(f"{name} is no Parquet file: {str(e).splitlines()[0]}") from None
    with table:
        if field not in table.schema_arrow.names:
            raise ValueError(f"{name} has no column {field!r}: give --field (columns: {', '.join(table.schema_arrow.names)})")
        groups = range(table.num_row_groups)   # one at a time: iter_batches keeps what it has read until its end
        for batch in (b for i in groups for b in table.iter_batches(batch_size=256, columns=[field], row_groups=[i])):
            for text in batch.column(0).to_pylist():
                if text is not None and not isinstance(text, str):
                    raise ValueError(f"{name}: the column {field!r} holds {type(text).__name__}, not text: give --field")
                if text:
                    yield text


def ids(paths: list[tuple[Path, str]], dtype: str) -> Iterator[np.ndarray]:
    """Ready-made ids in chunks (n,): .npy, .bin (raw integers of `dtype`, or our shards), other files as text."""
    for path, name in paths:
        if path.suffix == ".npy":
            yield from _slices(_load_npy(path, name))
        elif path.suffix == ".bin":
            with open(path, "rb") as f:
                magic = int.from_bytes(f.read(4), "little")
            shard = open_shard(path, None if magic in FORMATS else np.dtype(dtype).newbyteorder("<"))
            for i in range(0, shard.tokens, CHUNK):
                yield np.fromfile(path, shard.dtype, min(CHUNK, shard.tokens - i), offset=shard.start + i * shard.dtype.itemsize)
        else:
            rest = ""
            for chunk in decoded(path, name, "utf-8"):
                text = rest + chunk
                end = max(text.rfind(c) for c in " \n\t\r") + 1   # a number may go on in the next chunk
                yield _integers(text[:end], name)
                rest = text[end:]
            yield _integers(rest, name)


def _load_npy(path: Path, name: str) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError):
        raise ValueError(f"{name} is no array of numbers that numpy.load can read without pickle") from None
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} holds {array.dtype}, not integers")
    return array.reshape(-1)


def _slices(array: np.ndarray) -> Iterator[np.ndarray]:
    for i in range(0, len(array), CHUNK):
        yield np.array(array[i : i + CHUNK])


def _integers(text: str, name: str) -> np.ndarray:
    try:
        return np.array(text.split(), dtype=np.int64)
    except (ValueError, OverflowError) as e:
        raise ValueError(f"{name} is no list of integer ids: {e}") from None
