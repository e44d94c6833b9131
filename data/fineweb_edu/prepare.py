"""Prepare FineWeb-Edu from the Hugging Face Hub: `python -m data.fineweb_edu.prepare`, or `python data/fineweb_edu/prepare.py`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0:0] = [str(Path(__file__).resolve().parents[2])]   # when run by its path

from data import hub

REPOSITORY = hub.Repository("fineweb_edu", "HuggingFaceFW/fineweb-edu", "ODC-By 1.0", tokens=10e9, config="sample-10BT")


@dataclass
class Options(hub.Options):
    """Prepare FineWeb-Edu (HuggingFaceFW/fineweb-edu), 9.7 million educational web pages, the sample of 10 billion tokens.

    Licence: ODC-By 1.0. Streams about 29 GB, once.
    Disk: 20 GB with gpt2 or bpe, twice that with cl100k_base or o200k_base, and twice that while an older version is replaced.
    Memory: 400 MB and 40 MB a worker. A run that was stopped goes on after the last whole source shard.
    """


def offline() -> bool:
    """Whether this needs no download: never."""
    return False


def prepare(options: Options) -> Path:
    """Prepare as the options say; returns the folder."""
    return hub.prepare(REPOSITORY, options)


def main(argv: list[str] | None = None) -> None:
    hub.main(REPOSITORY, Options, argv)


if __name__ == "__main__":
    main()
