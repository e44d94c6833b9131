"""The bench of all mixers in tiny form: its figures are what it says they are."""

import contextlib
import importlib.util
import json

import pytest
import torch
from tqdm import tqdm

from bench import mixers as bench
from bench.mixers import FULL, MORE, MixersConfig, Run, child, expected, exponent, in_turns, peak, report
from engine.cli import parse
from mixers import MIXERS
from mixers.mixer import Parallel
from ops.positions import Positions

CPU = torch.device("cpu")


def held(n: int) -> int | None:
    """What `peak` says of a call that holds n bytes at most, in two blocks, the first of which is freed before the third."""
    def call():
        a, b = (torch.ones(n // 8) for _ in "ab")
        del a
        return b + 1
    return peak(call, CPU)[0]


@pytest.mark.parametrize("b", [0.0, 1.0, 1.5, 2.0])
def test_the_exponent_is_found(b):
    sizes = [256, 1024, 4096, 16384]
    assert exponent(sizes, [3e-7 * n**b for n in sizes]) == pytest.approx(b, abs=1e-9)
    assert exponent(sizes, [77.0, *(3e-7 * n**b for n in sizes[1:])]) == pytest.approx(b, abs=1e-9)       # short ones do not count
    assert exponent(sizes, [*(3e-7 * n**b for n in sizes[:3]), None]) == pytest.approx(b, abs=1e-9)       # nor does what is missing
    assert exponent(sizes, [1.0, None, None, None]) is None


def test_a_known_allocation_is_measured():
    """In whole processes of their own, as the bench measures."""
    with child(CPU) as run:
        run(held, 1 << 20)
        for n in (256 << 20, 64 << 20, 16 << 20, 16 << 20):       # the larger before hides nothing
            assert run(held, n) == pytest.approx(n, rel=0.1)


@pytest.mark.parametrize("word", bench.default_words())
def test_itself_and_its_projections_are_the_mixer(word):
    """In outputs, and in the gradients of what the projections give; a second call changes nothing."""
    torch.manual_seed(0)
    x, weight = torch.randn(1, 70, bench.C, requires_grad=True), torch.randn(1, 70, bench.C)
    whole, inner = (bench.make(word, 70, CPU, torch.float32) for _ in "ab")
    assert not isinstance(whole, Parallel)
    given, read = bench.without_projections(inner), {}               # what each projection reads: x, or a mix of it with what came before

    def note(m, inputs) -> None:
        read.setdefault(m, inputs[0].detach())
    for name, m in whole.named_modules():
        if isinstance(m, torch.nn.Linear) and m.in_features == bench.C and not name.endswith("out"):
            m.register_forward_pre_hook(note)
    y = whole(x, Positions(1, 70, CPU))
    for _ in range(2):
        torch.testing.assert_close(whole.out(inner(x, Positions(1, 70, CPU))), y)
    assert given and sum(m.weight.numel() for m in whole.modules() if isinstance(m, torch.nn.Linear) and m.in_features == bench.C) > bench.C**2
    (y * weight).sum().backward()
    (whole.out(inner(x, Positions(1, 70, CPU))) * weight).sum().backward()
    assert len(read) == len(given)
    reach = [(m, t) for m, t in zip(read, given) if t.grad is not None]          # what only other projections read has none
    assert reach
    for m, t in reach:
        torch.testing.assert_close(t.grad[0].T @ read[m][0], m.weight.grad)


def once(calls, device, failed, **more):
    return in_turns(calls, device, failed, least=1, seconds=0, most=1)


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_runs_at_tiny_sizes_and_writes_every_word(whole, tmp_path, capsys, monkeypatch):
    """Not whole: memory in this process, where its figures say little, and each call timed once."""
    if not whole:
        monkeypatch.setattr(bench, "in_turns", once)
        monkeypatch.setattr(bench, "child", lambda device: contextlib.nullcontext(lambda f, *a: f(*a)))
    config = MixersConfig(min_T=16, max_T=64, step=2, decode_T=96, matrix_T=512, out=str(tmp_path), device="cpu")
    result = bench.main(config)
    out = capsys.readouterr().out
    assert json.loads((tmp_path / "mixers.json").read_text()) == json.loads(json.dumps(result)) and not result["left_out"]
    assert (tmp_path / "mixers.png").exists() == bool(importlib.util.find_spec("matplotlib"))
    words = {w.partition("(")[0] for w in result["words"]}
    assert words == {"full ", *MIXERS} and set(MORE) <= set(result["words"]) and all(w in out for w in result["words"])
    rows = {(r["word"], r["T"]): r for r in result["rows"]}
    for word in result["words"]:
        for T in (16, 32, 64):
            row = rows[word, T]
            assert row["itself_s"] > 0 and row["peak_bytes"] is not None and (word == FULL or (row["mixer_s"] > 0 and row["decode_s"] > 0 and row["state_bytes"] > 0))
        assert word == FULL or rows[word, 96]["decode_s"] > 0
    assert rows["attention", 64]["state_bytes"] == 2 * 4 * bench.G * bench.D * 65
    assert result["matrix"][0]["matrix_bytes"] == 2**19 and "matrix_peak" in result["matrix"][0] and "524288" not in out and " 32,768.0   by arithmetic" in out


def test_ratios_say_what_was_not_measured_and_goals_what_was_reached():
    result = {"words": [FULL, "nsa"], "sizes": [4096, 16384], "matrix": [], "left_out": [], "dtype": "", "device": "", "torch": "",
              "rows": [{"word": w, "T": T, "itself_s": s} for w, T, s in ((FULL, 4096, 1.0), (FULL, 16384, 16.0), ("nsa", 4096, 2.0), ("nsa", 16384, 8.0))]}
    result |= {"growth": bench.growth(result), "ratios": bench.ratios(result)}
    text = report(result)
    assert "nsa against full (SDPA), itself at 16,384: 2.00 times as fast (goal 2: reached)" in text
    assert "'attention(window=512)' was not measured" in text and "nsa against attention, the next token at 65,536: skipped" in text
    assert [round(g["itself_s"], 3) for g in result["growth"]] == [2, 1]


def test_what_a_call_will_take_is_told_by_the_two_before():
    assert expected([], 4096) == 0 and expected([(1024, 1.0)], 4096) == 16
    for seconds, want in ((4.0, 16), (2.0, 8), (8.0, 64), (100.0, 1600)):            # linear, less, between, more than quadratic
        assert expected([(1024, 1.0), (4096, seconds)], 16384) == pytest.approx(want)


def test_what_is_too_long_or_fails_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "child", lambda device: contextlib.nullcontext(lambda f, *a: f(*a)))
    run = Run(MixersConfig(min_T=16, max_T=64, step=2, decode_T=0, matrix_T=0, longest=1e-9, out=str(tmp_path)), ["attention"], CPU)
    run.alone(tqdm(disable=True))
    assert [(r["word"], r["T"]) for r in run.result["left_out"]] == [(w, T) for w in (FULL, "attention") for T in (32, 64)]
    assert [(r["word"], r["T"]) for r in run.result["rows"]] == [(FULL, 16), ("attention", 16)]
    calls = {"good": lambda: 1, "bad": lambda: (_ for _ in ()).throw(RuntimeError("no kernel\nhere"))}
    assert set(in_turns(calls, CPU, lambda word, e: run.failed(16, word, e), seconds=0)) == {"good"}
    assert run.result["left_out"][-1] == {"word": "bad", "T": 16, "why": "RuntimeError: no kernel"}


def test_a_wrong_word_is_one_line(capsys):
    with pytest.raises(ValueError, match="unknown mixer 'atention': did you mean 'attention'"):
        bench.main(MixersConfig(words="atention", device="cpu"))
    with pytest.raises(SystemExit):
        parse(MixersConfig, ["--max_T=8"])
    assert "max_T=8 must be at least 256" in capsys.readouterr().err


def test_chunks_against_loops_are_measured(capsys):
    from bench.recurrences import RecurrencesConfig
    from bench.recurrences import main as measure
    found = measure(RecurrencesConfig(T=6, heads=1, device="cpu"))
    assert [r["operation"] for r in found][-2:] == ["selective scan", "conv1d, blocks"] and len(found) == 9
    assert all(r[key] > 0 for r in found for key in ("loop_s", "chunks_s", "full_s")) and "rwkv7" in capsys.readouterr().out
