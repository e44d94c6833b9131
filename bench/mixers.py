"""What every mixer costs as the context grows: time forward and backward, peak memory, state, the next token; all in one run.

    mixer      the whole module, with its products with weights
    itself     the same without the matrices that read or write the residual stream: those give what they gave before, nothing is
               subtracted. What belongs to the mechanism stays in: rotation, gates, mla's expansion, nsa's compression
    full       the rival: F.scaled_dot_product_attention(is_causal=True) alone, the same heads given, in turns with the others
    peak       what one call of the mixer, forward and backward, holds at most above its inputs and weights (all gradients are in it),
               in a process of its own
    state      bytes of init_state after that many tokens
    next       one token to a state of T tokens of random content, which costs what any other content does

One row, 12 heads of 64 with 3 key/value heads, 768 channels; float32, bfloat16 on CUDA; eager.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from config.check import check_fields, check_range
from engine.cli import one_line_errors, parse


@dataclass
class MixersConfig:
    """Cost of the mixers over the context, their exponents of growth, and what a written-out attention matrix takes."""

    words: str | None = None
    """words of `layers`, apart by spaces (None: all, and attention(window=512))"""
    min_T: int = 256
    """shortest context in tokens"""
    max_T: int = 16384
    """longest; 65536 takes an hour on two cores, and --longest=600 for what is quadratic"""
    step: int = 4
    """times as long each context is as the one before"""
    decode_T: int = 65536
    """a state of so many tokens for decoding, beside those above (0: none)"""
    matrix_T: int = 32768
    """longest context whose attention matrix is written out: 2 GB there (0: none)"""
    longest: float = 240.0
    """seconds; a call that would take longer, as the two before have grown, is left out"""
    out: str = "out/bench"
    """folder of mixers.json, brought up to date after every figure, and of mixers.png (with matplotlib)"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps"""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("min_T", "longest"):
            check_range(self, name, above=0)
        check_range(self, "max_T", least=self.min_T)
        check_range(self, "step", least=2)
        check_range(self, "decode_T", least=0)
        check_range(self, "matrix_T", least=0)


if __name__ == "__main__":
    config = parse(MixersConfig)

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from config import GPTConfig
from engine.device import keep_memory, pick_device
from mixers import MIXERS, build, split
from mixers import parse as parse_words
from mixers.mixer import Mixer
from ops.positions import Positions

H, G, D, C = 12, 3, 64, 768
FULL = "full (SDPA)"
OPTIONS = {"sparse": "sparse(pattern='local(128) | strided(128)')"}     # the default pattern is one for a context of 1024
MORE = ["attention(window=512)"]
WITHIN = 4                                                              # exponents are fitted to sizes from the largest down to its quarter
PANELS = {"itself_s": "forward and backward, itself, s", "peak_bytes": "peak memory, bytes", "state_bytes": "state, bytes",
          "decode_s": "the next token, s"}
Row = dict[str, Any]
Calls = dict[str, Callable[[], object]]


class Ratio(NamedTuple):
    """How many times as fast as another a word is, in one of its times at T, and what it should be (None: no goal)."""

    word: str
    time: str
    T: int
    other: str = FULL
    goal: float | None = None


RATIOS = [Ratio("attention(window=512)", "itself_s", 16384, goal=6), Ratio("nsa", "itself_s", 16384, goal=2),
          Ratio("mamba", "itself_s", 16384, goal=1.5), Ratio("mamba2", "itself_s", 16384),
          Ratio("hierarchical", "itself_s", 10_000), Ratio("nsa", "decode_s", 65536, "attention")]


# what is measured

def make(word: str, T: int, device: torch.device, dtype: torch.dtype) -> Mixer:
    cfg = GPTConfig(n_layer=1, n_head=H, n_kv_head=G, n_embd=C, block_size=T, layers=word)
    torch.manual_seed(0)
    return build(cfg)[0].to(device, dtype)


