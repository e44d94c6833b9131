"""The checks of a GPU run on a CPU, in tiny form: that they pass where all is well, and fail where something is not."""

import contextlib
import gc
import json
import subprocess
import sys
import weakref
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, needs_loopback, tiny

from bench import checks, gpu_check
from bench.checks import CASES, Check, Failed, Run
from bench.gpu_check import GPT2, LLAMA, GpuCheckConfig, Shape
from config import GPTConfig
from model import GPT
from ops import attend as attention

CPU = torch.device("cpu")
SMALL = GPTConfig(vocab_size=64, block_size=32, n_layer=2, n_head=2, n_kv_head=1, n_embd=32, qk_norm=True)


@pytest.mark.parametrize("check, arguments", [
    (checks.check_dtype, (("float32", "bfloat16"),)), (checks.check_float32_state, (("bfloat16",),)), (checks.check_checkpoint, (2,)), (checks.check_generation, (12,)),
    (checks.check_attention, ("sdpa", tuple(checks.ATTENTION), ("plain", "window in documents", "alibi", "softcap"))), (checks.check_attention, ("flex", (torch.float32,), ("plain", "sinks", "softcap"))),
    (checks.check_recurrences, ("chunked", torch.float32, 70)), (checks.check_recurrences, ("auto", torch.bfloat16, 70)),
])
def test_the_checks_pass_where_all_is_well(check, arguments):
    assert check(CPU, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["attention", "attention(window=32) attention"])
def test_compile_shares_graphs(layers):
    assert "2 graphs" in checks.check_compile(CPU, layers)


@pytest.mark.slow
@needs_loopback
@pytest.mark.parametrize("compile", [False, True])
def test_ddp_of_one_rank(compile):
    assert checks.check_ddp(CPU, compile=compile).startswith("gloo")


