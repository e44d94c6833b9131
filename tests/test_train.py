"""Training: gradients, resuming, evaluation, checkpoints, interruption."""

import contextlib
import json
import math
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT, tiny

from config import TrainConfig
from data.loader import FixedWindows
from data.shards import Corpus
from engine import checkpoint
from engine.checkpoint import find_step, load_model, read_progress
from engine.parallel import Ranks
from mixers import MIXERS
from train import backward, train


@pytest.fixture
def config(corpus, tmp_path) -> TrainConfig:
    return TrainConfig(dataset=str(corpus), out_dir=str(tmp_path / "run"), n_layer=2, n_head=2, n_embd=16, block_size=16, batch_size=4,
                       max_iters=12, warmup_iters=3, eval_interval=100, eval_iters=2, log_interval=1, dropout=0.1, device="cpu", dtype="float32", learning_rate=1e-2)


def metrics(out) -> dict[int, dict]:
    """iter -> loss, lr and grad_norm of the training lines."""
    lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    found = [(m["iter"], {k: m[k] for k in ("loss", "lr", "grad_norm", "tokens")}) for m in lines if "loss" in m]
    assert len(dict(found)) == len(found), "a step is logged once"
    return dict(found)


def tensors(step) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file
    return {**load_file(step / "model.safetensors"), **load_file(step / "optimizer.safetensors")}


def same(a: Path, b: Path) -> bool:
    a, b = tensors(find_step(a, "latest")), tensors(find_step(b, "latest"))
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("first, then", [(6, 12), (1, 12), (11, 12)])
def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit(config, first, then):
    """C5, with dropout, and with evaluations at other steps."""
    whole = replace(config, out_dir=config.out_dir + "_whole", lr_decay_iters=12)
    train(whole)
    part = replace(config, lr_decay_iters=12, max_iters=first, eval_interval=5)
    train(part)
    train(replace(part, max_iters=then, init_from="resume"))
    assert metrics(part.out_dir) == metrics(whole.out_dir) and len(metrics(whole.out_dir)) == 12
    assert same(part.out_dir, whole.out_dir)


@pytest.mark.parametrize("word", [*MIXERS, "rwkv6 mlp=rwkv6", "rwkv7 mlp=rwkv7"])
def test_a_run_of_every_mixer_resumes_bit_for_bit(config, word):
    layers, _, mlp = word.partition(" mlp=")
    config = replace(config, layers=layers, mlp=mlp or config.mlp, n_head=4, n_kv_head=2, n_embd=32, lr_decay_iters=4, max_iters=4)
    train(replace(config, out_dir=config.out_dir + "_whole"))
    train(replace(config, max_iters=2))
    train(replace(config, init_from="resume"))
    assert metrics(config.out_dir) == metrics(config.out_dir + "_whole") and same(config.out_dir, config.out_dir + "_whole")


def test_a_run_resumed_twice_and_one_that_was_killed_after_its_checkpoint(config):
    train(replace(config, out_dir=config.out_dir + "_whole", lr_decay_iters=12))
    part = replace(config, lr_decay_iters=12, max_iters=3)
    train(part)
    for n in (7, 12):
        with open(Path(part.out_dir) / "metrics.jsonl", "a") as f:       # what a killed run logged after its last checkpoint
            f.write('{"iter": 8, "loss": 0, "lr": 0, "grad_norm": 0, "tokens": 0}\n')
        train(replace(part, max_iters=n, init_from="auto"))
    assert metrics(part.out_dir) == metrics(part.out_dir + "_whole") and same(part.out_dir, part.out_dir + "_whole")
    assert train(replace(part, max_iters=12, init_from="resume")).iter == 12


def test_the_same_command_twice_gives_the_same_run(config):
    train(config)
    train(replace(config, out_dir=config.out_dir + "_again"))
    train(replace(config, out_dir=config.out_dir + "_other", seed=5))
    assert metrics(config.out_dir) == metrics(config.out_dir + "_again") != metrics(config.out_dir + "_other")


def test_evaluating_changes_nothing_of_the_training(config):
    """C9."""
    config = replace(config, dropout=0.5)
    train(replace(config, eval_interval=1))
    train(replace(config, out_dir=config.out_dir + "_rarely"))
    assert metrics(config.out_dir) == metrics(config.out_dir + "_rarely")


