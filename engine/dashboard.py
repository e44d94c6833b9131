"""A run on Weights & Biases: the lines of metrics.jsonl, samples, the settings, the commit and the machine.

One thread does all that wandb does, from a queue: training never waits for it, and nothing that goes wrong in it ends a run.
"""

from __future__ import annotations

import contextlib
import os
import platform
import queue
import shlex
import subprocess
import threading
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from config import TrainConfig
from data.tokenizer import Tokenizer
from engine.generate import generate
from model import GPT

NAMES = {"loss": "train/loss", "val_loss": "val/loss"}
INIT, FINISH = 30, 6     # seconds: for a server to take a run up, and at the end for what it has not taken yet


class Dashboard:
    """`log` a line of metrics.jsonl, `close` at the end. What is resumed at step `start`, with the lines `old` until then, goes on in
    the same wandb run: its id is a file in the run's folder."""

    def __init__(self, config: TrainConfig, start: int, old: list[dict], device: torch.device, say: Callable[[str], None]):
        self.config, self.device, self.say = config, device, say
        self.out = Path(config.out_dir or ".")
        file = self.out / "wandb_id"
        known = start > 0 and file.is_file()
        self.id = file.read_text(encoding="utf-8").strip() if known else uuid.uuid4().hex[:8]
        file.write_text(self.id, encoding="utf-8")
        self.items: queue.SimpleQueue[dict | None] = queue.SimpleQueue()
        self.samples = [[line["iter"], line["tokens"], text] for line in old for text in line.get("samples", [])]
        self.waiting, self.failed = False, False
        self.thread = threading.Thread(target=self.work, name="wandb", daemon=True)
        self.thread.start()
        for line in old:     # wandb may lack the last of them after a kill: logged twice they do no harm
            if not known or line["iter"] > start - config.eval_interval:
                self.log({k: v for k, v in line.items() if k != "samples"})

    def log(self, line: dict) -> None:
        if self.thread.is_alive():
            self.items.put(line)

    def close(self, failed: bool) -> None:
        """Takes a few seconds at most; what no server has taken by then is on the disk."""
        self.failed = failed
        self.items.put(None)
        for _ in range(3):
            self.thread.join(FINISH)
            if self.waiting:
                threading.Thread(target=self.cut, daemon=True).start()
        if self.thread.is_alive():
            self.say("warning: wandb does not come to its end and is left behind; metrics.jsonl has everything")

    def work(self) -> None:
        try:
            import wandb
            from wandb import init  # noqa: F401 - a folder ./wandb of older runs passes for a package, an empty one
        except ImportError:
            return self.say("wandb is not installed, so there is no dashboard: pip install wandb")
        mode: Any = self.config.wandb_mode
        for last in (False, True):
            try:
                settings = wandb.Settings(silent=True, console="off", init_timeout=INIT, finish_timeout=FINISH,
                                          finish_timeout_raises=True, x_transaction_log_flush_interval=1)
                found = wandb.setup(settings).settings.mode                    # WANDB_MODE, or what `wandb offline` has left
                mode = found if mode == "auto" else mode
                if mode == "online" and not wandb.login(prompt=False, verify=False):
                    mode = "offline"
                name = self.config.wandb_run_name or self.out.resolve().name
                self.waiting = mode == "online"
                run = wandb.init(project=self.config.wandb_project, name=name, id=self.id, resume="allow", config=self.about(),
                                 allow_val_change=True, reinit="create_new", mode=mode, settings=settings)
                self.waiting = False
                return self.send(run, wandb.Table)
            except Exception as e:
                self.say(f"warning: wandb has failed ({short(e)}); the run goes on {'without it' if last else 'with it offline'}")
                self.waiting, mode = False, "offline"
                with contextlib.suppress(Exception, SystemExit):
                    wandb.teardown()

    def cut(self) -> None:
        """Makes an init fail that waits for a server, so that the run begins offline. wandb's own process would go on waiting, with
        standard output held open."""
        import wandb
        with contextlib.suppress(Exception):
            wandb.sdk.wandb_setup.singleton()._connection._proc._process.kill()  # type: ignore[union-attr]
        with contextlib.suppress(Exception, SystemExit):
            wandb.teardown()

    def send(self, run: Any, table: Callable) -> None:
        """The queue, to its end."""
        folder = Path(run.dir).parent
        if run.settings.mode == "offline":
            older = [p for p in folder.parent.glob(f"offline-run-*-{self.id}") if any(f.stat().st_size > 7 for f in p.glob("*.wandb"))]
            self.say(f"wandb is offline; to upload the run: wandb sync {shlex.join(map(str, sorted({folder, *older})))}")
        elif run.url:
            self.say(f"wandb: {run.url}")
        run.define_metric("tokens")
        run.define_metric("*", step_metric="tokens")
        run.define_metric("val/loss", step_metric="tokens", summary="min")
        showing = threading.Thread()
        showing.start()
        while (line := self.items.get()) is not None:
            values: dict[str, Any] = {renamed(k): v for k, v in line.items() if isinstance(v, (int, float))}
            if "samples" not in line:
                run.log(values)                         # no step: wandb drops what does not exceed its last one, as after resuming
                continue
            self.samples += [[line["iter"], line["tokens"], text] for text in line["samples"]]
            if not showing.is_alive():                  # the next table has these rows too
                values["samples"] = table(columns=["iter", "tokens", "text"], data=list(self.samples))
                showing = threading.Thread(target=self.show, args=(run, values), daemon=True)
                showing.start()
                showing.join(1)
        showing.join(2)
        try:
            run.finish(exit_code=int(self.failed))
        except Exception as e:                          # most likely a time-out
            self.say(f"warning: not all has reached wandb ({short(e)}); to upload the rest: wandb sync {shlex.quote(str(folder))}")

    def show(self, run: Any, values: dict) -> None:
        """In a thread of its own: for a table, wandb waits for the server."""
        try:
            run.log(values)
        except Exception as e:
            self.say(f"warning: wandb shows no samples ({short(e)})")

    def about(self) -> dict:
        """The settings, and what else the numbers depend on."""
        cuda = self.device.type == "cuda"
        return {**asdict(self.config), "git": git(), "machine": {
            "host": platform.node(), "cpu": cpu(), "device": torch.cuda.get_device_name(self.device) if cuda else self.device.type,
            "ranks": int(os.environ.get("WORLD_SIZE", 1)), "torch": torch.__version__}}


