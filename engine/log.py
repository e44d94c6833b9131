"""What a person sees of a run, and metrics.jsonl for programs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from config import TrainConfig
from data.mixture import Mixture
from data.tokenizer import Tokenizer
from engine.dashboard import Dashboard, sample, short
from engine.device import peak_flops, peak_memory
from model import GPT
from ops import flash

NAMES = {"wte": "embedding", "wpe": "positions", "mixer": "mixers", "mlp": "feed-forward"}


def parameter_table(model: GPT) -> list[tuple[str, int]]:
    """(what, how many parameters), adding up to all of them; a tied head counts once, as the embedding."""
    rows: dict[str, int] = {}
    for name, p in model.named_parameters():
        kind = name.split(".")[2] if name.startswith("blocks.") else name.split(".")[0]
        label = NAMES.get(kind, "norms" if "norm" in kind else kind)
        rows[label] = rows.get(label, 0) + p.numel()
    return list(rows.items())


def memory_estimate(model: GPT, config: TrainConfig, dtype: torch.dtype) -> float:
    """Bytes of a training step, within 20 % of what was measured on a CPU at 5 to 25 M parameters: weights, gradients and two
    moments in float32, what backward needs of one micro-batch, and its logits.

    Kept for backward, a token and block: 8 C + 4 inner numbers (norms' outputs, q, k, v, what attention gives, the feed-forward's
    halves and products), 4 C in float32 (the residual stream, the norms' inputs), and as much again where the products are in
    half precision (what is cast to it).
    """
    half, tokens = dtype != torch.float32, config.batch_size * config.block_size
    kept = sum(8 * model.cfg.n_embd + 4 * b.mlp.down.in_features for b in model.blocks)  # type: ignore[union-attr,operator,misc]
    stream = 4 * model.cfg.n_embd * len(model.blocks)
    weights = (18 if half else 16) * sum(p.numel() for p in model.parameters())
    logits = min(tokens, config.loss_chunk or tokens) * model.cfg.vocab_size * (10 if half else 12)
    return weights + tokens * ((2 if half else 4) * kept + (8 if half else 4) * stream) + logits


def count(n: float) -> str:
    """1234567 -> 1.23 M"""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:.3g} "


def duration(seconds: float) -> str:
    m, s = divmod(round(seconds), 60)
    return f"{m // 60} h {m % 60:02d} min" if m >= 60 else f"{m} min {s:02d} s" if m else f"{s} s"


def optimizer_table(optimizer: torch.optim.Optimizer) -> str:
    """What each optimizer takes, with and without weight decay: every parameter once."""
    rows: dict[str, list[int]] = {}
    for part in getattr(optimizer, "optimizers", [optimizer]):
        for group in part.param_groups:
            row = rows.setdefault(f"{type(part).__name__} with{'' if group['weight_decay'] else 'out'} decay", [0, 0])
            row[0], row[1] = row[0] + len(group["params"]), row[1] + sum(p.numel() for p in group["params"])
    return ", ".join(f"{what} {n} tensors of {count(size).strip()}" for what, (n, size) in rows.items())


def start_block(model: GPT, optimizer: torch.optim.Optimizer, config: TrainConfig, device: torch.device, dtype: torch.dtype,
                corpus: Mixture, ranks: int = 1) -> str:
    """The effective configuration and what the run will take, before it starts."""
    per_step = config.batch_size * config.gradient_accumulation_steps * config.block_size
    total = sum(p.numel() for p in model.parameters())
    backends = ", ".join(dict.fromkeys(b.mixer.backend(device.type, dtype, True) for b in model.blocks))  # type: ignore[operator,union-attr]
    backends = backends.replace("flash", f"flash-attn {flash.version()}")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, {torch.get_num_threads()} threads"
    epochs = ", ".join(f"{e:.2g} epochs of {count(n)}{f'({name})' if len(corpus.weights) > 1 else ''}".strip()
                       for name, (e, n) in corpus.epochs(per_step * config.max_iters).items())
    saves = f"after every {config.eval_interval} steps, at the end, and on Ctrl-C"
    settings = textwrap.wrap(" ".join(f"{key}={value!r}" for key, value in asdict(config).items()), 110, break_on_hyphens=False)
    return "\n".join([
        f"parameters   {count(total)} ({', '.join(f'{what} {count(n).strip()}' for what, n in parameter_table(model))})",
        f"optimizer    {optimizer_table(optimizer)}",
        f"device       {f'{ranks} x ' if ranks > 1 else ''}{name}; products in {str(dtype)[6:]}; attention by {backends}",
        f"a step       {config.batch_size} rows x {config.gradient_accumulation_steps} x {config.block_size} = {per_step:,} tokens, "
        f"{count(per_step * model.flops_per_token(config.block_size))}FLOP",
        f"the run      {config.max_iters:,} steps, {count(per_step * config.max_iters)}tokens, {epochs}",
        f"memory       about {memory_estimate(model, config, dtype) / 2**30:.2g} GiB beside torch itself",
        f"saved        {config.out_dir}, {saves}",
        f"settings     {settings[0]}", *[f"             {s}" for s in settings[1:]],
    ])


def old_lines(path: Path) -> Iterator[dict]:
    """What a run has logged before; a killed one may have left a line half written."""
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and "iter" in line:
            yield line


def say(text: str) -> None:
    """A line on standard output, past the progress bar; that nobody reads it any more (`| head`) does not end a run."""
    with contextlib.suppress(BrokenPipeError):
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()


class Log:
    """metrics.jsonl, a line a `log_interval` and an evaluation, nothing rounded; for people a progress bar, or lines where there is
    no terminal; and wandb where it is asked for. `with` ends it. A resumed run keeps its lines up to the step that it goes on from.
    Not `shown` (another rank shows): nothing."""

    def __init__(self, config: TrainConfig, start: int, flops_per_token: float, device: torch.device, dtype: torch.dtype,
                 shown: bool = True):
        self.shown = shown
        if not shown:
            return
        self.config, self.flops, self.peak = config, flops_per_token, peak_flops(device, dtype)
        self.path = Path(config.out_dir or ".") / "metrics.jsonl"
        kept = [line for line in old_lines(self.path) if line["iter"] <= start] if start else []
        new = self.path.with_name(".metrics.jsonl")
        new.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(new, self.path)
        self.bar = tqdm(total=config.max_iters, initial=start, unit="step", dynamic_ncols=True, disable=None, smoothing=0.05)
        self.tokens, self.seconds, self.first, self.told = 0, 0.0, True, False
        self.device = device
        self.dashboard = Dashboard(config, start, kept, device, say) if config.wandb_log and config.wandb_mode != "disabled" else None

    def write(self, line: dict) -> None:
        if self.dashboard:
            self.dashboard.log(line)
        line = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}    # JSON knows no NaN
        with open(self.path, "a", encoding="utf-8") as f:
            f.write(json.dumps(line) + "\n")

    def step(self, i: int, tokens: int, seconds: float, values: dict) -> None:
        """After optimizer step i (counted from 1) of so many tokens and seconds; `values` are logged as they are."""
        if not self.shown:
            return
        self.bar.update(1)
        if self.first:                     # compilation, first touches: not the speed of the run
            self.first = False
        else:
            self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        if i % self.config.log_interval and i != self.config.max_iters:
            return
        rate = self.tokens / self.seconds if self.seconds else None
        mfu = rate * self.flops / self.peak if rate and self.peak else None
        self.write({"iter": i, **values, "tokens_per_s": rate, **({"mfu": mfu} if mfu else {}), "memory_gb": peak_memory(self.device)})
        text = f"loss {values['loss']:.3f}, lr {values['lr']:.2g}" + (f", {count(rate)}tokens/s" if rate else "")
        text += f", MFU {mfu:.1%}" if mfu else ""
        self.bar.set_postfix_str(text)
        if rate and not self.told:
            left = (self.config.max_iters - i) * tokens / rate
            clock = time.strftime("%H:%M", time.localtime(time.time() + left))
            say(f"the run will take about {duration(left)} more (until {clock}), evaluations aside")
            self.told = True
        if self.bar.disable and i % (10 * self.config.log_interval) == 0:       # no terminal, no bar
            more = f", {duration((self.config.max_iters - i) * tokens / rate)} left" if rate else ""
            say(f"step {i}/{self.config.max_iters}: {text}{more}")
        self.tokens, self.seconds = 0, 0.0

    def evaluation(self, i: int, values: dict, remark: str) -> None:
        if not self.shown:
            return
        self.write({"iter": i, **values})
        say(f"step {i}: validation loss {values['val_loss']:.4f}{remark}")

    def sample(self, i: int, tokens: int, model: GPT, tokenizer: Tokenizer) -> None:
        """For the dashboard, where there is one; what goes wrong is one line."""
        if self.shown and self.dashboard and self.dashboard.thread.is_alive():
            try:
                self.write({"iter": i, "tokens": tokens, "samples": sample(model, tokenizer)})
            except Exception as e:
                say(f"warning: no samples ({short(e)})")

    def close(self, failed: bool = False) -> None:
        if self.shown:
            self.bar.close()
            if self.dashboard:
                self.dashboard.close(failed)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self.close(failed=kind is not None)
