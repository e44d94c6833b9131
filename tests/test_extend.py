"""Longer contexts: how they are measured, LongRoPE's search, and tools.extend."""

import json
import math
import random
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, tiny, tokens

from config import TrainConfig
from data.shards import Split
from data.tokenizer import Bytes, Characters
from engine import context
from engine.checkpoint import find_step, load_model, longer, read_config, read_progress
from engine.longrope import STARTS, Factors, Losses, Plan, known, mutant, search
from ops.rope import rope_scaling

# what is measured

@pytest.mark.parametrize("M, c, stride", [(64, 16, 16), (64, 16, 4), (64, 64, 64), (50, 16, 16), (50, 16, 5), (10, 16, 4)])
def test_windows_score_each_token_once_with_the_context_they_promise(M, c, stride):
    for document in range(2):
        cut = [w for w in context.windows(2, M, c, stride) if w.document == document]
        assert [t for w in cut for t in range(w.first, w.end)] == list(range(M))
        assert all(w.end - w.begin <= c and w.first >= w.begin for w in cut)
        if stride < c:
            assert all(w.first - w.begin >= c - stride for w in cut[1:])
        else:
            assert all(w.first == w.begin for w in cut)


@pytest.mark.parametrize("scaling", ["none", "dynamic(factor=4, original=24)"])
def test_losses_are_those_of_each_window_alone(scaling, monkeypatch):
    """In pieces, batched, with windows of different lengths: as read one by one without a state."""
    model, text = tiny(rope_scaling=scaling), tokens(3, 71)
    for piece in (1024, 7):
        monkeypatch.setattr(context, "PIECE", piece)
        cut = context.windows(3, 70, 32, 12)
        got = context.scored(model, text, cut, rows=4, dtype=torch.float32)
        for w in cut:
            logits = model(text[w.document, None, w.begin:w.end])[0]
            want = torch.nn.functional.cross_entropy(logits, text[w.document, w.begin + 1:w.end + 1], reduction="none")
            torch.testing.assert_close(got[w.document, w.first:w.end], want[w.first - w.begin:], rtol=1e-3, atol=2e-4)


def test_pieces_shrink_so_that_a_mask_stays_bounded():
    for T in (5, 1024, 5000, 131072, 10**7):
        cut = list(context.pieces(T))
        assert cut[0].start == 0 and cut[-1].stop == T and all(a.stop == b.start for a, b in zip(cut, cut[1:]))
        assert max(s.stop - s.start for s in cut) * T <= max(context.PAIRS, T)


def test_positions_fall_into_buckets():
    assert context.buckets(256) == [(0, 64), (64, 128), (128, 256)]
    assert context.buckets(300)[-1] == (256, 300)
    assert context.buckets(50) == [(0, 50)]


@pytest.mark.parametrize("kind", context.KINDS)
@pytest.mark.parametrize("depth", context.DEPTHS)
def test_what_is_to_be_found_stands_once_at_its_depth(kind, depth):
    tokenizer = Bytes()
    text = tokenizer.encode("Nothing to see here. " * 100)
    ids, n = context.asked(kind, tokenizer, text, 400, depth, seed=3)
    assert len(ids) == 400
    answer = tokenizer.decode(ids[-n:])
    whole, fact = tokenizer.decode(ids), context.KINDS[kind](tokenizer, random.Random(f"{kind} {depth} 3"))[0]
    assert fact in whole and whole.count(answer) == {"passkey": 2, "needle": 1}[kind] + 1 and answer.strip() in fact
    place = whole.index(fact)
    rest = 400 - len(fact)
    assert abs(place - depth * rest) < 60
    assert context.asked(kind, tokenizer, text, 400, depth, 4)[0] != ids
    with pytest.raises(ValueError, match="and the context is 20"):
        context.asked(kind, tokenizer, text, 20, depth, 0)


def test_a_vocabulary_without_digits_gets_letters_and_one_without_letters_a_line():
    letters = Characters(sorted(set("The pass key is . Remember it.\nWhat? The leaves are green. The river is wide. The night is long. Day follows abcdefghij")))
    assert context.passkey(letters, random.Random(0))[2].strip().isalpha()
    with pytest.raises(ValueError, match="the vocabulary lacks"):
        context.asked("passkey", Characters("ab"), [0], 500, 0.5, 0)