def test_evaluation_is_the_same_each_time_and_without_dropout(config):
    train(replace(config, max_iters=2))
    again = [train(replace(config, eval_only=True, init_from="resume", dropout=d)).val_loss for d in (0.0, 0.5, 0.5)]
    assert len(set(again)) == 1


@pytest.mark.parametrize("masked", [False, True])
def test_cutting_the_rows_into_micro_batches_changes_nothing(masked):
    """C3: gradients, loss and norm of 8 rows as 1 x 8, 2 x 4, 4 x 2, 8 x 1; also with few valid targets in some of them."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randint(65, (8, 16), generator=g), torch.randint(65, (8, 16), generator=g)
    if masked:
        y[0, 3:], y[5], y[6, 1:] = -1, -1, -1
    results = []
    for rows in (8, 4, 2, 1):
        model = tiny().train()
        loss = backward(model, x, y, rows, contextlib.nullcontext, Ranks("cpu"), lambda loss: loss)
        results.append([loss, *(p.grad for p in model.parameters())])
    model = tiny().train()
    loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-1)
    loss.backward()
    for result in results:
        for got, want in zip(result, [loss.detach(), *(p.grad for p in model.parameters())], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_accumulation_is_one_large_batch(config):
    config = replace(config, dropout=0.0, max_iters=4)
    train(config)
    train(replace(config, out_dir=config.out_dir + "_2", batch_size=2, gradient_accumulation_steps=2))
    a, b = metrics(config.out_dir), metrics(config.out_dir + "_2")
    for i in a:
        assert all(a[i][k] == pytest.approx(b[i][k], rel=1e-4) for k in a[i])


def test_a_model_learns_and_best_and_last_are_kept(config):
    done = train(replace(config, max_iters=60, eval_interval=20, dropout=0.0, eval_iters=0))
    out = Path(config.out_dir)
    assert done.val_loss < 0.75 * math.log(20) and done.iter == 60
    losses = [json.loads(line).get("val_loss", 99) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert done.best_val_loss == min(losses) == read_progress(out / f"step_{done.best_iter:06d}").val_loss
    assert (out / "latest").read_text() == "step_000060" and read_progress(find_step(out)).val_loss == done.best_val_loss
    assert {p.name for p in out.glob("step_*")} == {(out / "latest").read_text(), (out / "best").read_text()}
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [m["iter"] for m in lines if "val_loss" in m] == [20, 40, 60] and lines[-2]["tokens"] == 60 * 64


@pytest.mark.parametrize("saved, loaded", [(False, False), (True, False), (False, True), (True, True)])
def test_checkpoints_are_clean_whether_compiled_or_not(config, saved, loaded):
    """C7: four ways; loading is strict, and the tied head stays tied."""
    train(replace(config, max_iters=3, compile=saved))
    model, _ = load_model(config.out_dir)
    assert set(tensors(find_step(config.out_dir))) >= {"wte.weight", "blocks.0.mixer.qkv.weight", "wte.weight.exp_avg"}
    assert model.head.weight.data_ptr() == model.wte.weight.data_ptr()
    assert train(replace(config, max_iters=5, compile=loaded, init_from="resume")).iter == 5


def test_a_compiler_that_does_not_work_is_one_warning(config, monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", lambda model: lambda *a, **k: (_ for _ in ()).throw(RuntimeError("no compiler")))
    assert train(replace(config, compile=True)).iter == 12
    assert capsys.readouterr().err.count("warning: torch.compile does not work here (RuntimeError: no compiler)") == 1


def test_a_compiler_that_fails_later_is_one_warning_and_a_lack_of_memory_is_not_the_compilers(config, monkeypatch, capsys):
    def fails_in_evaluation(model):
        def fast(*args):
            if not torch.is_grad_enabled():
                raise torch._dynamo.exc.BackendCompilerFailed(lambda: 0, RuntimeError("no kernel"), None)
            return model(*args)
        return fast

    def lacks_memory(model):
        def fast(*args):
            raise torch.OutOfMemoryError("out of memory")
        return fast

    monkeypatch.setattr(torch, "compile", fails_in_evaluation)
    assert train(replace(config, compile=True)).iter == 12
    assert capsys.readouterr().err.count("warning: torch.compile does not work here") == 1
    monkeypatch.setattr(torch, "compile", lacks_memory)
    with pytest.raises(torch.OutOfMemoryError):
        train(replace(config, compile=True))


def test_gradients_are_clipped_to_the_norm_asked_for(config, monkeypatch):
    seen = []
    original = torch.optim.AdamW.step
    norm = lambda optimizer: torch.nn.utils.get_total_norm([p.grad for g in optimizer.param_groups for p in g["params"]])
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: seen.append(float(norm(self))) or original(self))
    train(replace(config, grad_clip=0.01, max_iters=3))
    assert seen == pytest.approx([0.01] * 3, rel=1e-3)
    seen.clear()
    train(replace(config, grad_clip=0.0, max_iters=3))
    assert min(seen) > 0.1 and seen == pytest.approx([m["grad_norm"] for m in metrics(config.out_dir).values()])


def test_a_step_without_a_number_is_skipped_and_the_run_goes_on(config, monkeypatch):
    import train as script
    original, calls = script.backward, []

    def sometimes(*args):
        loss = original(*args)
        calls.append(1)
        return loss * float("nan") if len(calls) in (3, 4, 7) else loss

    monkeypatch.setattr(script, "backward", sometimes)
    assert train(config).iter == 12
    lines = metrics(config.out_dir)
    assert [i for i in lines if lines[i]["loss"] is None] == [3, 4, 7]
    assert all(torch.isfinite(p).all() for p in load_model(config.out_dir)[0].parameters())


def test_the_order_of_scaling_and_that_its_state_is_saved(config, monkeypatch):
    """C11: scale, backward, unscale, clip, step, update; with a scaler that works on a CPU."""
    calls = []

    class Scaler:
        def __init__(self, device, enabled):
            assert not enabled and device == "cpu"
            self.factor = 8.0
        def is_enabled(self): return True
        def scale(self, loss): return calls.append("scale") or loss * self.factor
        def unscale_(self, optimizer):
            calls.append("unscale")
            for g in optimizer.param_groups:
                for p in g["params"]:
                    p.grad /= self.factor
        def step(self, optimizer): calls.append("step") or optimizer.step()
        def update(self): self.factor *= 1 if calls.append("update") else 2
        def state_dict(self): return {"factor": self.factor}
        def load_state_dict(self, d): self.factor = d["factor"]

    train(replace(config, max_iters=3, out_dir=config.out_dir + "_plain"))
    monkeypatch.setattr(torch.amp, "GradScaler", Scaler)
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *a: calls.append("clip") or clip(*a))
    train(replace(config, batch_size=2, gradient_accumulation_steps=2, max_iters=2))
    assert calls == ["scale", "scale", "unscale", "clip", "step", "update"] * 2
    assert read_progress(find_step(config.out_dir)).scaler == {"factor": 32.0}
    train(replace(config, batch_size=2, gradient_accumulation_steps=2, max_iters=3, init_from="resume"))
    assert read_progress(find_step(config.out_dir, "latest")).scaler == {"factor": 64.0}


def test_a_run_ends_when_it_gets_no_better(config):
    done = train(replace(config, eval_interval=1, patience=3, learning_rate=0.5, max_iters=200, eval_iters=1))
    assert done.stale == 3 and done.iter == done.best_iter + 3 < 200
    assert find_step(config.out_dir).name == f"step_{done.best_iter:06d}" and find_step(config.out_dir, "latest").name == f"step_{done.iter:06d}"


def test_a_loss_that_is_no_number_stops_the_run_and_leaves_what_was_saved(config):
    train(replace(config, max_iters=2))
    saved = tensors(find_step(config.out_dir))
    with pytest.raises(ValueError, match="lower --learning_rate"):
        train(replace(config, init_from="resume", max_iters=50, learning_rate=1e18, weight_decay=0.0, grad_clip=0.0, warmup_iters=0))
    assert all(torch.equal(t, saved[k]) for k, t in tensors(find_step(config.out_dir, "latest")).items())


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "config.json", "progress.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "other"])
def test_a_damaged_checkpoint_is_one_line(config, file, damage):
    train(replace(config, max_iters=2))
    path = find_step(config.out_dir) / file
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])
    elif file.endswith(".safetensors"):
        from safetensors.torch import load_file, save_file
        save_file({k: t for k, t in load_file(path).items() if not k.startswith("norm.weight")}, path)
    else:
        path.write_text("[]", encoding="utf-8")
    with pytest.raises((ValueError, FileNotFoundError)) as e:
        train(replace(config, init_from="resume"))
    assert "\n" not in str(e.value) and "step_000002" in str(e.value)


def test_a_kill_while_saving_leaves_only_whole_checkpoints(config, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(*args):
        raise Killed

    train(replace(config, max_iters=2))
    for function in ("optimizer_tensors", "write_json", "point"):
        with monkeypatch.context() as m, pytest.raises(Killed):
            m.setattr(checkpoint, function, killed)
            train(replace(config, init_from="resume", max_iters=4))
        assert all(len(list(step.iterdir())) == 5 for step in Path(config.out_dir).glob("step_*"))
        assert read_progress(find_step(config.out_dir, "latest")).iter == 2
    with open(Path(config.out_dir) / "metrics.jsonl", "a") as f:
        f.write('{"iter": 4, "lo')
    assert train(replace(config, init_from="auto", max_iters=4, learning_rate=0.5)).iter == 4
    assert checkpoint.read_config(find_step(config.out_dir, "latest"))["learning_rate"] == 0.5 and len(metrics(config.out_dir)) == 4


def test_checkpoints_that_were_copied_into_the_folder_are_not_lost(config):
    import shutil
    train(replace(config, max_iters=2))
    shutil.copytree(find_step(config.out_dir), Path(config.out_dir + "_copy") / "step_000002")
    train(replace(config, max_iters=1, out_dir=config.out_dir + "_copy"))
    assert read_progress(Path(config.out_dir + "_copy.1") / "step_000002").iter == 2


def test_foreign_ids_outside_the_vocabulary_are_one_line(tmp_path, config):
    import numpy as np
    for name in ("train", "val"):
        np.arange(300, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    foreign = replace(config, dataset=str(tmp_path), max_iters=2, out_dir=str(tmp_path / "run"))
    assert train(foreign).iter == 2
    (tmp_path / "meta.json").write_text('{"vocab_size": 100}')
    with pytest.raises(ValueError, match="outside its vocabulary of 100"):
        train(foreign)


def test_a_reader_that_has_gone_does_not_end_the_run(config):
    run = subprocess.Popen(command(config, max_iters=60, eval_interval=5), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run.stdout.readline()
    run.stdout.close()
    assert "Traceback" not in run.stderr.read() and run.wait() == 0
    assert read_progress(find_step(config.out_dir, "latest")).iter == 60


def test_scratch_moves_an_old_run_aside_and_resume_demands_one(config):
    with pytest.raises(ValueError, match="nothing to resume"):
        train(replace(config, init_from="resume"))
    for _ in range(3):
        train(replace(config, max_iters=1))
    out = Path(config.out_dir)
    assert all(find_step(p) for p in (out, out.with_name("run.1"), out.with_name("run.2")))


def test_resuming_with_another_model_is_refused_and_loses_nothing(config):
    train(replace(config, max_iters=2))
    for wrong in (dict(n_layer=3), dict(layers="attention(window=4)"), dict(block_size=8)):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .*: give that run's preset and flags, or start from scratch"):
            train(replace(config, init_from="resume", **wrong))
    assert train(replace(config, init_from="resume")).iter == 12


def test_starting_from_a_checkpoint_takes_its_model(config, capsys):
    train(replace(config, max_iters=2))
    fine = replace(config, init_from=config.out_dir, out_dir=config.out_dir + "_fine", n_layer=5, bias=True, block_size=8, max_iters=1, learning_rate=1e-9, weight_decay=0.0)
    train(fine)
    assert "n_layer=2, as in" in capsys.readouterr().err
    a, b = load_model(config.out_dir)[0], load_model(fine.out_dir)[0]
    assert b.cfg.n_layer == 2 and not b.cfg.bias and b.cfg.block_size == 8
    assert all((p - q).abs().max() < 1e-6 for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("wrong, message", [
    (dict(vocab_size=5), "vocab_size=5 is smaller than"), (dict(dataset="no/where"), "there is no corpus"), (dict(device="tpu"), "is no device"),
    (dict(device="cuda:99"), "not on this machine"), (dict(layers="attn"), "did you mean 'attention'?"), (dict(block_size=10**6), "needs at least block_size + 1"),
])
def test_what_cannot_be_run_is_one_line_and_touches_nothing(config, wrong, message):
    train(replace(config, max_iters=1))
    before = sorted(p for p in Path(config.out_dir).parent.rglob("*"))
    with pytest.raises(ValueError) as e:
        train(replace(config, **wrong))
    assert message in str(e.value) and "\n" not in str(e.value)
    assert sorted(p for p in Path(config.out_dir).parent.rglob("*")) == before


def test_a_padded_vocabulary_trains(config):
    train(replace(config, max_iters=1, vocab_size=64))
    assert load_model(config.out_dir)[0].cfg.vocab_size == 64


def test_a_split_of_one_window_trains(tmp_path, config):
    from data.build import build
    from data.documents import Document
    folder = build(tmp_path / "small", lambda: [Document("", ["abcdefghijklmnopqrstuvwxyz" * 2])], "char", val_fraction=0.5)
    assert len(Corpus(folder).split("val")) == 26
    small = replace(config, dataset=str(folder), block_size=25, max_iters=3)
    assert train(small).iter == 3
    with pytest.raises(ValueError, match="block_size . 1 = 27"):
        train(replace(small, block_size=26))


def test_a_full_disk_leaves_the_checkpoint_before(config, monkeypatch):
    train(replace(config, max_iters=2))
    original = checkpoint.save_file

    def full(tensors, path, metadata):
        original(tensors, path, metadata)
        if "optimizer" in path.name:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="the one before it is untouched"):
        train(replace(config, init_from="resume", max_iters=4))
    monkeypatch.undo()
    assert [p.name for p in Path(config.out_dir).glob("*step*")] == ["step_000002"]
    assert train(replace(config, init_from="resume", max_iters=4)).iter == 4


def command(config: TrainConfig, **changes) -> list[str]:
    plain = TrainConfig()
    fields = {k: v for k, v in replace(config, **changes).__dict__.items() if v != getattr(plain, k)}
    return [sys.executable, str(ROOT / "train.py"), *[f"--{k}={v}" for k, v in fields.items()]]


def wait_for(path: Path, text: str) -> None:
    for _ in range(600):
        if path.exists() and text in path.read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"{path} never had {text}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_says_how_to_go_on_and_goes_on_exactly(config, number):
    config = replace(config, lr_decay_iters=40, max_iters=100_000)
    run = subprocess.Popen(command(config), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(Path(config.out_dir) / "metrics.jsonl", '"iter": 5,')
    run.send_signal(number)
    out = run.communicate(timeout=60)[0]
    assert run.returncode == 0 and "--init_from=resume" in out
    n = read_progress(find_step(config.out_dir, "latest")).iter
    train(replace(config, init_from="resume", max_iters=n + 3))
    train(replace(config, out_dir=config.out_dir + "_whole", max_iters=n + 3))
    assert metrics(config.out_dir) == metrics(config.out_dir + "_whole")


@pytest.mark.slow
def test_killed_at_any_moment_the_checkpoint_loads(config):
    """kill -9, twenty times, while every step is saved."""
    config = replace(config, eval_interval=1, eval_iters=1, max_iters=100_000, init_from="auto")
    done = 0
    for i in range(20):
        run = subprocess.Popen(command(config), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if i == 0:
            wait_for(Path(config.out_dir) / "metrics.jsonl", '"iter": 2,')
        time.sleep(3.0 + 0.137 * i)
        run.kill()
        run.wait()
        step = find_step(config.out_dir, "latest")
        load_model(step)
        assert read_progress(step).iter >= done
        done = read_progress(step).iter
    assert train(replace(config, max_iters=done + 1, eval_interval=100)).iter == done + 1


def test_evaluation_covers_the_whole_split_once(corpus, config):
    train(replace(config, max_iters=2, eval_iters=0))
    from eval import EvalConfig, evaluate
    result = evaluate(EvalConfig(checkpoint=config.out_dir, device="cpu"))
    model, tokenizer = load_model(config.out_dir)
    split = Corpus(corpus).split("val")
    ids = torch.from_numpy(split.read(0, len(split)))
    nats = 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, 16):
            window = ids[start:start + 17]
            nats += float(model(window[None, :-1], window[None, 1:])) * (len(window) - 1)
    assert result["tokens"] == len(ids) - 1 and result["loss"] == pytest.approx(nats / (len(ids) - 1), rel=1e-5)
    size = len(tokenizer.decode(ids[1:].tolist()).encode())
    assert result["bytes"] == size and result["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert result["loss"] == pytest.approx(read_progress(find_step(config.out_dir)).val_loss, rel=1e-5)
    assert sum(int((y >= 0).sum()) for _, y in FixedWindows(split, 16, 3)) == len(ids) - 1
