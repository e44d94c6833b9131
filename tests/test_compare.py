"""The comparison of mixers in tiny form, and the probes against brute force."""

import json

import pytest
import torch

from data.mixture import Mixture
from data.probes import IGNORE, LEVELS, PROBES, VOCAB
from mixers import MIXERS
from tools import compare
from tools.compare import Comparison, amount, main, parameters, read, shapes, solve, timeline
from tools.probes import ProbesConfig, accuracy, learn

TINY = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=32", "--batch_size=4", "--device=cpu", "--eval_iters=2", "--evals=2"]
WORDS = ["attention", "attention(window=8)", "mla"]


@pytest.fixture
def here(monkeypatch):
    """In this process, and how many models were trained."""
    trained = []
    monkeypatch.setattr(compare, "alone", lambda f, *a: f(*a))
    monkeypatch.setattr(compare, "train", lambda cfg, train=compare.train: trained.append(cfg) or train(cfg))
    monkeypatch.setattr(compare, "STEPS", 2)
    return trained


def settings(corpus, out, *more, layers=WORDS):
    return read([*TINY, "--layers", *layers, f"--dataset={corpus}", f"--out_dir={out}", "--contexts", "8", "40", *more])


# equal parameters

@pytest.mark.parametrize("target, flags", [("400k", ["--mlp=swiglu", "--tie_embeddings", "--init=gpt2", "--n_layer=4"]), ("2M", []), ("3M", ["--head_dim=32", "--n_layer=4"])])
def test_every_word_gets_the_same_parameters(target, flags):
    c = read(["--layers", *MIXERS, "attention(window=8)*2 mla", f"--params={target}", *flags])
    solved = shapes(c, 257)
    sizes = {w: parameters(s.model()) for w, s in solved.items()}
    assert len(sizes) >= 7 and all(abs(n / amount(target, "") - 1) <= 0.02 for n in sizes.values()), sizes
    for s in solved.values():
        assert s.n_layer == c.n_layer and (s.n_head == c.n_head if not c.head_dim else s.n_head * c.head_dim == s.n_embd)
        assert 0.5 < s.n_inner / (s.n_embd * (8 / 3 if c.mlp == "swiglu" else 4)) < 2


def test_without_params_the_first_word_keeps_its_shape():
    c = read(["--layers", "attention", "mla"])
    solved = shapes(c, 4096)
    assert (solved["attention"].n_embd, solved["attention"].n_inner) == (256, 1024) and parameters(solved["attention"].model()) == 2 * 4096 * 256 + 6 * (12 * 256**2 + 2 * 256 + 2 * 64) + 256


def test_what_cannot_be_met_is_one_line():
    cfg = read(["--layers", "attention"])
    with pytest.raises(ValueError, match="no width gives 'attention' 100 parameters"):
        solve(shapes(cfg, 64)["attention"].model(), 100)
    for flags, message in ((["--layers", "atention"], "did you mean 'attention'"), ([], "nothing to compare"),
                           (["--layers", "attention", "mla*7", "--params=5M"], "pattern of 7 layers does not fit into n_layer=6")):
        with pytest.raises(ValueError, match=message):
            shapes(read(flags), 64)
    with pytest.raises(ValueError, match="did you mean 'attention'"):
        main(read(["--layers", "atention", "--dataset=nosuch"]))         # the first thing that is looked at


@pytest.mark.parametrize("text, n", [("10M", 10**7), ("1.5G", 15 * 10**8), ("2_000", 2000), ("1e6", 10**6), ("124k", 124000), ("12x", None), ("", None), ("0", None)])
def test_amounts(text, n, capsys):
    if n:
        assert amount(text, "params") == n
    else:
        with pytest.raises(SystemExit):
            read([f"--params={text}"])
        assert "is no amount" in capsys.readouterr().err


def test_flags_with_several_values():
    c = read(["--layers", "attention", "attention(window=8)*3 attention", "--learning_rates", "1e-3", "2e-3", "--n_layer=4"])
    assert c.layers == ("attention", "attention(window=8)*3 attention") and c.learning_rates == (1e-3, 2e-3) and c.n_layer == 4
    assert c.optimizer == "muon" and c.dataset == "python"


# the comparison