def test_a_model_that_copies_finds_and_one_that_does_not_fails():
    class Copies(torch.nn.Module):
        """Says what followed the last two tokens before."""

        def __init__(self):
            super().__init__()
            self.wte, self.read = torch.nn.Embedding(256, 1), []

        def init_state(self, B, T, dtype):
            self.read = []

        def hidden(self, x, state=None):
            self.read += x[0].tolist()

        def forward(self, x, state=None):
            out = torch.zeros(1, x.shape[1], 256)
            for i, token in enumerate(x[0].tolist()):
                self.read.append(token)
                for j in range(len(self.read) - 2, 5, -1):
                    if self.read[j - 5:j + 1] == self.read[-6:]:
                        out[0, i, self.read[j + 1]] = 50
                        break
            return out

    ids, n = context.asked("needle", Bytes(), list(b"Nothing to see here. " * 20), 300, 0.3, 0)
    hit, p = context.found(Copies(), ids, n, torch.float32)
    assert hit and p > 0.99
    hit, p = context.found(tiny(vocab_size=256), ids, n, torch.float32)
    assert not hit and p < 0.5


# the search

BEST = Factors(4, tuple(round(1 + 0.23 * i, 2) for i in range(16)))


def distance(point: Factors) -> float:
    """To a known optimum, in logarithms."""
    return sum(math.log(a / b) ** 2 for a, b in zip(point.divisors, BEST.divisors)) + 0.01 * abs(STARTS.index(point.start) - STARTS.index(BEST.start))


def test_the_search_finds_a_known_optimum_and_stays_monotone():
    seen = []
    loss = lambda point: seen.append(point) or distance(point)
    begin, notes = known(32, 1e4, 256, 4.0), []
    best, course = search(loss, begin, 4.0, STARTS, Plan(), memo := {}, notes.append)
    assert len(notes) == Plan().evaluations() and notes[-1] == min(memo.values())
    assert all(point.monotone(5.0) for point in seen) and len(seen) == len(set(seen)) == len(memo) <= Plan().evaluations()
    assert all(a >= b for a, b in zip(course, course[1:])) and course[-1] == memo[best] == min(memo.values())
    assert memo[best] < 0.15 * min(memo[b] for b in begin if b in memo)
    far, _ = search(distance, begin, 4.0, STARTS, Plan(iterations=300), {})
    assert distance(far) < 0.02 and far.start == BEST.start
    assert search(distance, begin, 4.0, STARTS, Plan(), {})[0] == best                        # the seed decides
    assert search(distance, begin, 4.0, STARTS, Plan(seed=1), {})[0] != best


def test_a_stopped_search_goes_on_as_if_it_had_not_been(tmp_path):
    begin, plan = known(32, 1e4, 256, 4.0), Plan(population=12, iterations=6, parents=6, mutations=3, crossovers=3)
    whole = search(distance, begin, 4.0, STARTS, plan, {})
    memo, calls = Losses(tmp_path / "x" / "search.json", {"a": (1, 2)}), 0

    def stops(point):
        nonlocal calls
        calls += 1
        if calls == 20:
            raise KeyboardInterrupt
        return distance(point)

    with pytest.raises(KeyboardInterrupt):
        search(stops, begin, 4.0, STARTS, plan, memo)
    memo.keep()
    memo = Losses(tmp_path / "x" / "search.json", {"a": (1, 2)})
    assert len(memo) == 19
    again = []
    assert search(lambda p: again.append(p) or distance(p), begin, 4.0, STARTS, plan, memo) == whole
    assert len(again) == len(memo) - 19
    with pytest.raises(ValueError, match="other settings"):
        Losses(tmp_path / "x" / "search.json", {"a": 3})


def test_what_gives_no_number_is_the_worst():
    plan = Plan(population=8, iterations=2, parents=4, mutations=2, crossovers=2)
    best, _ = search(lambda p: math.nan if p.start else distance(p), known(32, 1e4, 256, 4.0), 4.0, STARTS, plan, memo := {})
    assert best.start == 0 and max(memo.values()) < math.inf


def test_it_begins_with_the_known_methods_and_mutants_keep_the_order():
    yarn, linear, ntk = known(32, 1e4, 256, 8.0)
    assert yarn.divisors[0] == ntk.divisors[0] == 1 and linear.divisors == (8.0,) * 16 and yarn.divisors[-1] == ntk.divisors[-1] == 8
    w = rope_scaling("yarn(factor=8, original=256)").frequencies(32, 1e4, torch.zeros(1))
    mine = rope_scaling(f"longrope(factor=8, original=256, long={yarn.divisors})").frequencies(32, 1e4, torch.tensor([257]))
    torch.testing.assert_close(mine.flatten(), w, rtol=0.006, atol=0)                      # rounded to 0.01
    draw, point = random.Random(0), yarn
    for _ in range(300):
        point = mutant(point, 10.0, STARTS[:5], draw, 0.3)
        assert point.monotone(10.0) and point.start in STARTS[:5]


