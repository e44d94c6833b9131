"""Prepare ClimbMix from the Hugging Face Hub: `python -m data.climbmix.prepare`, or `python data/climbmix/prepare.py`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0:0] = [str(Path(__file__).resolve().parents[2])]   # when run by its path

from data import hub

REPOSITORY = hub.Repository("climbmix", "karpathy/climbmix-400b-shuffle", "CC BY-NC 4.0: NON-COMMERCIAL use only", tokens=400e9)


@dataclass
class Options(hub.Options):
    """Prepare ClimbMix (karpathy/climbmix-400b-shuffle), 400 billion tokens of the web, clustered and mixed for small models.

    Licence: CC BY-NC 4.0: NON-COMMERCIAL use only. Streams about 650 GB, once. All of it is much: give --limit.
    Disk: 800 GB with gpt2 or bpe, twice that with cl100k_base or o200k_base, and twice that while an older version is replaced.
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
