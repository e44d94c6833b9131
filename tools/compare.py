"""Compares ways of mixing tokens: equal parameters, the same data in the same order, a sweep of learning rates each, one table.

`python -m tools.compare --layers attention "attention(window=64)" mla --params 5M --tokens 2M`. The model around the mixer, the optimizer
and the corpus are config/python_code.py's unless presets and flags of train.py say otherwise.

Equal parameters: all are counted, embedding and head too, a tied matrix once. Depth, vocabulary and number of heads are fixed (with
--head_dim the width of a head); n_embd is the multiple of 8 n_head (of head_dim) at which the feed-forward, which makes up the rest, is
nearest to its usual share. The learning rates are tried with the first seed; the one with the lowest loss gets the other seeds. Muon's
rate and the last one go along in the preset's proportion.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from config import TrainConfig
from config.check import check_range
from engine.cli import Repeated, one_line_errors, parse


@dataclass
class CompareConfig(TrainConfig):
    """Trains each pattern of layers at equal parameters on the same data and reports loss, speed, memory and recall. Stopped, the same
    command goes on. It has train.py's settings, but chooses eval_interval, log_interval, patience and init_from itself."""

    layers: Repeated[str] = ()  # type: ignore[assignment]
    """patterns of layers to compare, one after the other"""
    params: str | None = None
    """parameters of each, for example 10M (None: as many as the first has at n_embd)"""
    tokens: str | None = None
    """tokens of each run, for example 20M (None: max_iters steps)"""
    minutes: float | None = None
    """instead of tokens: minutes of training of each run, by its speed measured before; the learning rate's course fits into them"""
    learning_rates: Repeated[float] = ()
    """to try with each (none: 1e-3 3e-3 6e-3)"""
    seeds: int = 1
    """runs of each at its best learning rate: seed, seed + 1, ..."""
    evals: int = 10
    """evaluations of a run, on eval_iters micro-batches; the loss that is reported is of the whole validation split"""
    contexts: Repeated[int] = ()
    """tokens before the next one, whose speed and state are measured (none: 256 1024 4096)"""
    probes: bool = False
    """all of tools.probes, not only recall (MQAR)"""
    probe_steps: int = 480
    """of the small model that is trained on each probe, at most (0: no probes)"""
    keep: bool = False
    """keep the checkpoints of finished runs"""
    out_dir: str | None = "out/compare"
    """folder of compare.html, compare.json, compare.png, and of the runs"""
    eval_iters: int = 20
    """micro-batches of each evaluation on the way (0: the whole validation split)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("minutes", "seeds", "evals"):
            check_range(self, name, above=0)
        check_range(self, "probe_steps", least=0)
        if self.tokens and self.minutes:
            raise ValueError("give --tokens or --minutes, not both")
        for name in ("params", "tokens"):
            if (text := getattr(self, name)) is not None:
                amount(text, name)
        self.layers = tuple(dict.fromkeys(self.layers))
        if any(n <= 0 for n in (*self.learning_rates, *self.contexts)):
            raise ValueError("learning_rates and contexts must be above 0")


def amount(text: str, name: str) -> int:
    """10M, 124k, 1.5G, 2_000_000 or 1e7 as a number."""
    found = re.fullmatch(r"([\d_]*\.?\d+(?:e\d+)?)\s*([kMGB]?)", text)
    n = round(float(found[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}[found[2]]) if found else 0
    if n < 1:
        raise ValueError(f"{name}={text!r} is no amount: write for example 10M, 500k or 2000000")
    return n


def read(argv: list[str]) -> CompareConfig:
    """Presets and flags on top of config/python_code.py."""
    return parse(CompareConfig, ["config/python_code.py", *argv], presets=True)


if __name__ == "__main__":
    config = read(sys.argv[1:])

import multiprocessing

import torch

from config import GPTConfig
from data.mixture import Mixture
from engine.checkpoint import find_step, load_model
from engine.device import keep_memory, pick_device
from engine.log import count, duration, old_lines, say
from eval import EvalConfig, evaluate
from mixers import pattern
from model import GPT
from tools.probes import PROBES, ProbesConfig, learn
from tools.report import draw, page, report, show
from train import train

Row = dict[str, Any]
RATES, CONTEXTS = (1e-3, 3e-3, 6e-3), (256, 1024, 4096)
STEPS = 20                                # of the measurement of speed
AGREE = 0.02                              # by which parameters may differ
CAUGHT = (ValueError, OSError, ModuleNotFoundError, MemoryError)


# equal parameters

def meta(cfg: GPTConfig) -> GPT:
    """The model without its memory, where its mixers can be made so."""
    try:
        with torch.device("meta"):
            return GPT(cfg)
    except (RuntimeError, NotImplementedError):
        return GPT(cfg)


def parameters(cfg: GPTConfig) -> int:
    """All, a tied matrix once."""
    return sum(p.numel() for p in meta(cfg).parameters())


def solve(cfg: GPTConfig, target: int) -> GPTConfig:
    """`cfg` with the n_embd, n_head and n_inner that give it `target` parameters within 2 %. ValueError where none do."""
    step = cfg.head_dim or 8 * cfg.n_head
    C, n, why = step, 0, ""
    tried: list[tuple[GPTConfig, int, int]] = []          # shape, parameters, n_inner
    while n < target and C // step < 10_000:
        inner = cfg.n_inner and max(8, round(cfg.n_inner * C / cfg.n_embd / 8) * 8)
        try:
            wide = replace(cfg, n_embd=C, n_head=C // cfg.head_dim if cfg.head_dim else cfg.n_head, n_inner=inner)
            model = meta(wide)
        except ValueError as e:
            why, C = why or str(e), C + step                     # a mixer that does not take this width
            if not tried and 64 * step < C:
                raise
            continue
        n = sum(p.numel() for p in model.parameters())
        tried.append((wide, n, model.blocks[0].mlp.down.in_features))  # type: ignore[union-attr,operator,arg-type]
        C = max(C + step, int(C * (target / n) ** 0.5) // step * step)   # parameters grow at most as C^2: the target is not jumped over
    best: tuple[float, GPTConfig] | None = None
    for wide, n, usual in tried[-2:]:                            # around the target, with the usual feed-forward
        per_8 = parameters(replace(wide, n_inner=usual + 8)) - n         # and linear in n_inner
        met = usual + 8 * round((target - n) / per_8)
        if met >= 8 and (best is None or abs(math.log(met / usual)) < best[0]):
            best = abs(math.log(met / usual)), replace(wide, n_inner=met)
    if best is None:
        raise ValueError(f"no width gives {cfg.layers!r} {count(target)}parameters: {why or 'ask for more'}")
    if abs(parameters(best[1]) / target - 1) > AGREE:
        raise ValueError(f"{cfg.layers!r} has {parameters(best[1]):,} parameters at n_embd={best[1].n_embd} and n_inner={best[1].n_inner}: "
                         f"{target:,} cannot be met within {AGREE:.0%}")
    return best[1]


def shapes(config: CompareConfig, vocab_size: int) -> dict[str, TrainConfig]:
    """Each pattern's settings, widths solved; the number of steps and the learning rate are still to be set."""
    if not config.layers:
        raise ValueError('nothing to compare: --layers attention "attention(window=64)"')
    base = {f.name: getattr(config, f.name) for f in fields(TrainConfig)} | {"vocab_size": config.vocab_size or vocab_size}
    each = {word: TrainConfig(**{**base, "layers": word}) for word in config.layers}
    for cfg in each.values():
        pattern(cfg)
    target = amount(config.params, "params") if config.params else parameters(next(iter(each.values())).model())
    solved = {word: solve(cfg.model(), target) for word, cfg in each.items()}
    return {word: replace(each[word], n_embd=s.n_embd, n_head=s.n_head, n_inner=s.n_inner) for word, s in solved.items()}