def without_projections(mixer: Mixer) -> list[Tensor]:
    """From now on matrices that read the stream give what they gave at their first call, and `out`, which writes to it, what it
    gets. Returns a list that will hold those given tensors; they take gradients."""
    given: list[Tensor] = []

    def remembered(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        mine: list[Tensor] = []

        def first(x: Tensor) -> Tensor:
            if not mine:
                mine.append(forward(x).detach().requires_grad_())
                given.append(mine[0])
            return mine[0]
        return first

    for name, m in mixer.named_modules():
        if isinstance(m, nn.Linear) and name.rpartition(".")[2] == "out":
            m.forward = lambda y: y  # type: ignore[method-assign,assignment]
        elif isinstance(m, nn.Linear) and m.in_features == C:
            m.forward = remembered(m.forward)  # type: ignore[method-assign,assignment]
    return given


def training(word: str, T: int, device: torch.device, dtype: torch.dtype, itself: bool = False) -> Callable[[], None]:
    """A call that goes forward and backward once."""
    g = torch.Generator(device).manual_seed(0)
    draw = lambda *shape: torch.randn(shape, device=device, dtype=dtype, generator=g)
    if word == FULL:
        q, k, v = leaves = [draw(1, heads, T, D).requires_grad_() for heads in (H, G, G)]
        given: list[Tensor] = []
        forward = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    else:
        mixer = make(word, T, device, dtype)
        given = without_projections(mixer) if itself else []
        x = draw(1, T, C).requires_grad_()
        leaves = [x, *mixer.parameters()]
        forward = lambda: mixer(x, Positions(1, T, device))
    weight = [torch.randn_like(leaves[0])]

    def call() -> None:
        y = forward()
        if weight[0].shape != y.shape:
            weight[0] = torch.randn_like(y)
        y.backward(weight[0])
        for t in (*leaves, *given):
            t.grad = None
    return call


def decoding(word: str, T: int, device: torch.device, dtype: torch.dtype) -> Callable[[], Tensor]:
    """A call that takes one token after T."""
    mixer, x = make(word, T + 1, device, dtype).eval(), torch.randn(1, 1, C, device=device, dtype=dtype)
    state, length = mixer.init_state(1, T + 1, dtype, device), torch.tensor([T], device=device)
    for t in state.values():
        if t.is_floating_point():
            t.normal_()

    @torch.no_grad()
    def call() -> Tensor:
        return mixer(x, Positions(1, 1, device, None, length, T), state)
    return call


def state_bytes(word: str, T: int, dtype: torch.dtype) -> int:
    meta = torch.device("meta")
    return sum(t.numel() * t.element_size() for t in make(word, T, meta, dtype).init_state(1, T, dtype, meta).values())


# time

def timed(call: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
    return time.perf_counter() - start


def in_turns(calls: Calls, device: torch.device, failed: Callable[[str, BaseException], None], least: int = 3, seconds: float = 0.5,
             most: int = 30) -> dict[str, float]:
    """The median time of each, one after the other in every round, so that a machine that slows down slows them all. Each is called
    `least` times and until `seconds` are over, after a first call, which counts only where it takes 5 s or more. What cannot do
    the first is handed to `failed`."""
    times: dict[str, list[float]] = {}
    for name, call in calls.items():
        try:
            s = timed(call, device)
        except (RuntimeError, ValueError, MemoryError) as e:
            failed(name, e)
        else:
            times[name] = [s] if s >= 5 else []
    for _ in range(most):
        for name, t in times.items():
            if len(t) < least or sum(t) < seconds:
                t.append(timed(calls[name], device))
    return {name: median(t) for name, t in times.items()}


# memory

def status(name: str) -> int:
    """Bytes, from Linux' record of this process: VmRSS is what it holds now, VmHWM the most since the record was cleared."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as f:
        return next(1024 * int(line.split()[1]) for line in f if line.startswith(name + ":"))


def cleared() -> bool:
    """Whether VmHWM could be set back to VmRSS."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


@cache
def at_start() -> int:
    """The most that this process has held, at the first time of asking."""
    return most_held()


def most_held() -> int:
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak(call: Callable[[], object], device: torch.device) -> tuple[int | None, float]:
    """What a call holds at most above what was held before, and its seconds. On a CPU to be called in a `child`. Where the record
    cannot be cleared, it is the growth since the child's start, inputs included, for calls that grow."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        s = timed(call, device)
        return torch.cuda.max_memory_allocated(device) - before, s
    if device.type != "cpu":
        return None, timed(call, device)
    if cleared():
        before = status("VmRSS")
        s = timed(call, device)
        return status("VmHWM") - before, s
    before = at_start()
    s = timed(call, device)
    return most_held() - before, s


def start_child(threads: int) -> None:
    """Every block of 128 KB or more goes back to the system when it is freed: nothing that was held before hides a peak."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(threads)
    with contextlib.suppress(OSError, AttributeError):
        M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 1 << 17)
        mallopt(M_TRIM_THRESHOLD, 0)


@contextlib.contextmanager
def child(device: torch.device):
    """run(f, *arguments) in one process of its own, whose death is a MemoryError here; on other devices than a CPU in this one."""
    if device.type != "cpu":
        yield lambda f, *arguments: f(*arguments)
        return
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), start_child, (torch.get_num_threads(),)) as pool:
        def run(f: Callable, *arguments):
            try:
                return pool.submit(f, *arguments).result()
            except BrokenProcessPool:
                raise MemoryError("its process was ended: most likely there is not so much memory") from None
        yield run


