"""What `bench.train_speed` compares with: the 10.7 M shape trained the way the usual script does it on a CPU. float32, eager, the
default allocator, AdamW without fusion, dropout on embeddings, attention weights and both residual branches."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass

from engine.cli import one_line_errors, parse


@dataclass
class BaselineConfig:
    """Trains the baseline and prints one JSON object: seconds of each step, and the validation loss."""

    dataset: str = "shakespeare"
    """a corpus under data/ or a prepared folder"""
    steps: int = 4
    """optimizer steps"""
    batch_size: int = 64
    """rows of a step"""
    val_batches: int = 0
    """batches over which the validation loss is measured at the end"""
    dropout: float = 0.2
    """everywhere"""
    learning_rate: float = 1e-3
    """constant, after a warm-up of 100 steps"""
    seed: int = 1337
    """of weights, data and dropout"""


if __name__ == "__main__":
    config = parse(BaselineConfig)

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.find import find
from data.loader import FixedWindows, Loader

LAYERS, HEADS, WIDTH, CONTEXT = 6, 6, 384, 256     # 10.7 M parameters


class BaselineBlock(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (t.view(B, T, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout.p if self.training else 0.0)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(B, T, C)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Baseline(nn.Module):
    def __init__(self, vocab_size: int, dropout: float):
        super().__init__()
        self.wte, self.wpe, self.dropout = nn.Embedding(vocab_size, WIDTH), nn.Embedding(CONTEXT, WIDTH), nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(BaselineBlock(dropout) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH, bias=False), nn.Linear(WIDTH, vocab_size, bias=False)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * LAYERS) if name.endswith(("out.weight", "down.weight")) else 0.02)
        self.head.weight = self.wte.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.dropout(self.wte(x) + self.wpe(torch.arange(x.shape[1])))
        return F.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), y.flatten())


def main(config: BaselineConfig) -> dict:
    corpus = find(config.dataset)
    torch.manual_seed(config.seed)
    model = Baseline(corpus.vocab_size, config.dropout)
    decayed, rest = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], betas=(0.9, 0.99))
    loader = Loader(corpus.split("train"), CONTEXT, config.batch_size, config.seed)
    seconds = []
    for i in range(config.steps):
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * min(1, (i + 1) / 101)
        batch = loader.batch(i)
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - start)
        print(f"baseline: step {i + 1}/{config.steps}, loss {loss.item():.4f}, {seconds[-1]:.2f} s", file=sys.stderr)
    model.eval()
    with torch.no_grad():
        val = [float(model(x, y)) for x, y in FixedWindows(corpus.split("val"), CONTEXT, config.batch_size, config.val_batches)] \
            if config.val_batches else []
    return {"seconds": seconds, "loss": loss.item(), "val_loss": sum(val) / len(val) if val else None}


if __name__ == "__main__":
    with one_line_errors():
        print(json.dumps(main(config)))