# the commands

@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    from train import train
    out = tmp_path_factory.mktemp("extend") / "run"
    train(TrainConfig(dataset=str(corpus), out_dir=str(out), block_size=32, n_layer=2, n_head=2, n_embd=32, max_iters=30, batch_size=8, eval_interval=30,
                      eval_iters=2, device="cpu", dtype="float32"))
    return out


def command(*argv) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *map(str, argv)], capture_output=True, text=True, cwd=ROOT, timeout=300)


def extend(run, out, *argv) -> subprocess.CompletedProcess:
    return command("-m", "tools.extend", "--checkpoint", run, "--out_dir", out, "--factor=4", "--device=cpu", *argv)


@pytest.mark.parametrize("method", ["linear", "ntk", "dynamic", "yarn", "longrope", "llama3"])
def test_each_method_writes_a_checkpoint_for_the_longer_context(run, tmp_path, method):
    from tools.extend import ExtendConfig, main
    step = main(ExtendConfig(checkpoint=str(run), out_dir=str(tmp_path / "x"), method=method, factor=4, device="cpu"))
    model, _ = load_model(tmp_path / "x")
    base, _ = load_model(run)
    assert step == find_step(tmp_path / "x") and model.cfg.block_size == 128 and model.cfg.rope_scaling.startswith(f"{method}(factor=4")
    assert method in ("linear", "ntk") or "original=32" in model.cfg.rope_scaling
    for (name, a), b in zip(model.state_dict().items(), base.state_dict().values()):
        assert torch.equal(a, b), name
    x = tokens(1, 128) % model.cfg.vocab_size
    assert torch.isfinite(model(x)).all() and not torch.allclose(model(x), base(x))
    with pytest.raises(ValueError, match="leave it out, or take the checkpoint that this one was extended from"):
        longer(model.cfg, "yarn(factor=2)")


def test_its_folder_stands_beside_the_run_and_an_unfinished_one_is_of_one_kind(run, tmp_path):
    base = tmp_path / "a"
    shutil.copytree(run, base)
    r = command("-m", "tools.extend", "--checkpoint", base, "--method=ntk", "--factor=1.5", "--device=cpu")
    assert r.returncode == 0 and "--context_lengths 32,48" in r.stdout, r.stderr
    assert load_model(tmp_path / "a-ntk1.5")[0].cfg.block_size == 48
    (tmp_path / "a-ntk1.5" / "latest").unlink()                                        # as if it had been stopped
    r = extend(base, tmp_path / "a-ntk1.5", "--method=ntk")
    assert r.returncode == 2 and "unfinished extension of other settings" in r.stderr
    r = extend(base, tmp_path / "b", "--factor=5000", "--finetune_tokens=100")
    assert r.returncode == 2 and "needs one more than that" in r.stderr and not (tmp_path / "b").exists()
    other = command("train.py", "--init_from=resume", "--dataset", read_config(find_step(base))["dataset"], "--out_dir", tmp_path / "a-ntk1.5")
    assert other.returncode == 2


def test_a_stopped_fine_tune_goes_on_and_a_finished_one_is_not_done_again(run, tmp_path, monkeypatch):
    from tools import extend as tool
    config = tool.ExtendConfig(checkpoint=str(run), out_dir=str(tmp_path / "x"), method="yarn", factor=4, finetune_tokens=2560, device="cpu")
    whole, calls = tool.train, []

    def stops(settings):
        calls.append(settings.init_from)
        return whole(replace(settings, max_iters=4, lr_decay_iters=10, eval_interval=4) if len(calls) == 1 else settings)

    monkeypatch.setattr(tool, "train", stops)
    with pytest.raises(KeyboardInterrupt):
        tool.main(config)
    assert not (tmp_path / "x" / "latest").exists()
    tool.main(config)
    assert calls[1] == "resume" and read_progress(find_step(tmp_path / "x" / "finetune", prefer="latest")).iter == 10
    assert not (tmp_path / "x" / "start").exists()
    (tmp_path / "x" / "latest").unlink()
    tool.main(config)
    assert len(calls) == 2


