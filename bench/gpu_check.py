"""Whether all of it works on this GPU, and how fast: the checks of bench/checks.py, then training and decoding speed.

A check that fails says why in one line, the rest goes on, and the exit status is 1. Without CUDA the checks that need none run
on the CPU, and the speed is left out.
"""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from config.check import check_fields, check_range
from engine.cli import one_line_errors, parse


@dataclass
class GpuCheckConfig:
    """Checks and speed on one GPU."""

    only: Literal["all", "checks", "speed"] = "all"
    """checks or speed alone"""
    json: str | None = None
    """a file for the last line too"""
    quick: bool = False
    """fewer repeats"""
    batch: int = 0
    """rows of a micro-batch (0: the largest power of two that fits)"""
    device: str = "auto"
    """auto (CUDA, else the CPU), cuda, cuda:1, cpu"""

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "batch", least=0)


if __name__ == "__main__":
    config = parse(GpuCheckConfig)

import torch

from bench.checks import Check, Failed, checks
from bench.decode_speed import median_seconds
from config import GPTConfig, TrainConfig
from engine.device import autocast, keep_memory, peak_flops, pick_device, pick_dtype
from engine.generate import generate
from engine.log import memory_estimate
from engine.optim import make_optimizer
from engine.parallel import Ranks
from model import GPT
from train import backward


@dataclass
class Shape:
    """A model, a context, and the share of an H200's peak that is the goal (None: none is set)."""

    name: str
    model: GPTConfig
    goal: float | None = None


GPT2 = GPTConfig(n_kv_head=4, qk_norm=True)        # GPT-2 small's size, 12 layers of 768, with today's blocks
LLAMA = GPTConfig(vocab_size=32000, n_layer=22, n_head=32, n_kv_head=4, n_embd=2048, n_inner=5632, tie_embeddings=False)   # TinyLlama
SHAPES = [Shape("124 M, T = 1024", GPT2, 0.45), Shape("124 M, T = 4096", replace(GPT2, block_size=4096)),
          Shape("1.1 B, T = 1024", LLAMA, 0.55)]


# the checks

def run_checks(todo: list[Check], device: torch.device) -> list[dict]:
    """Runs and prints them one by one; whatever goes wrong is that check's line."""
    results = []
    for check in todo:
        start = time.perf_counter()
        try:
            status, said = ("skipped", check.skipped) if check.skipped else ("ok", check.run(device, *check.arguments))
        except Exception as e:
            status, said = "FAILED", reason(e)
        free(device)
        results.append({"name": check.name, "status": status, "detail": said, "seconds": time.perf_counter() - start})
        print(f"  {check.name:24} {status:8} {said}", flush=True)
    return results


def reason(e: Exception) -> str:
    """One line."""
    kind = "" if isinstance(e, Failed) else f"{type(e).__name__}: "
    return kind + (str(e).strip().splitlines() or ["no reason given"])[0][:300]


