"""`find("shakespeare")`: the prepared corpus of a name or a path, prepared now if that needs no download."""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path
from typing import get_args

from data import published
from data.shards import Corpus
from data.tokenizer import Kind, Published

DATA = Path(__file__).resolve().parent


def find(dataset: str) -> Corpus:
    """A name under data/ (`shakespeare`, `shakespeare_bpe`) or the path of a prepared folder.

    ValueError, with the command to run, if it is not prepared and cannot be prepared without a download.
    """
    folder, path = DATA / dataset, Path(dataset)
    if not is_name(dataset) or (path.is_dir() and not folder.is_dir()):
        folder = path
    try:
        return Corpus(folder)
    except FileNotFoundError as e:
        missing = str(e)
    kinds = [k for k in get_args(Kind) if dataset.endswith(f"_{k}") and has_script(dataset.removesuffix(f"_{k}"))]
    stem, kind = (dataset.removesuffix(f"_{kinds[0]}"), kinds[0]) if kinds else (dataset, "")
    if not has_script(stem):
        if dataset and folder.is_dir():
            raise ValueError(missing)
        raise ValueError(f"there is no corpus {dataset!r}{nearest(dataset)}; for your own text: python -m data.text.prepare --input FILE")
    module = importlib.import_module(f"data.{stem}.prepare")
    if not module.offline() or (kind in get_args(Published) and not published.present(kind)):
        flags = (f" --tokenizer {kind}" if kind else "") + (" --input FILE" if stem == "text" else "")
        raise ValueError(f"the corpus {dataset!r} is not prepared: run python -m data.{stem}.prepare{flags}")
    print(f"preparing the corpus {dataset!r}")
    options = module.Options(out=str(folder), **({"tokenizer": kind} if kind else {}))
    return Corpus(module.prepare(options))


def is_name(dataset: str) -> bool:
    return bool(dataset) and Path(dataset).name == dataset


def has_script(name: str) -> bool:
    return name.isidentifier() and (DATA / name / "prepare.py").exists()


def nearest(dataset: str) -> str:
    """A hint at the corpora there are."""
    names = sorted({p.parent.name for pattern in ("*/prepare.py", "*/meta.json") for p in DATA.glob(pattern)})
    close = difflib.get_close_matches(dataset, names, 1)
    return f"; did you mean {close[0]!r}?" if close else f" (there are {', '.join(names)})"
