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
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from data.mixture import Mixture
from engine import checkpoint
from engine.checkpoint import Progress
from engine.device import autocast, compiled, keep_memory, pick_dtype
from engine.interrupt import Interrupt
from engine.log import Log, start_block
from engine.optim import make_optimizer, set_learning_rate
from engine.parallel import Ranks, leave
from engine.start import begin, make_room
from mixers import pattern
from model import GPT
from ops.loss import count_valid
from ops.positions import within_documents

SKIPS = 10   # steps in a row without a number after which a run gives up; float16 needs a few to find its scale


def backward(run: Callable, x: Tensor, y: Tensor, batch_size: int, cast: Callable, ranks: Ranks, scale: Callable) -> Tensor:
    """Adds the gradient of the mean loss over all valid targets of y (N, T), in micro-batches of batch_size rows -> that loss.

    The sum over the valid targets of all micro-batches and ranks, divided by their number: how the rows are cut changes nothing.
    """
    n, loss = ranks.sum(count_valid(y)).clamp(min=1), torch.zeros((), device=x.device)           # DDP: of all ranks
    for i, (x_, y_) in enumerate(zip(x.split(batch_size), y.split(batch_size), strict=True)):
        with ranks.sync(wanted=(i + 1) * batch_size >= len(x)):                                  # DDP: no_sync but for the last
            with cast():
                part = run(x_, y_) * (count_valid(y_) / n)
            scale(part * ranks.size).backward()                                                  # DDP: which averages over ranks
        loss += part.detach()
    return ranks.sum(loss)


def train(config: TrainConfig) -> Progress:
    """Runs `config` to its end, or to Ctrl-C, and returns how far it came. ValueError, in one line, for what cannot be run."""
    require_torch()
    pattern(config)                          # the words in `layers`, before anything is read or written
    keep_memory()
    ranks = Ranks(config.device)             # DDP
    device = ranks.device

    # data: windows by arithmetic on (seed, step), so that the step alone is the position in it
    with ranks.in_turn():                    # DDP: the first prepares, if need be
        corpus = Mixture(config.dataset)
    config, step = begin(config, corpus)     # what init_from says
    dtype = pick_dtype(config.dtype, device, config.n_embd)
    cast = partial(autocast, device, dtype)
    rows = config.batch_size * config.gradient_accumulation_steps
    loader = corpus.train(config.block_size, rows, config.seed, ranks.rank, ranks.size)
    read = lambda i: loader.batch(i).pin_memory() if device.type == "cuda" else loader.batch(i)
    val = corpus.val(config.block_size, config.batch_size, config.eval_iters or None)

    # model and optimizer
    torch.manual_seed(config.seed)
    model = GPT(config.model()).to(device)
    optimizer = make_optimizer(model, config)
    progress = Progress()
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)     # else it passes everything through
    if step:
        checkpoint.load_weights(model, step)
        if config.init_from in ("resume", "auto"):
            checkpoint.load_optimizer(step, model, optimizer)
            progress = checkpoint.read_progress(step)
            if progress.scaler:
                scaler.load_state_dict(progress.scaler)
    if progress.iter >= config.max_iters and not config.eval_only:
        ranks.say(f"{config.out_dir} is at step {progress.iter} of max_iters={config.max_iters}: raise --max_iters to go on")
        return progress
    run = compiled(ranks.wrap(model), config.compile, device)
    if config.documents:
        run = within_documents(run, corpus.tokenizer.eot)
    ranks.say(start_block(model, optimizer, config, device, dtype, corpus, ranks.size))

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        """Mean loss over each corpus's validation windows, without dropout, touching nothing of the training."""
        model.eval()
        losses = {}
        for name, windows in val.items():
            total, n = torch.zeros(2, device=device)
            for x, y in islice(windows, ranks.rank, None, ranks.size):
                x, y = x.to(device), y.to(device)
                with cast():
                    total, n = total + run(x, y) * count_valid(y), n + count_valid(y)
            total, n = ranks.sum(torch.stack([total, n]))
            losses[name] = float(total / n)
        model.train()
        mean = sum(corpus.weights[name] * loss for name, loss in losses.items())
        return {"val_loss": mean} | ({f"val_loss/{name}": loss for name, loss in losses.items()} if len(losses) > 1 else {})

    if config.eval_only:
        losses = evaluate()
        progress.val_loss = losses["val_loss"]
        ranks.say(", ".join(f"{name.replace('val_', 'validation ')} {loss:.4f}" for name, loss in losses.items()) + " nats a token")
        return progress

    out = Path(config.out_dir or "out/default")
    if ranks.first:                          # DDP: one rank logs and saves
        make_room(out, resuming=progress.iter > 0)
    ahead = read(progress.iter)
    log = Log(config, progress.iter, model.flops_per_token(config.block_size) / ranks.size, device, dtype, ranks.first)
    skipped = 0                              # steps in a row whose loss or gradient is no number
    with log, Interrupt() as stop:
        for i in range(progress.iter, config.max_iters):
            started = time.perf_counter()
            torch.manual_seed(config.seed + 7919 * (i + 1) + 104729 * ranks.rank)   # dropout by step: no generator's state to resume
            lr = set_learning_rate(optimizer, config, i)

            batch = ahead.to(device, non_blocking=True)
            loss = backward(run, batch[:, :-1], batch[:, 1:], config.batch_size, cast, ranks, scaler.scale)
            ahead = read(i + 1)                  # while a GPU is at work: float(loss) waits for it
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or float("inf"))
            values = {"loss": float(loss), "lr": lr, "grad_norm": float(norm)}
            skipped = 0 if math.isfinite(values["loss"] + values["grad_norm"]) else skipped + 1
            if skipped == SKIPS:
                raise ValueError(f"loss {loss} and gradient norm {norm} at step {i + 1}, the {SKIPS}th in a row that is no number: "
                                 "lower --learning_rate; what was saved is untouched")
            if not skipped:
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)

            n = rows * config.block_size
            progress.iter, progress.tokens = i + 1, progress.tokens + n
            log.step(i + 1, n, time.perf_counter() - started, {"tokens": progress.tokens, **values})

            # evaluate and save
            last = i + 1 == config.max_iters
            if (i + 1) % config.eval_interval == 0 or last:
                losses = evaluate()
                progress.val_loss = losses["val_loss"]
                best = progress.note(progress.val_loss)
                log.evaluation(i + 1, {"tokens": progress.tokens, **losses}, " (best)" if best else "")
                log.sample(i + 1, progress.tokens, model, corpus.tokenizer)
                last = last or 0 < config.patience <= progress.stale
            leave = ranks.any(bool(stop))    # DDP: all ranks or none
            if ranks.first and ((i + 1) % config.eval_interval == 0 or last or leave):
                progress.scaler = scaler.state_dict() or None
                checkpoint.save(out, model, optimizer, config, corpus.tokenizer, progress)
            if leave and not last:
                ranks.say(f"{stop.name or 'stopped'}: saved step {i + 1} in {out}; go on with --init_from=resume and the same command")
                break
            if last and i + 1 < config.max_iters:
                ranks.say(f"no better loss in {progress.stale} evaluations: the run ends; its best is step {progress.best_iter}")
                break
    return progress


if __name__ == "__main__":
    with one_line_errors():
        train(config)
        leave()                              # DDP
