"""What bench.gpu_check checks: functions of a device that return a line of detail, or raise Failed with a line of reason.

The CPU runs those that need no CUDA, so that the tests run this file. Losses are read from metrics.jsonl: what is checked is
what train.train does, not a copy of it.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from config import TrainConfig
from data.build import build
from data.documents import Document
from engine.checkpoint import find_step, load_model
from engine.generate import generate
from engine.parallel import Ranks, leave
from model import GPT, GPTConfig
from ops import fla
from ops.attend import How, attend, cannot
from ops.delta_rule import delta_rule
from ops.positions import Positions
from ops.recurrence import recurrence
from ops.rwkv7 import rwkv7
from train import train

ROOT = Path(__file__).resolve().parent.parent
# Allowed differences, relative. Of a loss, at every step, from float32's; each step that float16 loses until it has found its
# scale (SKIPPED at most) allows 0.05 more. Of outputs and gradients of attention: the mean difference to the mean size, and ten
# times that of the largest to the largest; TF32 would be 3e-4 off, a window of 16 that is one key too long 0.2.
CURVES, SKIPPED = {"float32": 0.0, "bfloat16": 0.02, "float16": 0.02}, 3
ATTENTION = {torch.float32: (3e-5, 1e-4), torch.bfloat16: (0.02, 0.03)}
RECURRENT = {torch.float32: 1e-4, torch.bfloat16: 0.03}
COMPILED = {"float32": 1e-4, "bfloat16": 0.02}   # losses compiled against eager, relative
GRAPHS = 2           # that one run may compile: training and evaluation
SAME = 1e-4          # losses of runs, and logits, that differ in the order of sums alone, relative


class Failed(Exception):
    """A check's one line of reason."""


def demand(holds: bool, reason: str) -> None:
    if not holds:
        raise Failed(reason)


# runs on a corpus that is made up

@dataclass
class Run:
    out: Path
    losses: list[float]      # of every step
    skipped: int             # steps whose gradient was no number
    said: str                # all that was printed


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        yield text


def made_up(n: int = 3000, seed: int = 0) -> str:
    """Lines of n made-up words, learnable and short."""
    draw = random.Random(seed)
    words = ["".join(draw.choice("bcdfglmnprst") + draw.choice("aeiou") for _ in range(draw.randint(1, 3))) for _ in range(60)]
    return "".join(draw.choice(words) + (".\n" if draw.random() < 0.15 else " ") for _ in range(n))


@contextlib.contextmanager
def corpus() -> Iterator[Path]:
    """A folder with the prepared folder `text` in it: made-up words, by character."""
    text = made_up(12000)
    with tempfile.TemporaryDirectory() as folder, quiet():
        build(Path(folder) / "text", lambda: [Document("", [text])], "char")
        yield Path(folder)


def settings(folder: Path, device: torch.device, name: str, **changes) -> TrainConfig:
    base = dict(dataset=str(folder / "text"), out_dir=str(folder / name), device=str(device), dtype="float32", n_layer=2, n_head=4,
                n_kv_head=2, n_embd=128, qk_norm=True, block_size=64, batch_size=8, max_iters=20, warmup_iters=5, learning_rate=3e-3,
                eval_interval=10**6, eval_iters=1, log_interval=1, compile=False)
    return TrainConfig(**{**base, **changes})


def read(config: TrainConfig, said: str) -> Run:
    lines = [json.loads(line) for line in (Path(config.out_dir or "") / "metrics.jsonl").read_text().splitlines()]
    steps = [m for m in lines if "loss" in m]
    losses = [math.nan if m["loss"] is None else m["loss"] for m in steps]
    demand("does not work here" not in said, "torch.compile gave up: " + said.partition("does not work here ")[2].partition("\n")[0])
    return Run(Path(config.out_dir or ""), losses, sum(m["grad_norm"] is None for m in steps), said)


def run(folder: Path, device: torch.device, name: str, **changes) -> Run:
    config = settings(folder, device, name, **changes)
    with quiet() as said:
        train(config)
    return read(config, said.getvalue())