@cache
def warm(word: str, device: torch.device, dtype: torch.dtype) -> None:
    """Code pages and libraries' own buffers are in memory from then on."""
    training(word, 64, device, dtype)()
    if device.type == "cpu":
        at_start()


def training_peak(word: str, T: int, device: torch.device, dtype: torch.dtype) -> tuple[int | None, float]:
    warm(word, device, dtype)
    return peak(training(word, T, device, dtype), device)


# the attention matrix

def matrix_call(kind: str, T: int, device: torch.device) -> Callable[[], Tensor]:
    """One head of 64, forward, no mask: kind is matrix or fused. The matrix is float16; on a CPU, whose float16 products are slow,
    256 rows at a time are computed in float32 and kept in it, in its place turned into weights, and read again."""
    half = torch.float16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(1, 1, T, D, device=device, dtype=half) for _ in "qkv")
    if kind == "fused":
        return lambda: F.scaled_dot_product_attention(q, k, v)
    rows = [slice(a, a + 256) for a in range(0, T, 256)]

    def call() -> Tensor:
        s = torch.empty(T, T, device=device, dtype=torch.float16)
        for r in rows:
            s[r] = q[0, 0, r] @ k[0, 0].mT * D**-0.5
        for r in rows:
            s[r] = s[r].float().softmax(-1)
        return torch.cat([s[r].to(half) @ v[0, 0] for r in rows])
    return call


def matrix_peak(kind: str, T: int, device: torch.device) -> int | None:
    matrix_call(kind, 300, device)()
    return peak(matrix_call(kind, T, device), device)[0]


# growth

def exponent(sizes: Iterable[int], values: Iterable[float | None]) -> float | None:
    """b of value = a size^b, least squares in the logarithms of the largest sizes (WITHIN) that have a value; None of fewer than two."""
    there = [(n, v) for n, v in zip(sizes, values) if v]
    points = [(math.log(n), math.log(v)) for n, v in there if n * WITHIN >= there[-1][0]]
    if len(points) < 2:
        return None
    mx, my = (sum(p) / len(points) for p in zip(*points))
    return sum((x - mx) * (y - my) for x, y in points) / sum((x - mx) ** 2 for x, _ in points)


def expected(calls: list[tuple[int, float]], T: int) -> float:
    """Seconds of a call at T by those before it: as the last two grew, but at least in proportion to T, at most to its square."""
    if not calls:
        return 0.0
    last, s = calls[-1]
    grew = exponent(*zip(*calls[-2:]))
    return s * (T / last) ** (2.0 if grew is None else min(2.0, max(1.0, grew)))