# what runs in a process of its own

def call(pipe: Any, f: Callable, arguments: tuple) -> None:
    try:
        pipe.send((True, f(*arguments)))
    except KeyboardInterrupt:             # the parent has been interrupted too, and says so
        pass
    except CAUGHT as e:
        pipe.send((False, e))
    except BaseException as e:
        traceback.print_exc()
        pipe.send((False, RuntimeError(str(e) or type(e).__name__)))


def alone(f: Callable, *arguments: Any) -> Any:
    """f in a process of its own, so that one pattern's memory and compiled code are not another's. An interrupt ends it after it has
    saved."""
    spawn = multiprocessing.get_context("spawn")
    pipe, end = spawn.Pipe(False)
    process = spawn.Process(target=call, args=(end, f, arguments))
    process.start()
    end.close()
    try:
        fine, value = pipe.recv()
    except EOFError:
        raise MemoryError(f"{f.__name__}: its process was ended; most likely there is not so much memory") from None
    except KeyboardInterrupt:
        process.terminate()               # SIGTERM, at which train saves; Ctrl-C has reached it too
        raise
    finally:
        process.join()
    if not fine:
        raise value
    return value


@contextlib.contextmanager
def quiet(path: Path):
    """What a run says goes to a file; its progress bar stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as f, contextlib.redirect_stdout(f):
        yield


def measure(cfg: TrainConfig, contexts: tuple[int, ...], folder: str) -> Row:
    """Speed of training over a few steps, and of the next token; bytes of state."""
    out = Path(folder)
    short_run = replace(cfg, out_dir=str(out / "run"), max_iters=STEPS, warmup_iters=0, eval_interval=STEPS, eval_iters=1, log_interval=1,
                        init_from="scratch", wandb_log=False)
    shutil.rmtree(out, ignore_errors=True)
    with quiet(out / "log.txt"):
        train(short_run)
    speeds = [line["tokens_per_s"] for line in old_lines(out / "run" / "metrics.jsonl") if line.get("tokens_per_s")]
    model, _ = load_model(out / "run", pick_device(cfg.device))
    with torch.no_grad():
        found = {"tokens_per_s": median(speeds), "decode": {str(T): decode_speed(model, T) for T in contexts},
                 "state_bytes": {str(T): state_bytes(model, T) for T in contexts}}
    shutil.rmtree(out / "run")
    return found


def decode_speed(model: GPT, T: int, repeats: int = 16) -> float | None:
    """Tokens a second after T tokens: one row, float32, eager, the median of `repeats`. None where positions end before."""
    device, new = model.wte.weight.device, repeats + 2
    x = torch.randint(model.cfg.vocab_size, (1, T + new), generator=torch.Generator().manual_seed(0)).to(device)
    state, times = model.init_state(1, T + new), []
    try:
        for piece in x[:, :T].split(1024, 1):
            model.hidden(piece, state=state)
        for i in range(T, T + new):
            start = time.perf_counter()
            model(x[:, i:i + 1], state=state).argmax().item()        # .item() waits for a GPU
            times.append(time.perf_counter() - start)
    except ValueError:
        return None
    return 1 / median(times[2:])


def state_bytes(model: GPT, T: int) -> int:
    return sum(t.numel() * t.element_size() for layer in model.init_state(1, T).layers for t in layer.values())


def run(cfg: TrainConfig) -> Row:
    """One run to its end, and its loss on the whole validation split; {"stopped": step} where it was interrupted."""
    out = Path(cfg.out_dir or "")
    with quiet(out.with_name(f"{out.name}.log")):
        done = train(cfg)
        if done.iter < cfg.max_iters:
            return {"stopped": done.iter}
        corpus, step = Mixture(cfg.dataset), find_step(out, prefer="latest")
        found = [(corpus.weights[name], evaluate(EvalConfig(checkpoint=str(step), dataset=str(c.folder), device=cfg.device, dtype="auto",
                                                            batch_size=cfg.batch_size))) for name, c in corpus.corpora.items()]
    bits = [w * r["bits_per_byte"] for w, r in found if r["bits_per_byte"] is not None]
    curve = timeline(list(old_lines(out / "metrics.jsonl")))
    memory = [line["memory_gb"] for line in old_lines(out / "metrics.jsonl") if line.get("memory_gb")]
    return {"loss": sum(w * r["loss"] for w, r in found), "bits_per_byte": sum(bits) if len(bits) == len(found) else None,
            "tokens": done.tokens, "steps": done.iter, "seconds": curve[-1][1], "memory_gb": max(memory, default=None),
            "curve": [list(point) for point in curve]}


def timeline(lines: list[dict]) -> list[tuple[int, float, float]]:
    """metrics.jsonl -> (tokens, seconds of training until there, validation loss) of each evaluation: at the run's median speed, so
    without evaluations, stops, what the first step has compiled, and what else the machine had to do for a while."""
    speeds = [line["tokens_per_s"] for line in lines if line.get("tokens_per_s")]
    speed = median(speeds) if speeds else math.inf
    return [(line["tokens"], line["tokens"] / speed, line["val_loss"]) for line in lines if "val_loss" in line]


# the comparison

def digest(cfg: TrainConfig) -> str:
    """Of what a result depends on."""
    free = ("out_dir", "init_from", "kv_cache", "wandb_log", "wandb_project", "wandb_run_name", "wandb_mode")
    text = json.dumps({k: v for k, v in asdict(cfg).items() if k not in free}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def slug(word: str) -> str:
    return re.sub(r"[^\w.=]+", "_", word).strip("_")[:40]


class Kept:
    """Results by name, a file each: what is there is not computed again."""

    def __init__(self, folder: Path):
        self.folder = folder

    def get(self, name: str) -> Row | None:
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
        return None

    def put(self, name: str, value: Row) -> Row:
        self.folder.mkdir(parents=True, exist_ok=True)
        new = self.folder / f".{name}.json"
        new.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        os.replace(new, self.folder / f"{name}.json")
        return value

    def ensure(self, name: str, f: Callable[..., Row], *arguments: Any) -> Row:
        found = self.get(name)
        return self.put(name, alone(f, *arguments)) if found is None else found


class Comparison:
    def __init__(self, config: CompareConfig):
        self.config, self.out = config, Path(config.out_dir or "out/compare")
        self.shapes = shapes(config, Mixture(config.dataset).vocab_size)
        self.kept = Kept(self.out / "results")
        self.rates, self.contexts = config.learning_rates or RATES, config.contexts or CONTEXTS
        self.measured: dict[str, Row] = {}
        self.recalled: dict[str, Row] = {}
        self.todo: list[str] = []
        self.expected = self.spent = 0.0
        self.runs: dict[str, dict[tuple[float, int], Row]] = {word: {} for word in config.layers}

    def per_step(self) -> int:
        return self.config.batch_size * self.config.gradient_accumulation_steps * self.config.block_size

    def steps(self, word: str) -> int:
        if self.config.minutes:
            return max(1, round(60 * self.config.minutes * self.measured[word]["tokens_per_s"] / self.per_step()))
        return -(-amount(self.config.tokens, "tokens") // self.per_step()) if self.config.tokens else self.config.max_iters

    def seconds(self, word: str) -> float:
        """What a run will take, by the speed measured; evaluations take a tenth more."""
        return 1.1 * self.steps(word) * self.per_step() / self.measured[word]["tokens_per_s"]

    def settings(self, word: str, lr: float, seed: int) -> TrainConfig:
        """Of one run. What it sees is a function of dataset, batch, block_size and seed, which are the same for all patterns."""
        c, steps = self.config, self.steps(word)
        factor = lr / c.learning_rate
        cfg = replace(self.shapes[word], learning_rate=lr, muon_lr=c.muon_lr * factor, min_lr=c.min_lr and c.min_lr * factor, seed=seed,
                      max_iters=steps, warmup_iters=min(c.warmup_iters, steps // 10), lr_decay_iters=None, patience=0,
                      eval_interval=-(-steps // c.evals), log_interval=max(1, steps // 100), init_from="auto", eval_only=False)
        name = f"{slug(word)}-lr{lr:g}-seed{seed}-{digest(cfg)}"
        return replace(cfg, out_dir=str(self.out / "runs" / name), wandb_run_name=name)

    def measure(self) -> None:
        """What does not depend on learning rate and seed."""
        c = self.config
        asked = ProbesConfig(steps=max(1, c.probe_steps), device=c.device)
        for i, (word, cfg) in enumerate(self.shapes.items()):
            key = digest(replace(cfg, max_iters=0))
            say(f"[{i + 1}/{len(c.layers)}] {word}: n_embd={cfg.n_embd}, n_head={cfg.n_head}, n_inner={cfg.n_inner}, "
                f"{parameters(cfg.model()):,} parameters; measuring speed{' and recall' if c.probe_steps else ''}")
            name = f"speed-{slug(word)}-{'-'.join(map(str, self.contexts))}-{key}"
            self.measured[word] = self.kept.ensure(name, measure, cfg, self.contexts, str(self.out / "runs" / name))
            for probe in (PROBES if c.probes else ["mqar"]) if c.probe_steps else []:
                name = f"{probe}-{slug(word)}-{c.probe_steps}-{hashlib.sha256(word.encode()).hexdigest()[:8]}"
                self.recalled.setdefault(word, {})[probe] = self.kept.ensure(name, learn, word, probe, asked)

    def one(self, word: str, lr: float, seed: int) -> None:
        cfg = self.settings(word, lr, seed)
        out, started = Path(cfg.out_dir or ""), time.perf_counter()
        found = self.kept.get(out.name)
        if found is None:
            try:
                found = alone(run, cfg)
            except ValueError as e:       # a loss that is no number: this learning rate is too high, the others go on
                if "no number" not in str(e):
                    raise
                found = {"failed": f"learning rate {lr:g}: {e}"}
            if "stopped" in found:
                raise KeyboardInterrupt
            self.kept.put(out.name, {**found, "settings": asdict(cfg)})
            if not self.config.keep:
                for path in [*out.glob("step_*"), out / "latest", out / "best"]:
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            self.todo.remove(word)
            self.expected, self.spent = self.expected + self.seconds(word), self.spent + time.perf_counter() - started
            said = f"loss {found['loss']:.4f}" if "loss" in found else "failed"
            say(f"[{self.total - len(self.todo)}/{self.total}] {word}, learning rate {lr:g}, seed {seed}: {said}, "
                f"{duration(time.perf_counter() - started)}; {self.left()} left")
        elif seed != self.config.seed:
            self.todo.remove(word)
        self.runs[word][lr, seed] = found
        self.write()

    def left(self) -> str:
        """By the speeds measured, corrected by what the runs so far have taken."""
        return f"about {duration(sum(map(self.seconds, self.todo)) * (self.spent / self.expected if self.expected else 1))}"

    def all(self) -> None:
        c = self.config
        self.measure()
        sweep = [(word, lr) for lr in self.rates for word in c.layers]
        self.total = len(sweep) + len(c.layers) * (c.seeds - 1)
        self.todo = [w for w, lr in sweep if self.kept.get(Path(self.settings(w, lr, c.seed).out_dir or "").name) is None]
        self.todo += [*c.layers] * (c.seeds - 1)              # their learning rates are not known yet
        say(f"{self.total} runs, {self.total - len(self.todo)} of them done; {self.left()} to go. Ctrl-C stops, the same command goes on")
        for word, lr in sweep:
            self.one(word, lr, c.seed)
        for seed in range(c.seed + 1, c.seed + c.seeds):
            for word in c.layers:
                if (best := self.best(word)) is not None:
                    self.one(word, best, seed)

    def best(self, word: str) -> float | None:
        """The learning rate whose first seed has the lowest loss."""
        return min(((r["loss"], lr) for (lr, seed), r in self.runs[word].items() if seed == self.config.seed and "loss" in r),
                   default=(0, None))[1]

    def row(self, word: str) -> Row:
        """What is known of a pattern: means over the seeds at its best learning rate."""
        c, cfg, lr, measured = self.config, self.shapes[word], self.best(word), self.measured.get(word, {})
        runs = [r for (at, _), r in sorted(self.runs[word].items()) if at == lr and "loss" in r]
        sweep = {f"{at:g}": r.get("loss") for (at, seed), r in sorted(self.runs[word].items()) if seed == c.seed}
        of = lambda key: [r[key] for r in runs if r[key] is not None]
        average = lambda key: mean(of(key)) if of(key) else None
        speed = None if c.minutes else measured.get("tokens_per_s")      # measured side by side; runs may be of other days and machines
        if speed:
            runs = [{**r, "seconds": r["tokens"] / speed, "curve": [[t, t / speed, loss] for t, _, loss in r["curve"]]} for r in runs]
        total, embeddings = parameters(cfg.model()), cfg.vocab_size * cfg.n_embd * (1 if cfg.tie_embeddings else 2)
        return {
            "layers": word, "parameters": total, "without_embedding": total - embeddings, "n_embd": cfg.n_embd, "n_head": cfg.n_head,
            "n_inner": cfg.n_inner, "learning_rate": lr,
            "edge": len(sweep) == len(self.rates) > 1 and lr in (min(self.rates), max(self.rates)), "sweep": sweep,
            "losses": of("loss"), "loss": average("loss"), "loss_spread": stdev(of("loss")) if len(runs) > 1 else None,
            "bits_per_byte": average("bits_per_byte"), "tokens": average("tokens"), "seconds": average("seconds"),
            "tokens_per_s": sum(of("tokens")) / sum(of("seconds")) if runs else measured.get("tokens_per_s"),
            "memory_gb": max(of("memory_gb"), default=None), "decode_tokens_per_s": measured.get("decode", {}),
            "state_bytes": measured.get("state_bytes", {}),
            "probes": {name: r["accuracy"] for name, r in self.recalled.get(word, {}).items()},
            "curves": [r["curve"] for r in runs], "failed": [r["failed"] for r in self.runs[word].values() if "failed" in r]}

    def result(self) -> Row:
        c, device = self.config, pick_device(self.config.device)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, {torch.get_num_threads()} threads"
        equal = f"{c.minutes:g} minutes" if c.minutes else f"{self.steps(c.layers[0]) * self.per_step():,} tokens"
        return {"rows": [self.row(word) for word in c.layers], "dataset": c.dataset, "equal": equal, "seeds": c.seeds,
                "contexts": list(self.contexts), "device": name, "torch": torch.__version__, "settings": asdict(c)}

    def write(self) -> Row:
        """compare.json, compare.png where matplotlib is, compare.html: of what is there so far."""
        result = self.result()
        Kept(self.out).put("compare", result)
        picture = draw(result, self.out / "compare.png")
        (self.out / "compare.html").write_text(page(result, picture), encoding="utf-8")
        return result


def interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main(config: CompareConfig) -> Row:
    keep_memory()
    for word in config.layers:                       # before a corpus is prepared
        pattern(GPTConfig(**{**config.model_fields(), "layers": word}))
    comparison, stopped = Comparison(config), False
    main_thread = threading.current_thread() is threading.main_thread()     # elsewhere Python has no handlers
    before = signal.signal(signal.SIGTERM, interrupt) if main_thread else None
    try:
        comparison.all()
    except KeyboardInterrupt:
        if not comparison.measured:
            raise
        stopped = True
    finally:
        if main_thread:
            signal.signal(signal.SIGTERM, before)
    result = {**comparison.write(), "stopped": stopped}
    print(f"\n{report(result)}\n")
    if config.wandb_log and config.wandb_mode != "disabled" and not stopped:
        show(config, result, comparison.out)
    if not (comparison.out / "compare.png").exists():
        print("no picture: pip install matplotlib", file=sys.stderr)
    print(f"{comparison.out / 'compare.html'}" + ("   stopped: the same command goes on" if stopped else ""))
    return result


if __name__ == "__main__":
    with one_line_errors():
        if main(config)["stopped"]:
            raise SystemExit(130)