def apart(got: list[float], want: list[float]) -> float:
    """The largest relative difference; a curve with a hole in it, or of another length, is infinitely far."""
    pairs = [abs(a - b) / abs(b) for a, b in zip(got, want)]
    return max(pairs) if len(got) == len(want) and all(map(math.isfinite, pairs)) else math.inf


# the checks

def check_dtype(device: torch.device, names: tuple[str, ...] = ("float32", "bfloat16")) -> str:
    """Losses fall, near float32's."""
    told = []
    with corpus() as folder:
        runs = {name: run(folder, device, name, dtype=name) for name in names}
    for name, r in runs.items():
        far, allowed = apart(r.losses, runs["float32"].losses), CURVES[name] + 0.05 * r.skipped
        demand(r.losses[-1] < 0.8 * r.losses[0], f"{name}: the loss goes from {r.losses[0]:.3f} to {r.losses[-1]:.3f}")
        demand(r.skipped <= (SKIPPED if name == "float16" else 0), f"{name}: {r.skipped} of {len(r.losses)} steps had no number")
        demand(far <= allowed, f"{name}: losses are {far:.2%} from float32's, allowed {allowed:.0%}")
        instead = " (another dtype took its place)" if "takes its place" in r.said else ""
        told.append(f"{name} {r.losses[0]:.2f} to {r.losses[-1]:.2f}" + (f", {far:.2%} apart" if name != "float32" else "") + instead)
    return "; ".join(told)


def check_float32_state(device: torch.device, names: tuple[str, ...] = ("bfloat16", "float16")) -> str:
    """What a run in half precision saves is float32: weights and moments, of both optimizers."""
    n = 0
    with corpus() as folder:
        for name in names:
            for optimizer in ("adamw", "muon"):
                step = find_step(run(folder, device, name + optimizer, dtype=name, optimizer=optimizer, max_iters=3, warmup_iters=0).out)
                tensors = {**load_file(step / "model.safetensors"), **load_file(step / "optimizer.safetensors")}
                wrong = [key for key, t in tensors.items() if t.dtype != torch.float32]
                demand(not wrong, f"{name}, {optimizer}: {len(wrong)} tensors are not float32, such as {(wrong or [''])[0]}")
                n += len(tensors)
    return f"{n} tensors of {' and '.join(names)} runs"


PACKED = [0, 1, 2, *range(80), *range(97), *[-1] * 20]      # three documents, then padding: 200 tokens
CASES: dict[str, dict] = {
    "plain": {}, "mqa": dict(G=1), "mha": dict(G=4), "window": dict(window=16), "sinks": dict(window=16, sinks=3),
    "documents": dict(pos=PACKED), "window in documents": dict(pos=PACKED, window=16, sinks=3),
    "softcap": dict(softcap=5.0), "alibi": dict(alibi=True, window=48), "wide heads": dict(D=128), "long": dict(T=1100, window=200),
}


def one_attention(device: torch.device, backend: str, dtype: torch.dtype, grad: bool, G: int = 2, T: int = 200, D: int = 64,
                  pos: list[int] | None = None, alibi: bool = False, **how) -> list[Tensor] | None:
    """The output of 4 heads and, with grad, the gradients of q, k, v, all in float32; None where the backend cannot do it. The same
    numbers whatever the device; the reference gets them in float32, after the same rounding."""
    g = torch.Generator().manual_seed(0)
    drawn = [torch.randn(2, heads, T, D, generator=g).to(dtype) for heads in (4, G, G)]
    weight = torch.randn(2, 4, T, D, generator=g).to(dtype)
    kind = torch.float32 if backend == "reference" else dtype
    q, k, v = (t.to(device, kind).requires_grad_(grad) for t in drawn)
    if alibi:
        how["slopes"] = torch.tensor([0.5, 0.25, 0.1, 0.05], device=device)
    if cannot(backend, device.type, dtype, D, How(**how), plain=pos is None, grad=grad):
        return None
    at = Positions(2, T, device, None if pos is None else torch.tensor([pos, list(range(T))], device=device))
    with contextlib.nullcontext() if grad else torch.no_grad():
        y = attend(q, k, v, at, backend=backend, **how)
    grads = torch.autograd.grad((y * weight.to(device, kind)).sum(), (q, k, v)) if grad else ()
    return [t.detach().float() for t in (y, *grads)]


