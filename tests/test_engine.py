"""Devices, precision, what a run prints and logs."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny

from config import TrainConfig
from engine import device as module
from engine.device import autocast, keep_memory, peak_flops, pick_device, pick_dtype
from engine.log import Log, count, duration, memory_estimate, start_block
from engine.optim import make_optimizer

CPU, CUDA, MPS = (torch.device(d) for d in ("cpu", "cuda", "mps"))


def fake_cuda(monkeypatch, name: str, bf16: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *a: name)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16)


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("asked, device, width, hardware, want", [
    ("auto", CPU, 768, False, F32), ("auto", CPU, 768, True, BF16), ("auto", CPU, 64, True, F32), ("auto", CUDA, 64, True, BF16), ("auto", CUDA, 768, False, F16), ("auto", MPS, 768, True, F32),
    ("bfloat16", CPU, 64, False, BF16), ("bfloat16", CUDA, 768, True, BF16), ("bfloat16", CUDA, 768, False, F16), ("bfloat16", MPS, 768, True, BF16),
    ("float16", CPU, 64, True, BF16), ("float16", CPU, 64, False, F32), ("float16", CUDA, 64, True, F16), ("float16", CUDA, 64, False, F16), ("float16", MPS, 64, True, F32),
    *[("float32", d, 768, h, F32) for d in (CPU, CUDA, MPS) for h in (True, False)],
])
def test_precision_by_device(monkeypatch, capsys, asked, device, width, hardware, want):
    """P71, P82: by table; what was asked for and is not to be had is one line."""
    fake_cuda(monkeypatch, "Tesla V100-SXM2-16GB", hardware)
    monkeypatch.setattr(module, "cpu_multiplies_bf16", lambda: hardware)
    assert pick_dtype(asked, device, width) == want
    assert capsys.readouterr().err.count("\n") == (asked != "auto" and want != getattr(torch, asked))


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert pick_device("auto") == pick_device("cpu") == CPU
    for wrong in ("cuda", "mps", "tpu", "cuda:1", "nonsense:0"):
        with pytest.raises(ValueError, match="device="):
            pick_device(wrong)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device("auto") == MPS
    fake_cuda(monkeypatch, "NVIDIA H200", True)
    assert pick_device("auto") == CUDA
    with pytest.raises(ValueError, match="not on this machine"):
        pick_device("cuda:1")


@pytest.mark.parametrize("name, dtype, want", [
    ("NVIDIA H200", torch.bfloat16, 989e12), ("NVIDIA H100 PCIe", torch.bfloat16, 756e12), ("NVIDIA A100-SXM4-40GB", torch.bfloat16, 312e12),
    ("NVIDIA L4", torch.bfloat16, 121e12), ("NVIDIA L40S", torch.bfloat16, 362e12), ("Tesla V100-SXM2", torch.float16, 125e12), ("NVIDIA H100 NVL", torch.bfloat16, 835e12), ("Some New Card", torch.bfloat16, None), ("NVIDIA RTX A1000", torch.bfloat16, None),
    ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165e12), ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, None), ("NVIDIA GH200 480GB", torch.bfloat16, 989e12),
])
def test_mfu_is_against_the_devices_own_peak_or_left_out(monkeypatch, name, dtype, want):
    """P53."""
    fake_cuda(monkeypatch, name, True)
    assert peak_flops(CUDA, dtype) == want and peak_flops(CPU, dtype) is None


def test_autocast_leaves_weights_and_loss_in_float32():
    model = tiny()
    with autocast(CPU, torch.bfloat16):
        assert model.hidden(torch.zeros(1, 3, dtype=torch.long)).dtype == torch.float32
        loss = model(torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long))
    loss.backward()
    assert loss.dtype == torch.float32 and all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_the_start_block_says_what_will_run():
    model = tiny()
    config = TrainConfig(batch_size=4, gradient_accumulation_steps=2, block_size=32, max_iters=100, n_layer=2, out_dir="out/x", learning_rate=0.125)
    text = start_block(model, make_optimizer(model, config), config, CPU, torch.float32, SimpleNamespace(weights={"x": 1.0}, epochs=lambda n: {"x": (n / 2560, 2560)}))
    for part in ("learning_rate=0.125", "attention by sdpa", "4 rows x 2 x 32 = 256 tokens", "100 steps, 25.6 ktokens, 10 epochs", "AdamW with decay 9 tensors of", "AdamW without decay 5 tensors of 160", "float32", "out/x", "after every 250 steps", "GiB"):
        assert part in text, part


def test_metrics_are_not_rounded_and_speed_leaves_the_first_step_out(tmp_path):
    log = Log(TrainConfig(out_dir=str(tmp_path), log_interval=2, max_iters=4), 0, 1e6, CPU, torch.float32)
    for i, seconds in enumerate((9.0, 0.5, 0.5, 0.5), 1):
        log.step(i, 100, seconds, {"loss": 1 / 3, "lr": 1e-3})
    log.evaluation(4, {"val_loss": 0.123456789012}, "")
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [m["iter"] for m in lines] == [2, 4, 4] and lines[0]["loss"] == 1 / 3 and lines[2]["val_loss"] == 0.123456789012
    assert lines[0]["tokens_per_s"] == lines[1]["tokens_per_s"] == 200


def test_counts_and_durations_for_people():
    assert [count(n).strip() for n in (5, 1234, 1_234_567, 2.5e9)] == ["5", "1.23 k", "1.23 M", "2.5 G"]
    assert [duration(s) for s in (5, 65, 3700)] == ["5 s", "1 min 05 s", "1 h 01 min"]


def test_memory_is_kept_and_measured():
    keep_memory()
    small, large = (memory_estimate(tiny(), TrainConfig(batch_size=b, block_size=64), torch.float32) for b in (1, 8))
    assert small < large < 8 * small