def growth(result: Row) -> list[Row]:
    """Exponents a word, over the steps of T."""
    found = []
    for word in result["words"]:
        rows = {r["T"]: r for r in result["rows"] if r["word"] == word and r["T"] in result["sizes"]}
        sizes = sorted(rows)
        found.append({"word": word, **{name: exponent(sizes, [rows[T].get(name) for T in sizes]) for name in PANELS}})
    return found


def ratios(result: Row) -> list[Row]:
    """RATIOS, where both sides were measured; else why not."""
    values = {(r["word"], r["T"]): r for r in result["rows"]}
    found = []
    for word, name, T, other, goal in RATIOS:
        mine, theirs = (values.get((w, T), {}).get(name) for w in (word, other))
        why = "" if mine and theirs else next((f"{w!r} was not measured" for w, s in ((word, mine), (other, theirs)) if not s))
        found.append({"word": word, "time": name, "T": T, "other": other, "goal": goal, "ratio": theirs / mine if not why else None,
                      "why": f"there is no mixer {word!r}" if word.partition("(")[0] not in MIXERS else why})
    return found


# the run

def default_words() -> list[str]:
    return [OPTIONS.get(name, name) for name in MIXERS] + MORE


class Run:
    """The figures so far, in `result` and in the file."""

    def __init__(self, config: MixersConfig, words: list[str], device: torch.device):
        self.config, self.device, self.dtype = config, device, torch.bfloat16 if device.type == "cuda" else torch.float32
        self.sizes = [config.min_T]
        while self.sizes[-1] * config.step <= config.max_T:
            self.sizes.append(self.sizes[-1] * config.step)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, {torch.get_num_threads()} threads"
        self.result: Row = {"device": name, "torch": torch.__version__, "dtype": str(self.dtype)[6:], "sizes": self.sizes,
                            "words": [FULL, *words], "rows": [], "matrix": [], "left_out": []}
        there = {FULL, *words}
        self.extra = {r.T: {r.word, r.other} for r in RATIOS if r.time == "itself_s" and r.T not in self.sizes
                      and config.min_T <= r.T <= config.max_T and {r.word, r.other} <= there}
        self.decoded = [*self.sizes, config.decode_T] if config.decode_T and config.decode_T not in self.sizes else self.sizes
        self.matrices = [512 * 2**i for i in range(9) if 512 * 2**i <= config.matrix_T]

    def words(self, T: int) -> list[str]:
        return [w for w in self.result["words"] if T not in self.extra or w in self.extra[T]]

    def put(self, word: str, T: int, **values) -> None:
        rows = self.result["rows"]
        row = next((r for r in rows if (r["word"], r["T"]) == (word, T)), None)
        if row is None:
            rows.append(row := {"word": word, "T": T})
        row |= values
        self.save()

    def save(self) -> None:
        path = Path(self.config.out) / "mixers.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(self.result), encoding="utf-8")
        new.replace(path)

    def leave_out(self, word: str, T: int, why: str) -> None:
        self.result["left_out"].append({"word": word, "T": T, "why": why})
        self.save()

    def failed(self, T: int, word: str, e: BaseException) -> None:
        self.leave_out(word, T, f"{type(e).__name__}: {(str(e).strip().splitlines() or [''])[0][:200]}")

    def alone(self, bar: tqdm) -> None:
        """Every word by itself, one call at each T: the peak, and what does not fit or takes too long."""
        for word in self.result["words"]:
            with child(self.device) as run:
                calls: list[tuple[int, float]] = []               # T, and the seconds of a call
                for T in sorted([*self.sizes, *self.extra]):
                    bar.set_description(f"memory {word[:24]} {T}")
                    bar.update()
                    if word not in self.words(T):
                        continue
                    if (s := expected(calls, T)) > self.config.longest:
                        self.leave_out(word, T, f"about {s:.0f} s a call (--longest)")
                        continue
                    try:
                        held, s = run(training_peak, word, T, self.device, self.dtype)
                    except (RuntimeError, ValueError, MemoryError) as e:
                        self.failed(T, word, e)
                        break
                    calls.append((T, s))
                    self.put(word, T, peak_bytes=held)

    def times(self, bar: tqdm) -> None:
        """Forward and backward: at each T all words that came through, in turns."""
        for T in sorted([*self.sizes, *self.extra]):
            bar.set_description(f"time {T}")
            there = [r["word"] for r in self.result["rows"] if r["T"] == T and "peak_bytes" in r]
            for name, least in (("itself_s", 3), ("mixer_s", 1)):      # ratios are of the first
                calls: Calls = {w: training(w, T, self.device, self.dtype, itself=least == 3) for w in there if least == 3 or w != FULL}
                for word, s in in_turns(calls, self.device, partial(self.failed, T), least=least).items():
                    self.put(word, T, **{name: s})
            bar.update()

    def decode(self, bar: tqdm) -> None:
        for T in self.decoded:
            bar.set_description(f"decoding {T}")
            calls: Calls = {}
            for word in self.result["words"][1:]:
                try:
                    self.put(word, T, state_bytes=state_bytes(word, T, self.dtype))
                    calls[word] = decoding(word, T, self.device, self.dtype)
                except (RuntimeError, ValueError, MemoryError) as e:
                    self.failed(T, word, e)
            for word, s in in_turns(calls, self.device, partial(self.failed, T), least=20, seconds=0.1, most=50).items():
                self.put(word, T, decode_s=s)
            bar.update()

    def matrix(self, bar: tqdm) -> None:
        with child(self.device) as run:
            for T in self.matrices:
                bar.set_description(f"matrix {T}")
                row: Row = {"T": T, "matrix_bytes": 2 * T * T}
                try:
                    row |= {f"{kind}_peak": run(matrix_peak, kind, T, self.device) for kind in ("matrix", "fused")}
                    calls: Calls = {kind: matrix_call(kind, T, self.device) for kind in ("matrix", "fused")}
                    row |= {f"{kind}_s": s for kind, s in in_turns(calls, self.device, partial(self.failed, T)).items()}
                except (RuntimeError, MemoryError) as e:
                    self.failed(T, "matrix", e)
                self.result["matrix"].append(row)
                self.save()
                bar.update()

    def all(self) -> Row:
        total = len(self.result["words"]) * len([*self.sizes, *self.extra]) + len([*self.sizes, *self.extra]) + len(self.decoded)
        try:
            with tqdm(total=total + len(self.matrices), leave=False) as bar:
                for part in (self.decode, self.matrix, self.alone, self.times):
                    part(bar)
        except KeyboardInterrupt:
            self.result["stopped"] = True
            print("stopped; so far:", file=sys.stderr)
        self.result |= {"growth": growth(self.result), "ratios": ratios(self.result)}
        self.save()
        return self.result