def difference(got: Tensor, want: Tensor) -> float:
    """The mean difference, of the mean size; a tenth of the largest, of the largest, where that is more. NaN where there is one."""
    off = (got - want).abs()
    return float(torch.maximum(off.mean() / want.abs().mean(), off.max() / want.abs().max() / 10))


def check_attention(device: torch.device, backend: str, dtypes: tuple[torch.dtype, ...] = tuple(ATTENTION),
                    names: tuple[str, ...] = tuple(CASES)) -> str:
    """A backend against the reference on the same device, in outputs and (flex on a CPU has none) gradients."""
    grad = not (backend == "flex" and device.type == "cpu")
    done, worst, wrong = 0, dict.fromkeys(dtypes, 0.0), []
    for dtype in dtypes:
        for name in names:
            torch._dynamo.reset()              # flex: more than eight kernels of one function and dynamo stops compiling
            got, want = (one_attention(device, b, dtype, grad, **CASES[name]) for b in (backend, "reference"))
            if got is None or want is None:
                continue
            off = [difference(a, b) / ATTENTION[dtype][i > 0] for i, (a, b) in enumerate(zip(got, want))]
            worst[dtype], done = max(worst[dtype], *off), done + 1
            if not all(o <= 1 for o in off):
                values = ", ".join(f"{what} {o:.2g}" for what, o in zip(("y", "dq", "dk", "dv"), off))
                wrong.append(f"{name} in {str(dtype)[6:]} ({values})")
    demand(not wrong, f"times the tolerance: {'; '.join(wrong)}")
    demand(done > 0, "it can do none of the cases")
    return f"{done} cases, {'with' if grad else 'without'} gradients; at most " + ", ".join(
        f"{off:.2g} of the tolerance in {str(dtype)[6:]}" for dtype, off in worst.items() if off)


def recurrences(device: torch.device, dtype: torch.dtype, T: int, B: int = 2, H: int = 4,
                D: int = 64) -> dict[str, tuple[Callable, list[Tensor | None]]]:
    """Operations that keep states of D x D, and inputs as a mixer makes them: products' in dtype, decays in float32."""
    g = torch.Generator().manual_seed(0)
    draw = lambda *last: torch.randn(B, H, T, *last, generator=g).to(device)
    q, k, v = (t.to(dtype) for t in (draw(D) / 8, torch.nn.functional.normalize(draw(D), dim=-1), draw(D)))
    by_head, by_channel, rate = -draw().sigmoid(), -draw(D).sigmoid() / 2, draw().sigmoid()
    return {"no decay": (recurrence, [q, k, v, None]), "by head": (recurrence, [q, k, v, by_head]),
            "by channel": (recurrence, [q, k, v, by_channel]), "delta": (delta_rule, [q, k, v, rate.to(dtype), None]),
            "gated delta": (delta_rule, [q, k, v, rate, by_head]), "kda": (delta_rule, [q, k, v, rate, by_channel]),
            "rwkv7": (rwkv7, [q, by_channel, k, v, -k, (k * draw(D).sigmoid()).to(dtype)])}


def one_recurrence(f: Callable, inputs: list[Tensor | None], at: Positions, backend: str, dtype: torch.dtype) -> list[Tensor]:
    """y, the last state, and all gradients."""
    x = [t if t is None else t.to(torch.promote_types(t.dtype, dtype)).requires_grad_() for t in inputs]
    y, h = f(*x, at, backend=backend)
    y = y.masked_fill((at.pos < 0)[:, None, :, None], 0)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.device)
    grads = torch.autograd.grad((y * weight).sum() + h.sum(), [t for t in x if t is not None])
    return [t.detach().float() for t in (y, h, *grads)]