def renamed(key: str) -> str:
    """val_loss/plays -> val/loss/plays"""
    first, slash, rest = key.partition("/")
    return NAMES.get(first, first) + slash + rest


def short(e: Exception) -> str:
    return f"{type(e).__name__}: {' '.join(str(e).split())[:150]}"


def git() -> dict:
    """The commit of this code, and whether files of it were changed since; nothing where there is no git."""
    def ask(*words: str) -> str:
        return subprocess.run(["git", "-C", str(Path(__file__).parent), *words], capture_output=True, stdin=subprocess.DEVNULL,
                              text=True, check=True, timeout=10).stdout.strip()
    try:
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return {}


def cpu() -> str:
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
        return next(line for line in f if line.startswith("model name")).partition(":")[2].strip()
    return platform.processor() or platform.machine()


def sample(model: GPT, tokenizer: Tokenizer) -> list[str]:
    """Two short texts, always with the same draws; the training's random state and mode stay as they are."""
    words = tokenizer.kind != "ids" and not tokenizer.unknown("\n")
    start, training = tokenizer.encode("\n") if words else [tokenizer.eot or 0], model.training
    ids: list[list[int]] = [[], []]
    model.eval()
    try:
        for step in generate(model, [start, start], 100, temperature=0.8, vocab_size=tokenizer.vocab_size):
            for row, i in step.items():
                ids[row].append(i)
    finally:
        model.train(training)
    return [tokenizer.decode(i) for i in ids]
