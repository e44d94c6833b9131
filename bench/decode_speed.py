"""Generation against its limit and its rivals, the same shape with random weights, in one run: our engine in each width of weights,
recomputation without a cache, Hugging Face's generate (if transformers is installed) and llama.cpp (if llama-cpp-python and gguf are).

The limit is memory's: a token reads every weight of the linear layers once, and the filled part of the cache, at the best rate at which
this machine reads as much random data.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import mmap
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from config.check import check_fields, check_range
from engine.cli import Repeated, parse

WIDTHS = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.625}      # bytes a weight


@dataclass
class DecodeConfig:
    """Tokens a second (defaults: GPT-2's 124 M shape)."""

    contexts: Repeated[int] = ()
    """tokens before the next one (none: 16 256 1000)"""
    batches: Repeated[int] = ()
    """texts side by side (none: 1 16)"""
    widths: Repeated[str] = ()
    """of the weights (none: float32 bfloat16 int8 int4)"""
    n_layer: int = 12
    """blocks"""
    n_head: int = 12
    """heads"""
    n_embd: int = 768
    """width"""
    vocab_size: int = 50304
    """tokens in the vocabulary"""
    repeats: int = 12
    """tokens of each measurement, whose median counts"""
    compile: bool = False
    """our engine with its step compiled, too: a minute more for each width"""
    rivals: bool = True
    """recomputation, Hugging Face and llama.cpp too"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps"""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("n_layer", "n_head", "n_embd", "vocab_size"):
            check_range(self, name, above=0)
        check_range(self, "repeats", least=3)
        if unknown := set(self.widths) - set(WIDTHS):
            raise ValueError(f"widths: there are {', '.join(WIDTHS)}, and no {', '.join(unknown)}")
        if min([*self.contexts, *self.batches], default=1) < 1:
            raise ValueError("contexts and batches must be above 0")


if __name__ == "__main__":
    config = parse(DecodeConfig)

import torch
import torch.nn.functional as F
from torch import nn

from bench.mixers import timed
from engine.decode import for_generation
from engine.device import keep_memory, pick_device
from engine.generate import Batch, Options, prefill
from model import GPT, GPTConfig
from ops.few_rows import BITS, FewRows

Speeds = dict[tuple[int, int], float]          # (batch, context) -> tokens a second


def median_seconds(f: Callable[[], object], repeats: int, device: torch.device) -> float:
    return sorted(timed(f, device) for _ in range(repeats))[repeats // 2]


def read_rate(size: int, device: torch.device) -> float:
    """Bytes a second at which `size` bytes of random numbers are read: the best of a sum, a largest, a product with a vector; in plain
    and, where the system gives them, huge pages."""
    n = size // 4 // 1024 * 1024
    blocks = [torch.rand(n, device=device)]
    if device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE"):
        huge = mmap.mmap(-1, 4 * n)
        huge.madvise(mmap.MADV_HUGEPAGE)
        blocks.append(torch.frombuffer(huge, dtype=torch.float32).copy_(blocks[0]))
    vector = torch.rand(1024, device=device)
    ways: list[Callable[[torch.Tensor], object]] = [torch.sum, torch.amax, lambda x: x.view(-1, 1024) @ vector]
    return 4 * n / min(timed(lambda way=way, x=x: way(x), device) for way in ways for x in blocks for _ in range(6))  # type: ignore[misc]


def half(width: str, device: torch.device) -> bool:
    """Whether activations and cache are in bfloat16; on a CPU the rounded weights' are in float32."""
    return width == "bfloat16" or (width in BITS and device.type != "cpu")


def make(config: DecodeConfig, width: str, device: torch.device) -> GPT:
    torch.manual_seed(0)
    room = max(config.contexts) + config.repeats + 8
    model = GPT(GPTConfig(vocab_size=config.vocab_size, n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd, mlp="gelu_tanh",
                          norm="layernorm", bias=True, position="learned", block_size=-(-room // 64) * 64)).to(device).eval()
    model = model.to(torch.bfloat16) if half(width, device) else model
    if device.type == "cpu" or width in BITS:
        for_generation(model, BITS.get(width))
    return model


@torch.no_grad()
def ours(config: DecodeConfig, model: GPT, device: torch.device, compile: bool = False) -> Speeds:
    """By the engine: its draw, its bookkeeping and all."""
    found: Speeds = {}
    for B in config.batches:
        for T in config.contexts:
            batch = Batch(model, B, compile=compile)
            for i, ids in enumerate(torch.randint(config.vocab_size, (B, T)).tolist()):
                batch.add(i, ids, Options(temperature=0, max_new_tokens=config.repeats + 4), 0)
            for _ in range(3):
                batch.step()
            found[B, T] = B / median_seconds(batch.step, config.repeats, device)
    return found


@torch.no_grad()
def recomputed(config: DecodeConfig, model: GPT, device: torch.device) -> Speeds:
    texts = {T: torch.randint(config.vocab_size, (1, T), device=device) for T in config.contexts}
    return {(1, T): 1 / median_seconds(lambda x=x: model.logits(model.hidden(x)[:, -1]).argmax(), 3, device)  # type: ignore[misc]
            for T, x in texts.items()}


@torch.no_grad()
def hugging_face(config: DecodeConfig, dtype: torch.dtype, device: torch.device) -> Speeds:
    """From one token of `generate` to the next."""
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(0)
    shape = GPT2Config(vocab_size=config.vocab_size, n_positions=max(config.contexts) + config.repeats + 8, n_embd=config.n_embd,
                       n_layer=config.n_layer, n_head=config.n_head, bos_token_id=None, eos_token_id=None)
    model: Any = GPT2LMHeadModel(shape)
    model = model.to(device, dtype).eval()
    found: Speeds = {}
    for B in config.batches:
        for T in config.contexts:
            x, times = torch.randint(config.vocab_size, (B, T), device=device), list[float]()
            model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=config.repeats + 2, do_sample=False, pad_token_id=0,
                           logits_processor=[lambda ids, scores, times=times: (times.append(time.perf_counter()), scores)[1]])
            steps = sorted(b - a for a, b in zip(times[1:], times[2:]))
            found[B, T] = B / steps[len(steps) // 2]
    return found


def llama_cpp(config: DecodeConfig, width: str, folder: Path) -> tuple[Speeds, float]:
    """A GPT-2 of random weights as GGUF; Q8_0 and Q4_0 are its int8 and int4. And the seconds that the longest prompt takes."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter, quants
    from llama_cpp import Llama
    kind = {"float32": GGMLQuantizationType.F32, "bfloat16": GGMLQuantizationType.BF16, "int8": GGMLQuantizationType.Q8_0,
            "int4": GGMLQuantizationType.Q4_0}[width]
    C, room, draws = config.n_embd, max(config.contexts) + config.repeats + 8, np.random.default_rng(0)
    path = folder / f"{width}.gguf"
    w = GGUFWriter(str(path), "gpt2")
    w.add_context_length(room)
    w.add_embedding_length(C)
    w.add_block_count(config.n_layer)
    w.add_feed_forward_length(4 * C)
    w.add_head_count(config.n_head)
    w.add_layer_norm_eps(1e-5)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_merges(["a b"])
    w.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    w.add_token_types([1] * config.vocab_size)

    def put(name: str, *shape: int) -> None:
        x = (draws.standard_normal(shape) * 0.02).astype(np.float32)
        if len(shape) == 2 and name != "position_embd.weight":
            w.add_tensor(name, quants.quantize(x, kind), raw_dtype=kind)
        else:
            w.add_tensor(name, x)

    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (config.vocab_size, C), "position_embd.weight": (room, C),
                                          "output_norm.weight": (C,), "output_norm.bias": (C,)}
    for i in range(config.n_layer):
        for name, shape in {"attn_qkv": (3 * C, C), "attn_output": (C, C), "ffn_up": (4 * C, C), "ffn_down": (C, 4 * C),
                            "attn_norm": (C,), "ffn_norm": (C,)}.items():
            shapes |= {f"blk.{i}.{name}.weight": shape, f"blk.{i}.{name}.bias": shape[:1]}
    for name, shape in shapes.items():
        put(name, *shape)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    threads = torch.get_num_threads()
    llama = Llama(str(path), n_ctx=room, n_threads=threads, n_threads_batch=threads, verbose=False)
    found: Speeds = {}

    def prompt(T: int) -> None:
        llama.reset()
        llama.eval(draws.integers(config.vocab_size, size=T).tolist())

    for T in config.contexts:
        prompt(T)
        found[1, T] = 1 / median_seconds(lambda: llama.eval([1]), config.repeats, torch.device("cpu"))
    path.unlink()
    return found, median_seconds(lambda: prompt(max(config.contexts)), 5, torch.device("cpu"))


def apart(call: Callable[..., Any], *args: Any) -> Any:
    """In a process of its own, None where that is killed: llama.cpp counts on AMX tiles to stay as its threads set them, and torch sets
    them anew. As gcc 12 builds it, its own int8 tiles are an illegal instruction, too."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool, contextlib.suppress(BrokenProcessPool):
        return pool.submit(call, *args).result()
    return None


@torch.no_grad()
def linear_layers(model: GPT, B: int, repeats: int, device: torch.device) -> float:
    """Seconds that a step's products take alone, one after the other."""
    layers = [m for m in model.modules() if isinstance(m, (FewRows, nn.Linear))]
    x = {K: torch.randn(B, 1, K, device=device, dtype=model.wte.weight.dtype) for K in {m.in_features for m in layers}}
    return median_seconds(lambda: [m(x[m.in_features]) for m in layers], repeats, device)


@torch.no_grad()
def prefill_against_products(config: DecodeConfig, model: GPT, device: torch.device) -> tuple[float, float]:
    """Seconds to take a prompt of the longest context in, and of its products and attention alone."""
    T, C, H, dtype = max(config.contexts), config.n_embd, config.n_head, model.wte.weight.dtype
    ids, x = torch.randint(config.vocab_size, (1, T)).tolist(), torch.randn(1, T, C, device=device, dtype=dtype)
    wide, heads = torch.randn(1, T, 4 * C, device=device, dtype=dtype), torch.randn(1, H, T, C // H, device=device, dtype=dtype)
    sizes = [(C, 3 * C), (C, C), (C, 4 * C), (4 * C, C)]
    layers = [[nn.Linear(a, b, device=device, dtype=dtype) for a, b in sizes] for _ in range(config.n_layer)]

    def alone() -> None:
        for four in layers:
            for layer in four:
                layer(wide if layer.in_features > C else x)
            F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)

    run = lambda: prefill(model, ids, T)
    run()
    alone()
    return median_seconds(run, 5, device), median_seconds(alone, 5, device)


def main(config: DecodeConfig) -> list[dict[str, Any]]:
    config = replace(config, contexts=config.contexts or (16, 256, 1000), batches=config.batches or (1, 16),
                     widths=config.widths or tuple(WIDTHS))
    keep_memory()
    device = pick_device(config.device)
    rows: list[dict[str, Any]] = []
    has = lambda name: importlib.util.find_spec(name) is not None
    weights = config.vocab_size * config.n_embd + 12 * config.n_layer * config.n_embd**2
    print(f"{weights / 1e6:.0f} M weights in linear layers, {torch.get_num_threads()} threads; tokens a second (share of memory's limit)")
    print(f"{'':<34}" + "".join(f"{f'{B} x {T:,}':>18}" for B in config.batches for T in config.contexts))

    def tell(name: str, speeds: Speeds, limit: Speeds | None = None) -> None:
        rows.append({"system": name, "tokens_per_s": {f"{B}x{T}": s for (B, T), s in speeds.items()}})
        cell = lambda at: "" if at not in speeds else f"{speeds[at]:.1f}" + (f" ({speeds[at] / limit[at]:.0%})" if limit else "")
        print(f"{name:<34}" + "".join(f"{cell((B, T)):>18}" for B in config.batches for T in config.contexts), flush=True)

    for width in config.widths:
        size = 2 if half(width, device) else 4
        limit: Speeds = {}
        rates: dict[int, float] = {}
        for B in config.batches:
            for T in config.contexts:
                read = WIDTHS[width] * weights + B * T * 2 * config.n_layer * config.n_embd * size
                near = 1 << round(read).bit_length() - 1                       # the rate of half the size or more: caches matter
                rates[near] = rates.get(near) or read_rate(near, device)
                limit[B, T] = B * rates[near] / read
        tell(f"limit, {width}", limit)
        model = make(config, width, device)
        tell(f"Heed, {width}", own := ours(config, model, device), limit)
        B, T = config.batches[0], config.contexts[0]
        alone = linear_layers(model, B, config.repeats, device)
        print(f"    {B} x {T}: {B / own[B, T] / alone:.2f} times its linear layers alone")
        rows.append({"system": f"linear layers, {width}", "seconds": alone})
        if config.compile:
            tell(f"Heed, {width}, compiled", ours(config, model, device, compile=True), limit)
        if width in ("float32", "bfloat16"):
            took, products = prefill_against_products(config, model, device)
            T = max(config.contexts)
            print(f"    a prompt of {T:,}: {T / took:,.0f} tokens/s, {took / products:.2f} times its products and attention alone")
            rows.append({"system": f"prefill, {width}", "seconds": took, "products_s": products})
        if config.rivals and width == "float32":
            tell("  without a cache", recomputed(config, model, device), limit)
        del model
        gc.collect()
        if config.rivals and width in ("float32", "bfloat16") and has("transformers"):
            tell(f"  Hugging Face, {width}", hugging_face(config, getattr(torch, width), device), limit)
        if config.rivals and device.type == "cpu" and has("llama_cpp") and has("gguf"):
            with tempfile.TemporaryDirectory() as folder:
                found = apart(llama_cpp, config, width, Path(folder))
            if not found:
                print(f"  llama.cpp, {width}: its process was killed; where that was AMX, build it with CFLAGS and CXXFLAGS="
                      "'-mno-amx-tile -mno-amx-int8 -mno-amx-bf16'")
                continue
            theirs, prompt = found
            tell(f"  llama.cpp, {width}", theirs, limit)
            print(f"    a prompt of {max(config.contexts):,}: {max(config.contexts) / prompt:,.0f} tokens/s")
            rows.append({"system": f"llama.cpp, prefill, {width}", "seconds": prompt})
    if config.rivals and device.type == "cpu" and not (has("llama_cpp") and has("gguf")):
        print("llama.cpp: pip install llama-cpp-python gguf")
    return rows


if __name__ == "__main__":
    print(json.dumps(main(config)))