def check_recurrences(device: torch.device, backend: str, dtype: torch.dtype, T: int = 200) -> str:
    """A backend (auto: fla's kernels) against the loop over tokens in float32: outputs, last states and gradients."""
    packed, done, worst, wrong = torch.tensor([PACKED[:T], list(range(T))], device=device), 0, 0.0, []
    for where, pos in (("", None), (" in documents", packed)):
        for name, (f, inputs) in recurrences(device, dtype, T).items():
            at = Positions(2, T, device, pos)
            got, want = one_recurrence(f, inputs, at, backend, dtype), one_recurrence(f, inputs, at, "naive", torch.float32)
            off = max(difference(a, b) for a, b in zip(got, want)) / RECURRENT[dtype]
            worst, done = max(worst, off), done + 1
            if not off <= 1:
                wrong.append(f"{name}{where} ({off:.2g})")
    demand(not wrong, f"times the tolerance: {', '.join(wrong)}")
    return f"{done} cases, with gradients; at most {worst:.2g} of the tolerance"


def check_compile(device: torch.device, layers: str = "attention", dtype: str = "float32", steps: int = 12) -> str:
    """Compiled training gives the losses of eager training, and steps of one shape share a graph."""
    with corpus() as folder:
        eager = run(folder, device, "eager", layers=layers, dtype=dtype, max_iters=steps)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        fast = run(folder, device, "compiled", layers=layers, dtype=dtype, max_iters=steps, compile=True)
    graphs, breaks = torch._dynamo.utils.counters["stats"]["unique_graphs"], sum(torch._dynamo.utils.counters["graph_break"].values())
    far = apart(fast.losses, eager.losses)
    demand(far <= COMPILED[dtype], f"losses are {far:.2g} apart, allowed {COMPILED[dtype]:g}")
    demand(0 < graphs <= GRAPHS, f"{graphs} graphs ({breaks} graph breaks) in {steps} steps of one shape, allowed {GRAPHS}")
    return f"{dtype}: losses {far:.1g} apart; {graphs} graphs in {steps} steps"


class Joined(Ranks):
    """One rank that does all that several do: a process group, DDP, and sums over it."""

    def __init__(self, device: str):
        super().__init__(device)
        torch.distributed.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        self.wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)    # several buckets: the compiler splits there
        return self.wrapped

    def sync(self, wanted: bool) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if wanted else self.wrapped.no_sync()  # type: ignore[operator]

    def sum(self, t: Tensor) -> Tensor:
        torch.distributed.all_reduce(t)
        return t


def joined(config: str) -> None:
    """`python -m bench.checks '{...}'` under torchrun: that run as train.py does it, but for Joined."""
    import train as script
    script.Ranks = Joined  # type: ignore[misc]
    train(TrainConfig(**json.loads(config)))
    leave()


def check_ddp(device: torch.device, layers: str = "attention", compile: bool = False) -> str:
    """One rank under torchrun gives the losses of a process of its own, in two micro-batches a step."""
    with corpus() as folder:
        # at the 3e-3 of the other checks this small model doubles a rounding each step: after 20 of them compiled losses are 1e-3 apart
        same = dict(n_layer=4, layers=layers, compile=compile, batch_size=4, gradient_accumulation_steps=2, learning_rate=1e-3)
        alone = run(folder, device, "alone", **same)
        config = settings(folder, device, "ddp", **same)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
        child = subprocess.run([*launch, "-m", "bench.checks", json.dumps(vars(config))], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, timeout=600)
        errors = [line.strip() for line in child.stdout.splitlines() if "Error" in line]
        demand(child.returncode == 0, f"torchrun ended with {child.returncode}: {(errors or ['no error named'])[0][:200]}")
        ranks = read(config, child.stdout)
    far = apart(ranks.losses, alone.losses)
    demand(far <= SAME, f"losses are {far:.2g} apart, allowed {SAME:g}")
    return f"{'nccl' if device.type == 'cuda' else 'gloo'}: losses {far:.1g} apart"


