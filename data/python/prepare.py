"""Prepare the standard library of this Python as a corpus: `python -m data.python.prepare`, or by its path.

About 11 MB of source, without tests; nothing is downloaded. Another version of Python has other files.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0:0] = [str(Path(__file__).resolve().parents[2])]   # when run by its path

from data.build import DATA, build
from data.documents import Document
from data.tokenizer import Kind
from engine.cli import one_line_errors, parse

WITHOUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}


@dataclass
class Options:
    """Prepare the standard library of this Python (about 11 MB of source; 300 MB of memory, 10 MB of disk)."""

    tokenizer: Kind = "bpe"
    """characters, bytes, byte-pair encoding learned from the training files, or a published one"""
    vocab_size: int = 4096
    """tokens of the BPE, end-of-text included"""
    val_fraction: float = 0.05
    """share of the files for validation, chosen by a hash of their path"""
    out: str | None = None
    """folder to write; by default data/python, or data/python_<tokenizer> for another tokenizer than bpe"""
    workers: int = 0
    """threads that encode, 0 for all cores; the files are the same for any number"""


def offline() -> bool:
    """Whether this needs no download: always."""
    return True


def documents(root: Path | None = None) -> Iterator[Document]:
    """Each source file, sorted by its path in the library; files that are no UTF-8 are left out."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    paths = {p.relative_to(root).as_posix(): p for p in root.rglob("*.py") if not WITHOUT & set(p.relative_to(root).parts)}
    for name in sorted(paths):
        try:
            yield Document(name, [paths[name].read_bytes().decode("utf-8")])
        except (UnicodeDecodeError, OSError):
            continue


def prepare(options: Options) -> Path:
    """Prepare as the options say; returns the folder."""
    out = options.out or DATA / ("python" if options.tokenizer == "bpe" else f"python_{options.tokenizer}")
    return build(out, documents, options.tokenizer, options.vocab_size, options.val_fraction, options.workers)


def main(argv: list[str] | None = None) -> None:
    with one_line_errors():
        prepare(parse(Options, argv, prog="python -m data.python.prepare"))


if __name__ == "__main__":
    main()
