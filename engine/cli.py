"""The command line: `script.py [preset.py ...] --flag value ...` into a typed dataclass. Needs no torch.

tyro reads the flags and writes --help; this file adds presets, booleans spelled any usual way, and errors of one line.
"""

from __future__ import annotations
import __future__

import contextlib
import io
import os
import re
import runpy
import sys
import types
from difflib import get_close_matches
from importlib import metadata
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import tyro

from config.check import coerce, nearest

T = TypeVar("T")
Repeated = Annotated[tuple[T, ...], tyro.conf.UseAppendAction]   # a flag that may be given several times
ROOT = Path(__file__).resolve().parent.parent
TORCH = (2, 11)
BOOLEANS = {**dict.fromkeys(("true", "yes", "on", "1"), "True"), **dict.fromkeys(("false", "no", "off", "0"), "False")}


def as_utf8(text: str) -> str:
    """Text from the command line, which is UTF-8 whatever the locale made of it."""
    return os.fsencode(text).decode("utf-8", "replace") if any("\udc80" <= c <= "\udcff" for c in text) else text


def fail(message: object) -> NoReturn:
    """One line on stderr, exit status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


@contextlib.contextmanager
def one_line_errors():
    """What a user can put right (a wrong value, a missing file or package, a full disk or memory) ends as one line, without a
    traceback; so does Ctrl-C."""
    try:
        yield
    except BrokenPipeError:                    # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(0) from None
    except (ValueError, OSError, ModuleNotFoundError) as e:
        fail(e)
    except RuntimeError as e:
        if "out of memory" not in str(e).lower() and "not enough memory" not in str(e).lower():
            raise
        fail("out of memory: lower --batch_size (and raise --gradient_accumulation_steps as much), lower --block_size, or with a large "
             "vocabulary hold fewer logits at once: --loss_chunk=4096")
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def require_torch() -> None:
    """ValueError unless torch is there and new enough; asks the package index's record, without importing it."""
    if "torch" in sys.modules:
        found = sys.modules["torch"].__version__
    else:
        try:
            found = metadata.version("torch")
        except metadata.PackageNotFoundError:
            raise ValueError("torch is not installed: pip install -r requirements.txt") from None
    if tuple(int(n) for n in re.findall(r"\d+", found)[:2]) < TORCH:
        raise ValueError(f"needs torch {'.'.join(map(str, TORCH))} or newer, found {found}: pip install -r requirements.txt")


def parse(cls: type[T], argv: list[str] | None = None, prog: str | None = None, presets: bool = False) -> T:
    """Defaults, then presets (where the script takes them), then flags. A mistake is one line and exit status 2.

    Where it takes presets and has an `out_dir` that nothing sets, that becomes out/<the last preset's name>.
    """
    for stream in (sys.stdout, sys.stderr):    # a path or a text that the locale cannot show must not end a run
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # Before torch is imported: how long a thread of its OpenMP waits awake for the others. Beside one busy process on two cores the
    # demo trains at 800 tokens/s with the library's own setting, at 4,200 with this (passive: 15,000, but 14,500 alone); alone at
    # 25,000 with either.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    prog = prog or Path(sys.argv[0]).name
    hints = get_type_hints(cls)
    with one_line_errors():
        require_torch()
        words, flags = split(sys.argv[1:] if argv is None else argv, hints)
        if words and not presets:
            raise ValueError(f"unexpected {words[0]!r}: options are written --name=value; see --help")
        settings: dict[str, Any] = {}
        for word in words:
            settings |= read_preset(word, hints)
        config = run_tyro(cls, flags, f"{prog} [PRESET ...]" if presets else prog, cls(**settings))
    if presets and "out_dir" in hints and getattr(config, "out_dir") is None:  # noqa: B009 - cls is any dataclass
        config.out_dir = f"out/{Path(words[-1]).stem if words else 'default'}"  # type: ignore[attr-defined]
    return config


def split(argv: list[str], hints: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Presets, and flags as --name=value. `--flag`, `--no-flag`, and yes/no/on/off/1/0 become True and False; a flag that may be given
    several times takes all the values that follow it."""
    words, flags, rest = [], [], list(argv)
    while rest:
        arg = rest.pop(0)
        name, equals, value = arg.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if not arg.startswith("-"):
            words.append(arg)
            continue
        if arg in ("-h", "--help"):
            flags.append("--help")
            continue
        if name.startswith("no_") and name not in hints and is_boolean(hints.get(name[3:])):
            name, equals, value = name[3:], "=", "False"
        if name not in hints or not arg.startswith("--"):
            near = get_close_matches(name, hints, 1, 0.5)
            raise ValueError(f"unknown flag {arg}" + (f": did you mean --{near[0]}?" if near else "; --help lists them"))
        if not equals:
            bare = is_boolean(hints[name]) and (not rest or rest[0].startswith("-") or rest[0].endswith(".py"))
            if not bare and not rest:
                raise ValueError(f"{arg} needs a value")
            value = "True" if bare else rest.pop(0)
        if is_boolean(hints[name]):
            value = BOOLEANS.get(value.lower(), value)
        if value.lower() == "none" and type(None) in get_args(hints[name]) and str not in get_args(hints[name]):
            value = "None"
        flags.append(f"--{name}={value}")
        while get_origin(hints[name]) is tuple and rest and not rest[0].startswith("-") and not rest[0].endswith(".py"):
            flags.append(f"--{name}={rest.pop(0)}")
    return words, flags


def is_boolean(hint: Any) -> bool:
    return hint is bool or bool in get_args(hint)


def read_preset(word: str, hints: dict[str, Any]) -> dict[str, Any]:
    """The assignments of a preset: a path, or the bare name of one in config/. Names with _ and imports are its own."""
    presets = [p for p in sorted((ROOT / "config").glob("*.py")) if p.stem not in ("__init__", "check")]
    path = next((p for p in (Path(word), ROOT / word, *(p for p in presets if p.stem == word)) if p.is_file()), None)
    if path is None:
        known = [f"config/{p.name}" for p in presets]
        raise ValueError(f"no preset {word!r}{nearest(word, known)}")
    try:
        values = runpy.run_path(str(path))
    except Exception as e:
        raise ValueError(f"{word} does not run: {type(e).__name__}: {e}") from None
    its = (types.ModuleType, __future__._Feature, type, types.FunctionType)     # what it imported or defined for itself
    own = {k: v for k, v in values.items() if not (k.startswith("_") or isinstance(v, its))}
    for name in own:
        if name not in hints:
            raise ValueError(f"{word}: unknown key {name!r}{nearest(name, hints).partition(';')[0]}")
        own[name] = coerce(own[name], hints[name], f"{word}: {name}")
    return own


def run_tyro(cls: type[T], flags: list[str], prog: str, default: T) -> T:
    """tyro, its boxed errors made one line."""
    if "--help" in flags:
        flags = ["--help"]
    boxed = io.StringIO()
    try:
        with contextlib.redirect_stderr(boxed):
            return tyro.cli(cls, args=flags, prog=prog, default=default, use_underscores=True,
                            config=(tyro.conf.FlagConversionOff,))
    except SystemExit as e:
        if not e.code:
            raise
    lines = [line.strip("│╭╮╰╯─-| ") for line in boxed.getvalue().splitlines()][1:]     # the first is the box's title
    words = " ".join(takewhile(bool, dropwhile(lambda line: not line, lines)))
    words = re.sub(r"^Error parsing ([A-Z]\w+: )?", "", words)
    fail(re.sub(r"(invalid literal for (int)\(\) with base 10|could not convert string to (float)): (.*)", r"\4 is no \2\3", words))