@pytest.mark.slow
def test_the_command_says_what_it_skips_and_ends_well(tmp_path):
    run = subprocess.run([sys.executable, "-m", "bench.gpu_check", "--device=cpu", f"--json={tmp_path / 'r.json'}"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "skipped  needs CUDA" in run.stdout and "FAILED\n" in run.stdout
    assert json.loads(run.stdout.splitlines()[-1]) == json.loads((tmp_path / "r.json").read_text())


@pytest.mark.parametrize("change, dtype, case", [
    (dict(window=17), torch.bfloat16, "window"), (dict(window=15), torch.float32, "window in documents"), (dict(sinks=2), torch.bfloat16, "sinks"),
    (dict(softcap=0.0), torch.float32, "softcap"), (dict(slopes=None), torch.bfloat16, "alibi"), (dict(scale=0.126), torch.float32, "plain"),
])
def test_a_backend_that_is_slightly_wrong_is_caught(monkeypatch, change, dtype, case):
    right = attention.flex
    monkeypatch.setitem(attention.BACKENDS, "flex", lambda *a: right(*a[:5], replace(a[5], **change)))
    with pytest.raises(Failed, match=f"{case} in {str(dtype)[6:]}"):
        checks.check_attention(CPU, "flex", (dtype,), (case,))


def test_a_recurrence_that_is_slightly_wrong_is_caught(monkeypatch):
    right = checks.delta_rule
    monkeypatch.setattr(checks, "delta_rule", lambda q, k, v, beta, g, at, backend: right(q, k, v, beta * (1 if backend == "naive" else 1.1), g, at, backend=backend))
    with pytest.raises(Failed, match=r"tolerance: delta \(.*, gated delta \(.*, kda in documents \("):
        checks.check_recurrences(CPU, "chunked", torch.float32, 40)


def test_nan_and_tf32_are_caught(monkeypatch):
    right = attention.flex
    rough = lambda t: (t.view(torch.int32) & ~0x1FFF).view(torch.float32)        # 10 bits of mantissa, as TF32 has
    for wrong in (lambda q, *a: right(q, *a) * float("nan"), lambda q, k, *a: right(rough(q), rough(k), *a)):
        monkeypatch.setitem(attention.BACKENDS, "flex", wrong)
        with pytest.raises(Failed, match="plain in float32"):
            checks.check_attention(CPU, "flex", (torch.float32,), ("plain",))


@pytest.mark.parametrize("half, reason", [
    (Run(None, [3.0, 2.5, 2.0], 0, ""), ""), (Run(None, [3.0, 2.5, 2.1], 0, ""), "5.00% from float32's"), (Run(None, [3.0, 2.5, 2.1], 1, ""), ""),
    (Run(None, [3.0, 2.5, 2.9], 0, ""), "the loss goes from 3.000 to 2.900"), (Run(None, [3.0, 2.5, float("nan")], 0, ""), "to nan"), (Run(None, [3.0, float("nan"), 2.0], 0, ""), "inf"),
    (Run(None, [3.0, 2.5, 2.0], 4, ""), "4 of 3 steps"), (Run(None, [3.0, 2.0], 0, ""), "inf"),
])
def test_curves_that_part_are_caught(monkeypatch, half, reason):
    monkeypatch.setattr(checks, "run", lambda folder, device, name, dtype: half if dtype == "float16" else Run(None, [3.0, 2.5, 2.0], 0, ""))
    with pytest.raises(Failed, match=reason) if reason else contextlib.nullcontext():
        checks.check_dtype(CPU, ("float32", "float16"))


def test_a_compiler_that_gives_up_is_a_failure(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model: lambda *a, **k: (_ for _ in ()).throw(RuntimeError("no compiler")))
    with pytest.raises(Failed, match="gave up: .*no compiler"):
        checks.check_compile(CPU, steps=2)


def test_what_fails_is_one_line_and_the_rest_goes_on(monkeypatch, capsys):
    def raises(e):
        def check(device):
            raise e
        return check

    todo = [Check("one", raises(Failed("too far"))), Check("two", raises(RuntimeError("broken\nat length"))), Check("three", lambda device, n: f"{n} done", (3,)),
            Check("four", raises(AssertionError()), skipped="needs CUDA"), Check("five", raises(AssertionError()))]
    monkeypatch.setattr(gpu_check, "checks", lambda device: todo)
    result, well = gpu_check.main(GpuCheckConfig(device="cpu"))
    assert not well and result["failed"] == ["one", "two", "five"]
    assert [(c["status"], c["detail"]) for c in result["checks"]] == [
        ("FAILED", "too far"), ("FAILED", "RuntimeError: broken"), ("ok", "3 done"), ("skipped", "needs CUDA"), ("FAILED", "AssertionError: no reason given")]
    out = capsys.readouterr().out.splitlines()
    assert sum("FAILED" in line for line in out) == 3 and [line[2:27].strip() for line in out if line.startswith("  training")] == [f"training {s.name}" for s in gpu_check.SHAPES]
    assert gpu_check.main(GpuCheckConfig(device="cpu", only="speed"))[1]


def test_every_case_is_tried_by_some_backend():
    for name, case in CASES.items():
        assert checks.one_attention(CPU, "reference", torch.float32, False, **case) is not None, name
    assert {c.name for c in checks.checks(CPU) if not c.skipped} >= {"checkpoint", "generation", "attention: flex"} and not [c for c in checks.checks(torch.device("cuda")) if c.skipped == "needs CUDA"]


@pytest.mark.parametrize("shape", [dict(), dict(tie_embeddings=False), dict(n_kv_head=2, qk_norm=True), dict(mlp="gelu", norm="layernorm", bias=True)])
@pytest.mark.parametrize("T", [64, 256])
def test_mfu_counts_6_n_and_12_l_c_t(shape, T):
    """N: the weights that multiply, so the tied head counts, an embedding of its own, which is looked up, does not."""
    model = tiny(**shape)
    n = sum(p.numel() for p in model.parameters() if p.dim() == 2) - (0 if model.cfg.tie_embeddings else model.wte.weight.numel())
    assert model.flops_per_token(T) == 6 * n + 12 * model.cfg.n_layer * model.cfg.n_embd * T


def test_the_shapes_are_the_sizes_that_they_are_called():
    with torch.device("meta"):
        sizes = [sum(p.numel() for p in GPT(cfg).parameters()) / 1e6 for cfg in (GPT2, LLAMA)]
    assert [round(n) for n in sizes] == [114, 1100]


def test_training_speed_is_printed_and_returned(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "peak_flops", lambda device, dtype: 1e12)
    shapes = [Shape("small", SMALL, 0.45), Shape("wrong", replace(SMALL, attention_backend="flex"))]
    monkeypatch.setattr(gpu_check, "first_rows", lambda shape, dtype, room: 1 if shape.name == "wrong" else 4)
    step = gpu_check.backward
    monkeypatch.setattr(gpu_check, "backward", lambda run, *a: step(run, *a) if run.cfg.attention_backend != "flex" else (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory.")))
    good, bad = gpu_check.training(shapes, CPU, torch.bfloat16, GpuCheckConfig(quick=True), compile=False)
    flops = 6 * good["parameters"] + 12 * 2 * 32 * 32
    assert good["rows"] == 4 and good["tokens_per_s"] == pytest.approx(4 * 32 / good["seconds"]) and good["peak_memory"] is None
    assert good["mfu"] == pytest.approx(good["tokens_per_s"] * flops / 1e12, rel=0.02)          # norms are parameters too
    assert bad == {"name": "wrong", "failed": "OutOfMemoryError: CUDA out of memory."}
    lines = capsys.readouterr().out.splitlines()
    assert "goal on one H200: above 45%" in lines[-2] and "FAILED" in lines[-1]
    assert "56.1%" in gpu_check.row({**good, "mfu": 0.561, "peak_memory": 3 * 2**30}) and " 3.0 " in gpu_check.row({**good, "peak_memory": 3 * 2**30})
    assert " - " in gpu_check.row({**good, "mfu": None})


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), RuntimeError("CUDA error: out of memory")])
def test_rows_are_halved_with_nothing_left_of_the_larger_try(error):
    held = []

    def run(rows):
        gc.collect()
        assert all(ref() is None for ref in held), "the larger try's tensors are still there"
        activations = torch.zeros(rows)
        held.append(weakref.ref(activations))
        if rows > 2:
            raise type(error)(*error.args)
        return {"rows": rows}

    assert gpu_check.largest(run, 16, CPU) == {"rows": 2} and len(held) == 4
    for e, rows in ((RuntimeError("an illegal memory access"), 16), (torch.OutOfMemoryError("out of memory"), 1)):
        with pytest.raises(type(e)):
            gpu_check.largest(lambda rows, e=e: (_ for _ in ()).throw(e), rows, CPU)


def test_the_first_try_is_a_power_of_two_that_grows_with_the_room():
    rows = [gpu_check.first_rows(Shape("", SMALL), torch.bfloat16, room) for room in (0, 2e6, 3e7, 1e12)]
    assert rows[0] == 1 < rows[1] < rows[2] < rows[3] == 1024 and all(n & (n - 1) == 0 for n in rows)
    assert 64 <= gpu_check.first_rows(Shape("", GPT2), torch.bfloat16, 139 * 2**30) <= 256


def test_decoding_is_measured_against_the_bandwidth(capsys):
    result = gpu_check.decoding(SMALL, CPU, 2**20, GpuCheckConfig(quick=True))
    assert [r["dtype"] for r in result["rows"]] == ["bfloat16", "float32"]
    for r, width in zip(result["rows"], (2, 4)):
        matrices = 64 * 32 + 2 * (32 * (2 + 2) * 16 + 32 * 32 + 3 * 32 * 96)
        assert r["bound"] == pytest.approx(result["bytes_per_s"] / (width * (matrices + 2 * 2 * 16 * (16 + 8))))
        assert r["ratio"] == pytest.approx(r["tokens_per_s"] / r["bound"])
    assert capsys.readouterr().out.count("%") == 2


def test_decoding_that_fails_is_one_line_a_dtype(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "decode_speed", lambda cfg, device, dtype, tokens, best: (_ for _ in ()).throw(RuntimeError(f"no kernel for {dtype}\nat length")))
    assert [r["failed"] for r in gpu_check.decoding(SMALL, CPU, 2**20, GpuCheckConfig(quick=True))["rows"]] == [f"RuntimeError: no kernel for {d}" for d in (torch.bfloat16, torch.float32)]
    assert capsys.readouterr().out.count("FAILED") == 2