# what is shown

def number(value: float | None, unit: float, width: int, digits: int = 1) -> str:
    return f"{'-' if value is None else f'{value / unit:,.{digits}f}':>{width}}"


def report(result: Row) -> str:
    """The tables."""
    ms, MiB, wide = 1e-3, 2**20, max(len(w) for w in result["words"])
    full = {r["T"]: r.get("itself_s") for r in result["rows"] if r["word"] == FULL}
    shape, machine = f"one row, {H} heads of {D}, {G} key/value heads, {C} channels", f"{result['device']}, torch {result['torch']}"
    lines = [f"{shape}; {result['dtype']}, {machine}",
             "forward and backward: the mixer, and itself without the projections from and to the stream; full is attention given q, k, v;",
             "peak: the most that a call of the mixer holds above its inputs; state of T tokens; the next token after T", "",
             f"{'':{wide}} {'T':>7} {'mixer ms':>10} {'itself ms':>10} {'full/this':>10} {'peak MiB':>10} {'state MiB':>9} {'next ms':>8}"]
    for word in result["words"]:
        for r in sorted((r for r in result["rows"] if r["word"] == word), key=lambda r: r["T"]):
            own, theirs = r.get("itself_s"), full.get(r["T"])
            lines.append(f"{word:{wide}} {r['T']:7,} {number(r.get('mixer_s'), ms, 10)} {number(own, ms, 10)} "
                         f"{number(theirs / own if own and theirs else None, 1, 10, 2)} {number(r.get('peak_bytes'), MiB, 10)} "
                         f"{number(r.get('state_bytes'), MiB, 9, 2)} {number(r.get('decode_s'), ms, 8, 2)}")
    lines += [f"left out: {r['word']} at {r['T']:,}: {r['why']}" for r in result["left_out"]]
    fitted = ", ".join(f"{T:,}" for T in result["sizes"] if max(result["sizes"]) <= T * WITHIN)
    lines += ["", f"exponents of growth over T = {fitted}: 1 is linear, 2 quadratic",
              f"{'':{wide}} {'itself':>7} {'peak':>7} {'state':>7} {'next':>7}"]
    lines += [f"{r['word']:{wide}} " + " ".join(number(r[name], 1, 7, 2) for name in PANELS) for r in result["growth"]]
    if result["matrix"]:
        lines += ["", f"one head of {D}, forward, by a T x T matrix in float16 and by the fused kernel, without one; peaks above q, k, v",
                  f"{'T':>9} {'matrix MiB':>12} {'peak MiB':>10} {'ms':>9} {'fused MiB':>10} {'ms':>9}"]
        lines += [f"{r['T']:9,} {number(r['matrix_bytes'], MiB, 12)} "
                  + " ".join(f"{number(r.get(k + '_peak'), MiB, 10)} {number(r.get(k + '_s'), ms, 9)}" for k in ("matrix", "fused"))
                  for r in result["matrix"]]
        lines += [f"{131072:9,} {number(2 * 131072**2, MiB, 12)}   by arithmetic"]
    lines.append("")
    for r in result["ratios"]:
        said = f"{r['word']} against {r['other']}, {'the next token' if r['time'] == 'decode_s' else 'itself'} at {r['T']:,}:"
        goal = "no goal" if r["goal"] is None else f"goal {r['goal']:g}: {'reached' if (r['ratio'] or 0) >= r['goal'] else 'missed'}"
        lines.append(f"{said} {r['ratio']:.2f} times as fast ({goal})" if r["ratio"] else f"{said} skipped, {r['why']}")
    return "\n".join(lines)