def test_a_draft_reads_as_far_as_the_model(run, capsys):
    from engine.speculate import guesser
    model, tokenizer = load_model(run, rope_scaling="yarn(factor=4)")
    assert guesser(str(run), False, 2, model, tokenizer, None, "yarn(factor=4)").readers[0].model.cfg.block_size == 128
    assert not capsys.readouterr().err
    guesser(str(run), False, 2, model, tokenizer, None, None)
    assert "the draft's context is 32, less than the model's 128" in capsys.readouterr().err


def test_flags_and_their_conflicts(run, tmp_path):
    flagged, _ = load_model(run, rope_scaling="yarn(factor=4)")
    assert flagged.cfg.rope_scaling == "yarn(factor=4, original=32)" and flagged.cfg.block_size == 128
    for text in ("llama3()", "llama3"):
        assert load_model(run, rope_scaling=text)[0].cfg.rope_scaling == "llama3(original=32)"
    for bad, said in [("yarn(factor=4, original=64)", "is not the context of 32"), ("yarn(", "cannot read"), ("yrn(factor=4)", "did you mean 'yarn'")]:
        with pytest.raises(ValueError, match="rope_scaling") as e:
            load_model(run, rope_scaling=bad)
        assert said in str(e.value)
    for argv, said in [(["--method=yarn", "--search"], "--search finds longrope's divisors"), (["--factor=1"], "above 1"),
                       (["--finetune_factor=2"], "is the first stage of --search"), (["--out_dir", run], "name another folder")]:
        r = extend(run, tmp_path / "y", *argv)
        assert r.returncode == 2 and said in r.stderr and r.stderr.count("\n") == 1, r.stderr
    assert not (tmp_path / "y").exists()
    sampled = command("sample.py", "--checkpoint", run, "--rope_scaling=yarn(factor=4)", "--max_new_tokens=100", "--device=cpu", "--overflow=refuse",
                      "--ignore_eot")
    assert sampled.returncode == 0 and len(sampled.stdout) > 90
    r = command("train.py", "--init_from=resume", "--dataset", read_config(find_step(run))["dataset"], "--out_dir", run, "--block_size=32", "--n_layer=2",
                "--n_head=2", "--n_embd=32", "--rope_scaling=linear(factor=2)", "--max_iters=40", "--device=cpu")
    assert r.returncode == 2 and "rope_scaling is 'none' in" in r.stderr
    r = command("train.py", "--init_from", run, "--dataset", read_config(find_step(run))["dataset"], "--out_dir", tmp_path / "z",
                "--rope_scaling=linear(factor=2)", "--device=cpu")
    assert r.returncode == 2 and "python -m tools.extend writes a checkpoint" in r.stderr and not (tmp_path / "z").exists()


def test_fine_tuning_trains_at_the_longer_length(run, tmp_path):
    r = extend(run, tmp_path / "x", "--method=yarn", "--finetune_tokens=2560")
    assert r.returncode == 0, r.stderr
    saved, tuned = read_config(find_step(tmp_path / "x")), read_config(find_step(tmp_path / "x" / "finetune"))
    assert tuned["batch_size"] * tuned["block_size"] == 256 and tuned["max_iters"] == 10 and tuned["block_size"] == saved["block_size"] == 128
    assert saved["rope_scaling"] == tuned["rope_scaling"] == "yarn(factor=4, original=32)"
    a, b = load_model(tmp_path / "x")[0], load_model(run)[0]
    assert not torch.equal(a.wte.weight, b.wte.weight)
    torch.testing.assert_close(a.wte.weight, load_model(tmp_path / "x" / "finetune")[0].wte.weight, rtol=0, atol=0)
    assert "a context of 128 tokens, 4 times 32" in r.stdout