def test_it_compares_and_does_nothing_twice(corpus, tmp_path, here, capsys):
    c = settings(corpus, tmp_path, "--params=60k", "--tokens=1k", "--learning_rates", "1e-3", "4e-3", "--seeds=2", "--probe_steps=1")
    result = main(c)
    out = capsys.readouterr().out
    runs = [cfg for cfg in here if cfg.max_iters == 8]
    assert len(runs) == 3 * 3 and all("compare.html" in p for p in out.splitlines()[-1:])
    assert {cfg.max_iters for cfg in here} == {2, 8}
    batches = {cfg.seed: [] for cfg in runs}
    for cfg in runs:
        batches[cfg.seed].append(Mixture(cfg.dataset).train(cfg.block_size, cfg.batch_size * cfg.gradient_accumulation_steps, cfg.seed).batch(0))
    assert all(torch.equal(b, same[0]) for same in batches.values() for b in same) and len(batches) == 2
    for row in result["rows"]:
        assert row["tokens"] == 8 * 4 * 32 and abs(row["parameters"] / 60_000 - 1) <= 0.02 and len(row["losses"]) == 2
        assert 0 < row["loss"] < 6 and row["loss_spread"] > 0 and row["bits_per_byte"] > 0 and row["edge"] and 0 <= row["probes"]["mqar"] < 0.3
        assert row["sweep"][f"{row['learning_rate']:g}"] == min(row["sweep"].values()) and all(v > 0 for v in row["decode_tokens_per_s"].values())
        assert [len(curve) for curve in row["curves"]] == [2, 2] and sum(curve[-1][1] for curve in row["curves"]) / 2 == pytest.approx(row["seconds"])
        assert row["loss"] == pytest.approx(sum(row["losses"]) / 2) and row["tokens_per_s"] > 0
    state = {r["layers"]: r["state_bytes"] for r in result["rows"]}
    assert state["attention"]["40"] > 3 * state["attention(window=8)"]["40"]
    page = (tmp_path / "compare.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and "attention(window=8)" in page and "src=\"http" not in page and "href" not in page
    assert json.loads((tmp_path / "compare.json").read_text(encoding="utf-8"))["rows"] == json.loads(json.dumps(result["rows"]))
    assert not list(tmp_path.rglob("*.safetensors")) and all(w in out for w in WORDS)
    here.clear()
    assert json.dumps(main(c)["rows"]) == json.dumps(result["rows"]) and not here
    main(settings(corpus, tmp_path, "--params=60k", "--tokens=1k", "--learning_rates", "1e-3", "--probe_steps=1", layers=["attention"]))
    assert not here
    main(settings(corpus, tmp_path, "--params=60k", "--tokens=2k", "--learning_rates", "1e-3", "--probe_steps=1", layers=["attention"]))
    assert [cfg.max_iters for cfg in here] == [16]


def test_a_stopped_run_goes_on_where_it_was(corpus, tmp_path, here, monkeypatch, capsys):
    c = settings(corpus, tmp_path, "--tokens=2k", "--learning_rates=3e-3", "--probe_steps=0", layers=["attention", "mla"])
    whole = main(settings(corpus, tmp_path / "whole", "--tokens=2k", "--learning_rates=3e-3", "--probe_steps=0", layers=["attention", "mla"]))
    from engine.interrupt import Interrupt
    from engine.log import Log
    seen = []

    def step(self, i, *rest, step=Log.step):
        step(self, i, *rest)
        seen.append((self.config.layers, i))
        if seen[-1] == ("mla", 11):
            import os
            import signal
            os.kill(os.getpid(), signal.SIGTERM)
    monkeypatch.setattr(Log, "step", step)
    assert Interrupt                                     # train's own: the step is finished and saved
    result = main(c)
    assert result["stopped"] and [r["loss"] is None for r in result["rows"]] == [False, True]
    assert "the same command goes on" in capsys.readouterr().out.splitlines()[-1]
    before = len(seen)
    result = main(c)
    assert not result["stopped"] and seen[before:] == [("mla", i) for i in range(12, 17)]
    assert [r["loss"] for r in result["rows"]] == [r["loss"] for r in whole["rows"]]


def test_equal_time_is_by_the_measured_speed(corpus, tmp_path, here):
    c = settings(corpus, tmp_path, "--minutes=0.5", "--probe_steps=0", layers=["attention", "mla"])
    comparison = Comparison(c)
    comparison.measured = {"attention": {"tokens_per_s": 128 * 10.0}, "mla": {"tokens_per_s": 128 * 4.0}}
    assert [comparison.settings(w, 1e-3, 1).max_iters for w in c.layers] == [300, 120]
    assert comparison.settings("mla", 6e-3, 1).muon_lr == pytest.approx(0.04) and comparison.settings("mla", 6e-3, 1).min_lr == pytest.approx(2e-4)


def test_doubts_are_told(corpus, tmp_path, here):
    from tools.report import notes
    comparison = Comparison(settings(corpus, tmp_path, "--minutes=0.5", "--learning_rates", "1e-3", "2e-3", layers=["attention"]))
    comparison.measured = {"attention": {"tokens_per_s": 1280.0}}
    done = {"loss": 2.0, "bits_per_byte": 1.0, "tokens": 10, "seconds": 30.0, "memory_gb": 1.0, "curve": []}
    comparison.runs["attention"][1e-3, 1337] = done
    assert not any("*" in n or "off by" in n for n in notes(comparison.result()))
    comparison.runs["attention"][2e-3, 1337] = {**done, "loss": 1.5, "seconds": 34.0}
    told = notes(comparison.result())
    assert any(n.startswith("* the lowest or highest") for n in told) and any("off by more than 10 %: attention" in n for n in told)


def test_a_learning_rate_without_a_number_is_told_and_the_others_go_on(corpus, tmp_path, here, monkeypatch):
    def fail(cfg, train=compare.train):
        if cfg.learning_rate == 1.0:
            raise ValueError("loss nan and gradient norm nan at step 3, the 10th in a row that is no number")
        return train(cfg)
    monkeypatch.setattr(compare, "train", fail)
    result = main(settings(corpus, tmp_path, "--tokens=500", "--learning_rates", "1e-3", "1", "--probe_steps=0", layers=["attention"]))
    row = result["rows"][0]
    assert row["learning_rate"] == 1e-3 and row["sweep"]["1"] is None and "no number" in row["failed"][0]
    assert "no number" in (tmp_path / "compare.html").read_text(encoding="utf-8")


def test_seconds_are_those_of_training():
    """By the median: a stretch in which the machine was busy, and the first step, do not count."""
    speeds = [None, 5.0, 5.0, 0.1, 6.0]
    lines = [{"iter": i, "loss": 1, "tokens": 10 * i, "tokens_per_s": s} for i, s in enumerate(speeds, 1)]
    lines[3:3] = [{"iter": 3, "val_loss": 3.0, "tokens": 30}]
    assert timeline([*lines, {"iter": 5, "val_loss": 2.0, "tokens": 50}]) == [(30, 6.0, 3.0), (50, 10.0, 2.0)]


@pytest.mark.slow
def test_in_processes_of_their_own_a_mistake_is_one_line(corpus, tmp_path):
    with pytest.raises(ValueError, match="no corpus"):
        compare.alone(compare.run, compare.TrainConfig(dataset="nosuch", out_dir=str(tmp_path / "x")))
    assert compare.alone(amount, "10M", "") == 10**7


# the probes

def answers(name, x):
    """What is right, found by looking through the row; None where nothing is asked."""
    T, found = len(x), []
    for t in range(T):
        if name == "mqar":
            start = next(i for i in range(0, T, 2) if x[i] in x[i + 2:] or x[i] == 0)      # 0: every key comes again
            pairs = next(i for i in range(0, T + 2, 2) if i + 1 >= T or x[i] == 0 or x[i] in x[start:i] or x[i + 1] < VOCAB // 2)
            found.append(x[x.index(x[t]) + 1] if t >= pairs and x[t] else None)
        elif name == "induction":
            earlier = [i for i in range(t) if x[i] == x[t]]
            found.append(x[earlier[-1] + 1] if earlier else None)
        elif name == "selective_copying":
            said = [v for v in x if v > 1]
            found.append(said[sum(v == 1 for v in x[:t])] if x[t] == 1 else None)
        else:
            found.append(x[x.index(x[t]) + 1] if t >= 3 * T // 4 and x[t] >= VOCAB // 4 else None)
    return found


@pytest.mark.parametrize("name", PROBES)
def test_the_answers_are_those_of_brute_force(name):
    option, levels = LEVELS[name]
    for level in levels:
        x, y = PROBES[name](6, 3, **{option: level})
        again = PROBES[name](6, 3, **{option: level})
        assert x.shape == y.shape and x.dtype == y.dtype == torch.int64 and int(x.min()) >= 0 and int(max(x.max(), y.max())) < VOCAB
        assert torch.equal(x, again[0]) and torch.equal(y, again[1]) and not torch.equal(x, PROBES[name](6, 4, **{option: level})[0])
        for row, asked in zip(x.tolist(), y.tolist()):
            assert [IGNORE if a is None else a for a in answers(name, row)] == asked, (name, level, row)
            if name == "needle":
                assert sum(v != IGNORE for v in asked) == 8 and all(v < VOCAB // 4 for v in row[level // 4:3 * level // 4])
            if name == "mqar":
                assert sum(v != IGNORE for v in asked) == level


def test_recall_is_measured_on_rows_that_training_never_draws():
    c = ProbesConfig(steps=3, rows=2, device="cpu")
    result = learn("attention", "mqar", c)
    assert set(result["levels"]) == {str(n) for n in LEVELS["mqar"][1]} and result["steps"] == 3

    class Knows(torch.nn.Module):
        """Answers what follows the key's first place."""
        wte = torch.nn.Embedding(1, 1)

        def forward(self, x):
            first = (x[:, :, None] == x[:, None, :]).int().argmax(-1)
            return torch.nn.functional.one_hot(x.gather(1, (first + 1).clamp(max=x.shape[1] - 1)), VOCAB).float()
    assert accuracy(Knows(), "mqar", 28) == 1.0 and accuracy(Knows(), "induction", 32) == 1.0 and accuracy(Knows(), "needle", 128) == 1.0
    with pytest.raises(ValueError, match="unknown 'mkar': did you mean 'mqar'"):
        from tools.probes import main as probe
        probe(ProbesConfig(probes=("mkar",)))


@pytest.mark.slow
@pytest.mark.parametrize("word, name, least, most", [("attention", "mqar", 0.95, 1), ("attention", "induction", 0.95, 1), ("attention(window=4)", "mqar", 0, 0.2)])
def test_attention_learns_to_recall_and_a_window_does_not(word, name, least, most):
    assert least <= learn(word, name, ProbesConfig(device="cpu"))["accuracy"] <= most