def free(device: torch.device) -> None:
    """Memory that nothing refers to any more, compiled graphs included. Not inside `except`: its traceback holds tensors."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):     # a kernel that crashed lets nothing on the device work any more
            torch.cuda.empty_cache()


# training speed

def train_speed(shape: Shape, rows: int, device: torch.device, dtype: torch.dtype, steps: int, compile: bool) -> dict:
    """The median over `steps` optimizer steps of one micro-batch, as train.py takes them; compilation and warm-up excluded."""
    cfg = shape.model
    config = TrainConfig(**{**asdict(cfg), "batch_size": rows, "learning_rate": 1e-4})
    torch.manual_seed(0)
    with device:                            # weights are drawn there
        model = GPT(cfg)
    optimizer, ranks, run = make_optimizer(model, config), Ranks(str(device)), torch.compile(model) if compile else model
    batch = torch.randint(cfg.vocab_size, (rows, cfg.block_size + 1), device=device)
    cast = partial(autocast, device, dtype)

    def step() -> None:
        backward(run, batch[:, :-1], batch[:, 1:], rows, cast, ranks, lambda loss: loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    median_seconds(step, 3, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)       # what compiling took is not a step's
    seconds = median_seconds(step, steps, device)
    rate, peak, flops = rows * cfg.block_size / seconds, peak_flops(device, dtype), model.flops_per_token(cfg.block_size)
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"name": shape.name, "parameters": sum(p.numel() for p in model.parameters()), "rows": rows, "seconds": seconds,
            "tokens_per_s": rate, "mfu": rate * flops / peak if peak else None, "peak_memory": memory, "goal": shape.goal}


def lacks_memory(e: BaseException) -> bool:
    """Also where a library asked for the memory and not torch, or the compiler wrapped the error."""
    return isinstance(e, torch.OutOfMemoryError) or any(s in str(e).lower() for s in ("out of memory", "alloc_failed"))


def largest(run: Callable[[int], dict], rows: int, device: torch.device) -> dict:
    """What `run` gives for `rows`, or for half of them as long as memory does not do."""
    while True:
        try:
            return run(rows)
        except RuntimeError as e:
            if not lacks_memory(e) or rows == 1:
                raise
        free(device)                        # here the exception is gone, and what its traceback held
        rows //= 2


def first_rows(shape: Shape, dtype: torch.dtype, room: float) -> int:
    """A power of two that will hardly fit: what the estimate, made for eager steps, puts into twice the room."""
    with torch.device("meta"):
        model = GPT(shape.model)
    fits = lambda rows: memory_estimate(model, TrainConfig(**{**asdict(shape.model), "batch_size": rows}), dtype) <= 2 * room
    rows = 1
    while rows < 1024 and fits(2 * rows):
        rows *= 2
    return rows


def row(r: dict) -> str:
    mfu = f"{r['mfu']:.1%}" if r["mfu"] else "-"
    memory = f"{r['peak_memory'] / 2**30:.1f}" if r["peak_memory"] else "-"
    goal = f"   (goal on one H200: above {r['goal']:.0%})" if r["goal"] else ""
    return f"{r['parameters'] / 1e6:8.0f} M {r['rows']:6} {r['seconds'] * 1e3:10.1f} {r['tokens_per_s']:10,.0f} {mfu:>7} {memory:>10}{goal}"


def training(shapes: list[Shape], device: torch.device, dtype: torch.dtype, config: GpuCheckConfig, compile: bool = True) -> list[dict]:
    """A printed row a shape."""
    print(f"\ntraining, {str(dtype)[6:]}, {'compiled' if compile else 'eager'}, fused AdamW, one micro-batch a step\n"
          "                     parameters   rows  ms a step   tokens/s     MFU   peak GiB")
    results = []
    for shape in shapes:
        run = partial(train_speed, shape, device=device, dtype=dtype, steps=5 if config.quick else 20, compile=compile)
        try:
            rows = config.batch or first_rows(shape, dtype, torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0)
            r = run(rows) if config.batch else largest(run, rows, device)
            line = row(r)
        except Exception as e:
            r = {"name": shape.name, "failed": reason(e)}
            line = f"FAILED   {r['failed']}"
        free(device)
        print(f"  {shape.name:18} {line}", flush=True)
        results.append(r)
    return results


# decoding speed

@torch.no_grad()
def bandwidth(device: torch.device, size: int, repeats: int) -> float:
    """Bytes a second: the better of copying `size` bytes (read and written) and of summing them (read)."""
    a = torch.randint(2**31 - 1, (size // 4,), dtype=torch.int32, device=device).view(torch.float32).nan_to_num_()   # random: no tricks
    b = torch.empty_like(a)
    ways = [(2 * size, lambda: b.copy_(a)), (size, lambda: a.sum())]
    for _, f in ways:
        median_seconds(f, 2, device)
    return max(n / median_seconds(f, repeats, device) for n, f in ways)


def decode_speed(cfg: GPTConfig, device: torch.device, dtype: torch.dtype, tokens: int, best: float) -> dict:
    """Tokens a second of engine.generate, one row, greedy, after a prompt of 16; the bound is `best` bytes a second over the bytes
    that a token must read: every matrix, and the keys and values half way."""
    torch.manual_seed(0)
    with device:
        model = GPT(cfg).to(dtype).eval()
    times, start = [], 0.0
    for _ in generate(model, [list(range(16))], tokens, temperature=0):        # each id has been asked for: the device has finished
        now = time.perf_counter()
        times.append(now - start)
        start = now
    seconds = sorted(times[3:])[len(times[3:]) // 2]                           # without the prompt and the first kernels
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    per_key = sum(t[:, :, 0].numel() for layer in model.init_state(1, 1).layers for t in layer.values())
    size = torch.finfo(dtype).bits // 8 * (weights + per_key * (16 + tokens // 2))
    return {"dtype": str(dtype)[6:], "tokens_per_s": 1 / seconds, "bound": best / size, "ratio": size / seconds / best}


def decoding(cfg: GPTConfig, device: torch.device, size: int, config: GpuCheckConfig) -> dict:
    """Prints a row a dtype; one that fails has no figures."""
    best = bandwidth(device, size, 5 if config.quick else 20)
    with torch.device("meta"):
        weights = GPT(cfg).flops_per_token(0) / 6
    print(f"\ndecoding, {weights / 1e6:.0f} M weights, one row, against {best / 1e9:,.0f} GB/s measured\n"
          "                       tokens/s      bound   ratio")
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        try:
            r = decode_speed(cfg, device, dtype, min(cfg.block_size - 16, 64 if config.quick else 256), best)
            line = f"{r['tokens_per_s']:10,.0f} {r['bound']:10,.0f} {r['ratio']:7.1%}"
        except Exception as e:
            r = {"name": f"decoding {str(dtype)[6:]}", "failed": reason(e)}
            line = f"FAILED   {r['failed']}"
        print(f"  {str(dtype)[6:]:18} {line}", flush=True)
        rows.append(r)
    free(device)
    return {"bytes_per_s": best, "rows": rows}


def main(config: GpuCheckConfig) -> tuple[dict, bool]:
    """The results, and whether nothing failed."""
    keep_memory()
    cuda = torch.cuda.is_available() if config.device == "auto" else config.device.startswith("cuda")
    device = pick_device(("cuda" if cuda else "cpu") if config.device == "auto" else config.device)
    name = torch.cuda.get_device_name(device) if cuda else f"{device.type}, {torch.get_num_threads()} threads"
    print(f"{name}; torch {torch.__version__}; TF32 {'off' if torch.get_float32_matmul_precision() == 'highest' else 'on'}")
    result: dict = {"device": name, "torch": torch.__version__}
    if config.only != "speed":
        print("\nchecks")
        result["checks"] = run_checks(checks(device), device)
    if config.only != "checks" and cuda:
        result["training"] = training(SHAPES, device, pick_dtype("bfloat16", device, 768), config)
        result["decoding"] = decoding(GPT2, device, min(2**32, torch.cuda.mem_get_info(device)[0] // 32 * 4), config)
    elif config.only != "checks":
        for what in [f"training {shape.name}" for shape in SHAPES] + ["decoding"]:
            print(f"  {what:24} skipped  needs CUDA")
    failed = [c["name"] for c in result.get("checks", []) if c["status"] == "FAILED"]
    failed += [r["name"] for r in result.get("training", []) + result.get("decoding", {}).get("rows", []) if "failed" in r]
    return {**result, "failed": failed}, not failed


if __name__ == "__main__":
    with one_line_errors():
        result, well = main(config)
        if config.json:
            Path(config.json).write_text(json.dumps(result) + "\n", encoding="utf-8")
        print(f"\n{len(result['failed'])} FAILED: {', '.join(result['failed'])}" if not well else "\nnothing FAILED")
        print(json.dumps(result))
        raise SystemExit(0 if well else 1)