def check_checkpoint(device: torch.device, steps: int = 6) -> str:
    """N steps and N resumed are 2N; what was written here loads on a CPU and gives the same logits."""
    told = []
    with corpus() as folder:
        for optimizer in ("adamw", "muon"):
            same = dict(warmup_iters=2, lr_decay_iters=2 * steps, dropout=0.1, optimizer=optimizer)
            whole = run(folder, device, f"{optimizer}_whole", max_iters=2 * steps, **same)
            run(folder, device, optimizer, max_iters=steps, **same)
            part = run(folder, device, optimizer, max_iters=2 * steps, init_from="resume", **same)
            far, allowed = apart(part.losses, whole.losses), SAME if optimizer == "adamw" else 1e-3   # Muon multiplies in bfloat16
            demand(far <= allowed, f"{optimizer}: losses of a resumed run are {far:.2g} apart, allowed {allowed:g}")
            told.append(f"{optimizer}'s losses {far:.1g} apart")
        x = torch.arange(40)[None] % 20
        here, there = (load_model(whole.out, d)[0](x.to(d)).detach().cpu() for d in (device, torch.device("cpu")))
    off = difference(here, there)
    demand(off <= SAME, f"logits on {device} and on the CPU are {off:.2g} apart, allowed {SAME:g}")
    return f"{', '.join(told)}; logits {off:.1g} from the CPU's"


@torch.no_grad()
def check_generation(device: torch.device, n: int = 40) -> str:
    """Greedy text with the cache is the CPU's, and so are its logits: prompts of three lengths, a window, sinks and shared heads."""
    torch.manual_seed(0)
    shape = dict(vocab_size=64, block_size=128, n_layer=3, n_head=4, n_kv_head=2, n_embd=64, qk_norm=True)
    model = GPT(GPTConfig(**shape, layers="attention attention(window=16, sinks=2)")).eval()  # type: ignore[arg-type]
    for p in model.parameters():
        p.mul_(4 if p.dim() > 1 else 1)        # loud: no two tokens are nearly as likely
    prompts = [list(range(3)), list(range(30, 50)), list(range(10, 43))]
    texts, logits = [], []
    for d in (torch.device("cpu"), device):
        model = model.to(d)
        texts.append([list(step.values()) for step in generate(model, prompts, n, temperature=0)])
        x, state = torch.tensor([prompts[2] + [row[2] for row in texts[0]]], device=d), model.init_state(1, 128)
        pieces = [model(x[:, a:b], state=state) for a, b in [(0, 20), *((i, i + 1) for i in range(20, x.shape[1]))]]
        logits += [model(x).cpu(), torch.cat(pieces, 1).cpu()]
    off = max(difference(t, logits[0]) for t in logits[1:])
    demand(off <= SAME, f"logits are {off:.2g} from the CPU's, allowed {SAME:g}")
    alike = next((i for i, (a, b) in enumerate(zip(*texts)) if a != b), n)
    demand(alike == n, f"the texts part at token {alike} of {n}")
    return f"{n} tokens of 3 prompts alike; logits {off:.1g} apart"


class Check(NamedTuple):
    name: str
    run: Callable[..., str]      # (device, *arguments)
    arguments: tuple = ()
    skipped: str = ""            # why it is not run here


def checks(device: torch.device) -> list[Check]:
    """All of them, in order."""
    needs = "" if device.type == "cuda" else "needs CUDA"
    flash = needs or cannot("flash", "cuda", torch.bfloat16, 64, How(), plain=True, grad=True)
    no_fla = "" if fla.VERSION else "fla-core is not installed"
    local = "attention(window=32) attention"
    return [
        Check("float32, bfloat16", check_dtype, (("float32", "bfloat16"),)),
        Check("float16 with its scaler", check_dtype, (("float32", "float16"),), needs),
        Check("saved in float32", check_float32_state, (("bfloat16",) if needs else ("bfloat16", "float16"),)),
        Check("attention: sdpa", check_attention, ("sdpa",)),
        Check("attention: flex", check_attention, ("flex",)),
        Check("attention: flash", check_attention, ("flash",), flash),
        Check("recurrences", check_recurrences, ("chunked", torch.float32)),
        Check("recurrences: fla", check_recurrences, ("auto", torch.bfloat16), needs or no_fla),
        Check("compile", check_compile, (), needs),
        Check("compile, bfloat16", check_compile, ("attention", "bfloat16"), needs),
        Check("compile, window", check_compile, (local, "bfloat16"), needs),
        Check("DDP", check_ddp, (), needs),
        Check("DDP, compiled", check_ddp, ("attention", True), needs),
        Check("DDP, compiled, window", check_ddp, (local, True), needs),
        Check("checkpoint", check_checkpoint),
        Check("generation", check_generation),
    ]


if __name__ == "__main__":
    joined(sys.argv[1])
