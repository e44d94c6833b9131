"""Trains a GPT: `python train.py config/demo.py --n_layer=4`, or `from train import TrainConfig, train`.

`train` is one function, read downwards: settings, data, model, optimizer, resuming, the loop.
"""

from config import TrainConfig as TrainConfig
from engine.cli import one_line_errors, parse, require_torch

if __name__ == "__main__":
    config = parse(TrainConfig, presets=True)      # before torch is imported, so that --help and mistakes answer at once

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from data.find import find
from data.loader import FixedWindows, Loader
from engine import checkpoint
from engine.checkpoint import Progress
from engine.device import autocast, compiled, keep_memory, pick_device, pick_dtype
from engine.interrupt import Interrupt
from engine.log import Log, say, start_block
from engine.optim import learning_rate, make_optimizer
from engine.start import begin, make_room
from mixers import pattern
from model import GPT
from ops.loss import count_valid


def backward(run: Callable, x: Tensor, y: Tensor, batch_size: int, cast: Callable) -> Tensor:
    """Adds the gradient of the mean loss over all valid targets of y (N, T), in micro-batches of batch_size rows -> that loss.

    The sum over valid targets divided by their number in all micro-batches: how the rows are cut changes nothing.
    """
    n, loss = count_valid(y), torch.zeros((), device=x.device)
    for x_, y_ in zip(x.split(batch_size), y.split(batch_size), strict=True):
        with cast():
            part = run(x_, y_) * (count_valid(y_) / n)
        part.backward()
        loss += part.detach()
    return loss


def train(config: TrainConfig) -> Progress:
    """Runs `config` to its end, or to Ctrl-C, and returns how far it came. ValueError, in one line, for what cannot be run."""
    require_torch()
    pattern(config)                          # the words in `layers`, before anything is read or written
    keep_memory()
    device = pick_device(config.device)

    # data: windows by arithmetic on (seed, step), so that the step alone is the position in it
    corpus = find(config.dataset)
    config, step = begin(config, corpus)     # what init_from says
    dtype = pick_dtype(config.dtype, device, config.n_embd)
    cast = partial(autocast, device, dtype)
    rows = config.batch_size * config.gradient_accumulation_steps
    loader = Loader(corpus.split("train"), config.block_size, rows, config.seed)
    val = FixedWindows(corpus.split("val"), config.block_size, config.batch_size, config.eval_iters or None)

    # model and optimizer
    torch.manual_seed(config.seed)
    model = GPT(config.model()).to(device)
    optimizer = make_optimizer(model, config)
    progress = Progress()
    if step:
        checkpoint.load_weights(model, step)
        if config.init_from in ("resume", "auto"):
            checkpoint.load_optimizer(step, model, optimizer)
            progress = checkpoint.read_progress(step)
    if progress.iter >= config.max_iters and not config.eval_only:
        say(f"{config.out_dir} is at step {progress.iter} of max_iters={config.max_iters}: raise --max_iters to go on")
        return progress
    run = compiled(model, config.compile, device)
    say(start_block(model, config, device, dtype, len(corpus.split("train"))))

    @torch.no_grad()
    def evaluate() -> float:
        """Mean loss over the validation windows, without dropout, touching nothing of the training."""
        model.eval()
        total = n = torch.zeros((), device=device)
        for x, y in val:
            x, y = x.to(device), y.to(device)
            with cast():
                total, n = total + run(x, y) * count_valid(y), n + count_valid(y)
        model.train()
        return float(total / n)

    if config.eval_only:
        progress.val_loss = evaluate()
        say(f"validation loss {progress.val_loss:.4f} nats a token")
        return progress

    out = Path(config.out_dir or "out/default")
    make_room(out, resuming=progress.iter > 0)
    log = Log(config, progress.iter, model.flops_per_token(config.block_size), device, dtype)
    with Interrupt() as stop:
        for i in range(progress.iter, config.max_iters):
            started = time.perf_counter()
            torch.manual_seed(config.seed + 7919 * (i + 1))     # dropout is a function of the step: resuming needs no generator's state
            lr = learning_rate(config, i)
            for group in optimizer.param_groups:
                group["lr"] = lr

            batch = loader.batch(i).to(device)
            loss = backward(run, batch[:, :-1], batch[:, 1:], config.batch_size, cast)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or float("inf"))
            values = {"loss": float(loss), "lr": lr, "grad_norm": float(norm)}
            if not math.isfinite(values["loss"] + values["grad_norm"]):
                raise ValueError(f"at step {i + 1} the loss is {loss} and the gradient's norm {norm}: lower --learning_rate; "
                                 "what was saved is untouched")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

            n = batch[:, 1:].numel()
            progress.iter, progress.tokens = i + 1, progress.tokens + n
            log.step(i + 1, n, time.perf_counter() - started, {"tokens": progress.tokens, **values})

            # evaluate and save
            last = i + 1 == config.max_iters
            if (i + 1) % config.eval_interval == 0 or last:
                progress.val_loss = evaluate()
                best = progress.best_val_loss is None or progress.val_loss < progress.best_val_loss
                if best:
                    progress.best_iter, progress.best_val_loss = i + 1, progress.val_loss
                log.evaluation(i + 1, {"tokens": progress.tokens, "val_loss": progress.val_loss}, " (best)" if best else "")
            if (i + 1) % config.eval_interval == 0 or last or stop:
                saved = checkpoint.save(out, model, optimizer, config, corpus.tokenizer, progress)
            if stop and not last:
                say(f"{stop.name}: saved {saved}; go on with --init_from=resume and the same command")
                break
    log.close()
    return progress


if __name__ == "__main__":
    with one_line_errors():
        train(config)