@pytest.mark.slow
def test_longropes_recipe_in_two_stages(run, tmp_path):
    argv = ["--method=longrope", "--search", "--population=8", "--iterations=2", "--search_documents=2", "--finetune_tokens=1024", "--finetune_factor=2"]
    r = extend(run, tmp_path / "x", *argv)
    assert r.returncode == 0, r.stderr
    searches = {n: json.loads((tmp_path / "x" / f"search_{n}.json").read_text()) for n in ("long", "longer", "short")}
    final = rope_scaling(read_config(find_step(tmp_path / "x"))["rope_scaling"])
    best = lambda n: min(searches[n]["points"], key=lambda p: p[2])
    assert list(final.long) == best("longer")[1] and list(final.short) == best("short")[1] and final.start == best("longer")[0]
    assert read_config(find_step(tmp_path / "x" / "finetune"))["block_size"] == 64 and read_config(find_step(tmp_path / "x"))["block_size"] == 128
    assert (final.factor, final.original) == (4, 32)
    again = extend(run, tmp_path / "x", *argv)                                              # finished: another begins, the old one is kept
    assert again.returncode == 0 and (tmp_path / "x.1" / "latest").is_file()
    assert read_config(find_step(tmp_path / "x"))["rope_scaling"] == read_config(find_step(tmp_path / "x.1"))["rope_scaling"]


@torch.no_grad()
def test_eval_by_context(run, tmp_path):
    corpus, argv = read_config(find_step(run))["dataset"], ["--checkpoint", run, "--device=cpu", "--out", tmp_path / "o"]
    r = command("eval.py", *argv, "--context_lengths=64,32,160", "--limit=2", "--trials=1")
    assert r.returncode == 0 and "passkey" in r.stdout.splitlines()[-2] and "needle" in r.stdout.splitlines()[-1], r.stderr      # its vocabulary
    result = json.loads((tmp_path / "o" / "context.json").read_text())
    model, tokenizer = load_model(run)
    text = context.documents(Split(corpus, "val"), 160, 2)
    size = math.log(2) * tokenizer.byte_lengths()[text[:, 1:]].sum()
    assert [row["length"] for row in result["lengths"]] == [32, 64, 160] and result["tokens"] == 320 and result["unit"] == "bits per byte"
    for row in result["lengths"]:
        parts = [text[:, a:min(a + row["length"], 160) + 1] for a in range(0, 160, row["length"])]
        want = sum(float(model(p[:, :-1], p[:, 1:])) * p[:, 1:].numel() for p in parts) / size
        assert abs(row["strided"] - want) < 1e-4
    assert result["lengths"][-1]["sliding"] == result["lengths"][-1]["strided"]
    assert "positions" in r.stdout and [row["to"] for row in result["positions"]] == [63, 127, 159]
    for bad in ("0", "a", "1,64", ","):
        assert "error: context_lengths" in command("eval.py", *argv, "--context_lengths", bad).stderr
    assert "goes with none of" in command("eval.py", *argv, "--context_lengths=64", "--kv_cache=int8").stderr


def test_the_bench_keeps_what_it_has_and_does_anew_what_changed(run, tmp_path, monkeypatch, capsys):
    from bench import extend as bench
    settings = bench.ExtendBench(checkpoint=str(run), methods=("none", "yarn"), lengths=(32, 128), limit=1, trials=0, finetune_share=0.2,
                                 out=str(tmp_path / "o"), device="cpu")
    done = []
    whole = bench.measure
    monkeypatch.setattr(bench, "measure", lambda *a, **kw: done.append(1) or whole(*a, **kw))
    first = bench.main(settings)
    assert list(first["models"]) == ["none", "yarn", "none, tuned", "yarn, tuned"] and len(done) == 4
    assert all(r["lengths"][1]["strided"] > 0 and "sliding" not in r["lengths"][0] for r in first["models"].values())
    assert bench.main(settings)["models"] == first["models"] and len(done) == 4
    assert bench.main(replace(settings, factor=2.0))["models"]["yarn"] != first["models"]["yarn"] and len(done) == 8
    other = bench.main(replace(settings, finetune_share=0.4))
    assert other["models"]["yarn"] == first["models"]["yarn"] and other["models"]["yarn, tuned"] != first["models"]["yarn, tuned"]
    assert "+0.0%" in capsys.readouterr().out and (tmp_path / "o" / "extend.json").exists()


def test_a_picture_of_it(tmp_path):
    pytest.importorskip("matplotlib")
    cells = [{"kind": k, "length": n, "depth": d, "accuracy": d, "probability": d} for k in context.KINDS for n in (32, 64) for d in context.DEPTHS]
    r = {"unit": "bits per byte", "tokens": 9, "lengths": [{"length": n, "strided": 2.0, "sliding": 1.9} for n in (32, 64)],
         "positions": [{"from": 0, "to": 63, "loss": 2.0}], "retrieval": cells, "notes": ["so"]}
    assert context.draw({"a": r, "b": r}, tmp_path / "x.png").stat().st_size > 10_000
    assert "passkey" in context.report(r) and "needle" in context.report(r)
