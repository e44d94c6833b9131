"""How much the KV cache saves: the next token with it against recomputing the whole context, the same weights, in one run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from config.check import check_fields, check_range
from engine.cli import parse


@dataclass
class DecodeConfig:
    """Seconds for the next token at a context, with and without the cache (defaults: GPT-2's 124 M shape, random weights)."""

    context: int = 1000
    """tokens before it"""
    n_layer: int = 12
    """blocks"""
    n_head: int = 12
    """heads"""
    n_embd: int = 768
    """width"""
    vocab_size: int = 50304
    """tokens in the vocabulary"""
    repeats: int = 5
    """recomputations; ten times as many cached tokens"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps"""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("context", "repeats"):
            check_range(self, name, above=0)


if __name__ == "__main__":
    config = parse(DecodeConfig)

import torch

from engine.device import keep_memory, pick_device
from model import GPT, GPTConfig


def median_seconds(f: Callable[[], object], repeats: int, device: torch.device) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        f()
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]


@torch.no_grad()
def main(config: DecodeConfig) -> dict[str, float]:
    keep_memory()
    device = pick_device(config.device)
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=config.vocab_size, n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd, mlp="gelu",
                          block_size=config.context + 10 * config.repeats + 10)).to(device).eval()
    x = torch.randint(config.vocab_size, (1, config.context + 10 * config.repeats + 3), device=device)
    state = model.init_state(1, x.shape[1])
    model(x[:, :config.context], state=state)
    recomputed = lambda: model.logits(model.hidden(x[:, :config.context + 1])[:, -1])     # the head reads the last token alone
    whole = recomputed()
    where = [config.context]

    def cached() -> torch.Tensor:
        where[0] += 1
        return model(x[:, where[0] - 1:where[0]], state=state)[:, -1]

    apart = float((cached() - whole).abs().max())
    with_cache = median_seconds(cached, 10 * config.repeats, device)
    without = median_seconds(recomputed, config.repeats, device)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"context": config.context, "parameters": size // 4, "cached_s": with_cache, "recomputed_s": without,
            "ratio": without / with_cache, "weights_gb_per_s": size / with_cache / 1e9, "largest_difference": apart}


if __name__ == "__main__":
    r = main(config)
    print(f"the next token after {r['context']:,}, {r['parameters'] / 1e6:.0f} M parameters, float32, {torch.get_num_threads()} threads")
    print(f"  recomputing the context   {r['recomputed_s'] * 1e3:9.1f} ms")
    print(f"  with the cache            {r['cached_s'] * 1e3:9.1f} ms   ({r['weights_gb_per_s']:.1f} GB/s of weights)")
    print(f"  ratio                     {r['ratio']:9.1f}      (logits apart by {r['largest_difference']:.1e})")
    print(json.dumps(r))
