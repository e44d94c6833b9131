"""What the tests of preparing share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.documents import Document

ROOT = Path(__file__).resolve().parents[1]
TEXTS = [f"document {i}: " + "你好 naïve 😀\r\nline\n" * (i % 7 + 1) for i in range(300)]


def several(texts=TEXTS):
    return lambda: [Document("", [t]) for t in texts]


def files(folder):
    return {p.name: p.read_bytes() for p in Path(folder).iterdir() if p.is_file() and p.name != ".lock"}


def documents_of(corpus, name):
    """The texts of a split, cut at end-of-text."""
    split = corpus.split(name)
    ids = split.read(0, len(split))
    ends = np.flatnonzero(ids == corpus.tokenizer.eot)
    return [corpus.tokenizer.decode(part[part != corpus.tokenizer.eot]) for part in np.split(ids, ends)]


def fails(capsys, main, *argv):
    """The one line with which a command ends, status 2."""
    with pytest.raises(SystemExit) as e:
        main([str(a) for a in argv])
    out = capsys.readouterr()
    line = out.err.strip().splitlines()[-1]
    assert e.value.code == 2 and "Traceback" not in out.err and line.startswith("error: "), out.err
    return line