def draw(result: Row, path: Path) -> None:
    """Time, memory, state and decoding over T, both axes logarithmic."""
    from matplotlib.figure import Figure
    slopes = {r["word"]: r for r in result["growth"]}
    figure = Figure(figsize=(13, 10), layout="constrained")
    for ax, (name, title) in zip(figure.subplots(2, 2).flat, PANELS.items()):
        for i, word in enumerate(result["words"]):
            points = sorted((r["T"], r[name]) for r in result["rows"] if r["word"] == word and r.get(name))
            if points:
                b = slopes[word][name]
                style = dict(color="black", linestyle="--") if word == FULL else dict(color=f"C{i % 10}")
                ax.loglog(*zip(*points), marker=".", label=word + ("" if b is None else f"   T^{b:.2f}"), **style)
        ax.set(title=title, xlabel="T")
        ax.set_xscale("log", base=2)
        ax.grid(True, alpha=0.3)
        ax.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main(config: MixersConfig) -> Row:
    keep_memory()
    device = pick_device(config.device)
    words = default_words() if config.words is None else list(dict.fromkeys(split(config.words)))
    parse_words(" ".join(words))
    result = Run(config, words, device).all()
    print(report(result))
    if find_spec("matplotlib"):
        draw(result, Path(config.out) / "mixers.png")
    else:
        print("no picture: pip install matplotlib", file=sys.stderr)
    print(f"{config.out}/mixers.json")
    return result


if __name__ == "__main__":
    with one_line_errors():
        if main(config).get("stopped"):
            raise SystemExit(130)
