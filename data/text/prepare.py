"""Prepare your own text: `python -m data.text.prepare --input FILE ...`, or `python data/text/prepare.py`.

Files, folders, patterns, or "-" for standard input; .jsonl is a document a line, .parquet a document a row, any other
file one document; --ids for ready-made token ids. Memory: about 200 MB and 40 MB a worker, whatever the size of the
input (the longest line of .jsonl must fit). Disk: 2 bytes a token (4 above 65,536 tokens of vocabulary), for BPE about
0.6 bytes for a byte of English text, twice that while an older version is replaced; standard input is copied first.
"""

from __future__ import annotations

import codecs
import hashlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

if __name__ == "__main__":
    sys.path[0:0] = [str(Path(__file__).resolve().parents[2])]   # when run by its path

from data.build import DATA, FORMAT, SPLITS, build, describe, install, prepared, workplace, write
from data.documents import Document
from data.text import sources
from data.tokenizer import Ids, Kind
from engine.cli import Repeated, one_line_errors, parse


@dataclass
class Options:
    """Prepare your own text, or ready-made ids.

    Memory: about 200 MB and 40 MB a worker, whatever the size of the input. Disk: 2 bytes a token (4 above 65,536 tokens
    of vocabulary), with BPE about 0.6 bytes for a byte of English; twice that while an older version is replaced.
    """

    input: Repeated[str] = ()
    """files, folders, patterns such as 'books/**/*.txt', or - for standard input"""
    name: str | None = None
    """name of the corpus: it is written to data/<name>; by default text, or text_<tokenizer> for another tokenizer than bpe"""
    tokenizer: Kind = "bpe"
    """characters, bytes, byte-pair encoding learned from the training part, or a published one"""
    vocab_size: int | None = None
    """tokens of the BPE, end-of-text included (4096); with --ids the number of ids (the greatest + 1)"""
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    """what the files are; auto goes by their suffix"""
    field: str = "text"
    """field of .jsonl or column of .parquet that holds the text"""
    encoding: str = "utf-8"
    """how text files are encoded"""
    ids: bool = False
    """the input is token ids: .npy, .bin of --ids_dtype, or text with integers"""
    ids_dtype: Literal["uint16", "uint32"] = "uint16"
    """type of the ids in .bin files without a header"""
    val_fraction: float = 0.05
    """share for validation: documents chosen by a hash of their text, or the end of a single one"""
    out: str | None = None
    """folder to write instead of data/<name>"""
    workers: int = 0
    """threads that encode, 0 for all cores; the files are the same for any number"""


def offline() -> bool:
    """Whether this can be prepared unasked: no, it takes --input."""
    return False


def prepare(options: Options) -> Path:
    """Prepare as the options say; returns the folder. ValueError for input that cannot be used."""
    if not options.input:
        raise ValueError("give --input: files, folders, patterns, or - for standard input")
    try:
        codecs.lookup(options.encoding)
        "".encode(options.encoding)        # refuses codecs that are no text encodings, such as base64
    except LookupError:
        raise ValueError(f"--encoding={options.encoding}: there is no such encoding; utf-8, utf-16, latin-1 and cp1252 are usual") from None
    default = "text" if options.ids or options.tokenizer == "bpe" else f"text_{options.tokenizer}"
    out = Path(options.out or DATA / (options.name or default))
    with tempfile.TemporaryDirectory() as spool:
        paths = sources.files(options.input, Path(spool))
        if options.ids:
            return prepare_ids(out, paths, options)

        def documents() -> Iterator[Document]:
            return sources.documents(paths, options.format, options.field, options.encoding)

        return build(out, documents, options.tokenizer, options.vocab_size or 4096, options.val_fraction, options.workers)


def prepare_ids(out: Path, paths: list[tuple[Path, str]], options: Options) -> Path:
    """All files as one sequence of ids, its end for validation."""
    if not 0 < options.val_fraction < 1:
        raise ValueError(f"val_fraction={options.val_fraction}: it must lie between 0 and 1")
    whole, count, top = hashlib.sha256(), 0, -1
    for ids in sources.ids(paths, options.ids_dtype):
        if len(ids) and ids.min() < 0:
            raise ValueError(f"token id {ids.min()} is negative: ids go from 0 on")
        whole.update(ids.astype("<i8").tobytes())
        count, top = count + len(ids), max(top, int(ids.max()) if len(ids) else -1)
    if not count:
        raise ValueError("there are no ids in the input: nothing to prepare")
    if options.vocab_size is not None and top >= options.vocab_size:
        raise ValueError(f"token id {top} is outside the vocabulary of {options.vocab_size}: --vocab_size must be at least {top + 1}")
    tokenizer = Ids(options.vocab_size or top + 1)
    train = int(count * (1 - options.val_fraction))

    def stream() -> Iterator[tuple[str, np.ndarray, int, int]]:
        done = 0
        for ids in sources.ids(paths, options.ids_dtype):
            for name, part in zip(SPLITS, np.split(ids, [max(0, train - done)])):
                yield name, part, 0, 0
            done += len(ids)

    settings = {"format": FORMAT, "tokenizer": "ids", "vocab_size": tokenizer.vocab_size, "val_fraction": options.val_fraction}
    with workplace(out) as place:
        if not prepared(out, whole.hexdigest(), settings):
            meta = write(place, stream(), tokenizer, whole.hexdigest(), settings)
            install(place, out)
            print(f"prepared: {describe(out, meta)}")
    return out


def spread(argv: list[str]) -> list[str]:
    """`--input a b` as `--input=a --input=b`, which is what a shell makes of `--input *.txt`."""
    out: list[str] = []
    inputs = False
    for word in argv:
        if word == "--input":
            inputs = True
        elif inputs and (word == "-" or not word.startswith("-")):
            out.append(f"--input={word}")
        else:
            inputs = word.startswith("--input=")
            out.append(word)
    return out


def main(argv: list[str] | None = None) -> None:
    with one_line_errors():
        prepare(parse(Options, spread(sys.argv[1:] if argv is None else argv), prog="python -m data.text.prepare"))


if __name__ == "__main__":
    main()
