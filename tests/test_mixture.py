"""Several corpora by weight, and packed documents that do not see one another."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import made_up, tiny, tokens
from test_train import config, metrics  # noqa: F401

from data.build import build
from data.documents import Document
from data.mixture import PERIOD, MixedLoader, Mixture, shares, weights
from data.shards import Corpus
from eval import EvalConfig, evaluate
from ops.positions import document_positions, within_documents
from train import train


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    root = tmp_path_factory.mktemp("mixture")
    return [str(build(root / name, lambda text=text: [Document("", [text])], "byte"))
            for name, text in (("words", made_up(3000)), ("digits", "0123456789 " * 900))]


@pytest.mark.parametrize("dataset, expected", [
    ("a", {"a": 1.0}), ("a:0.8,b:0.2", {"a": 0.8, "b": 0.2}), ("a:3, b", {"a": 0.75, "b": 0.25}), ("C:/texts", {"C:/texts": 1.0}),
    ("x/y:2,z:2", {"x/y": 0.5, "z": 0.5}),
])
def test_names_and_weights_are_read(dataset, expected):
    assert weights(dataset) == pytest.approx(expected)


@pytest.mark.parametrize("dataset", ["a:0,b:1", "a:-1,b", "a,a", "a,,b", "", ":1,b", "a:inf,b", "a:nan,b"])
def test_what_cannot_be_meant_is_refused(dataset):
    with pytest.raises(ValueError, match="NAME:WEIGHT"):
        weights(dataset)


def test_a_folder_may_hold_commas_and_colons(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a,b", "c:1"):
        (tmp_path / name).mkdir()
        assert weights(name) == {name: 1.0}


@pytest.mark.parametrize("given", [[0.5, 0.5], [0.8, 0.2], [1 / 3] * 3, [0.9999, 0.0001], [0.7001, 0.1999, 0.1]])
def test_shares_add_up_and_are_right_to_a_thousandth(given):
    counts = shares(given)
    assert sum(counts) == PERIOD and min(counts) >= 1
    assert all(abs(n - w * PERIOD) <= 1 for n, w in zip(counts, given))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_come_by_weight_each_corpus_in_its_own_order_whatever_the_ranks(folders, ranks):
    mixture = Mixture(f"{folders[0]}:0.7,{folders[1]}:0.3")
    one = mixture.train(16, 8, 3)
    assert isinstance(one, MixedLoader)
    turns = [one.turn(g) for g in range(3 * PERIOD + 7)]
    assert Counter(k for k, _ in turns[:PERIOD]) == {0: 700, 1: 300}
    for k in (0, 1):                                       # none skipped, none twice
        assert [n for kk, n in turns if kk == k] == list(range(sum(kk == k for kk, _ in turns)))
    many = [mixture.train(16, 8, 3, rank, ranks) for rank in range(ranks)]
    for step in (0, 1, 200):
        assert torch.equal(torch.cat([loader.batch(step) for loader in many]), one.batch(step))
    digits = torch.stack([one.batch(step) for step in range(125)]).flatten(0, 1)
    assert (((digits >= 48) & (digits <= 57)) | (digits == 32)).all(1).sum() == 300


def test_other_tokenizers_do_not_mix(folders, corpus):
    with pytest.raises(ValueError, match="different tokenizers"):
        Mixture(f"{folders[0]},{corpus}")


def test_a_corpus_with_a_tokenizer_of_its_own_is_taken_in_the_first_ones(folders, corpus, monkeypatch):
    """`fineweb_edu:0.8,python:0.2`, where python has learned its own: data/python_gpt2 it is, or the command that makes it."""
    known = {"words": Path(folders[0]), "letters": corpus, "letters_byte": Path(folders[1])}
    monkeypatch.setattr("data.mixture.find", lambda name: Corpus(known[name]))
    mixture = Mixture("words:3,letters:1")
    assert mixture.corpora["letters"].folder == Path(folders[1]) and mixture.weights == {"words": 0.75, "letters": 0.25}
    with pytest.raises(ValueError, match="prepare both with one of byte, gpt2"):
        Mixture("letters,words")              # a vocabulary of characters is one corpus's own


def test_a_run_on_a_mixture_reports_each_loss_and_resumes(config, folders, capsys):  # noqa: F811
    config = replace(config, dataset=f"{folders[0]}:3,{folders[1]}:1", eval_interval=5, max_iters=10)
    done = train(config)
    assert "epochs of" in capsys.readouterr().out
    lines = [json.loads(line) for line in (Path(config.out_dir) / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "val_loss" in line][-1]
    each = [last[f"val_loss/{name}"] for name in folders]
    assert last["val_loss"] == pytest.approx(0.75 * each[0] + 0.25 * each[1]) == done.val_loss and each[0] != each[1]
    part = replace(config, out_dir=config.out_dir + "_part")
    train(replace(part, max_iters=4, lr_decay_iters=10))
    train(replace(part, init_from="resume", lr_decay_iters=10))
    assert [m["loss"] for m in metrics(part.out_dir).values()] == [m["loss"] for m in metrics(config.out_dir).values()]
    assert evaluate(EvalConfig(checkpoint=config.out_dir, dataset=folders[0]))["loss"] != pytest.approx(each[1])


# packed documents

def test_positions_begin_anew_at_end_of_text():
    x = torch.tensor([[5, 9, 1, 2, 9, 9, 3], [9, 1, 1, 1, 1, 1, 9]])
    assert document_positions(x, 9).tolist() == [[0, 0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5, 0]]


def test_a_document_does_not_see_the_one_before_it():
    """P11: neither in the logits nor in the positions: the second document alone gives the same."""
    model, x, y = tiny(), tokens(2, 40), tokens(2, 40, 1)
    x[x == 64] = 0
    x[:, 23] = 64
    logits = model(x, pos=document_positions(x, 64))
    other = x.clone()
    other[:, :23] = tokens(2, 23, 5) % 64
    assert torch.equal(model(other, pos=document_positions(other, 64))[:, 23:], logits[:, 23:])
    torch.testing.assert_close(model(x[:, 23:]), logits[:, 23:], rtol=1e-5, atol=1e-5)
    assert not torch.equal(model(x)[:, 23:], model(other)[:, 23:])
    run = within_documents(lambda x, y, pos: model(x, y, pos), 64)
    with torch.no_grad():
        assert float(run(x, y)) == pytest.approx(float(model(x, y, pos=document_positions(x, 64)))) != float(model(x, y))


def test_a_run_with_documents_trains_evaluates_and_needs_an_end_of_text(config, tmp_path, capsys):  # noqa: F811
    texts = [f"{i} " * (i % 9 + 3) for i in range(400)]
    folder = build(tmp_path / "many", lambda: [Document("", [t]) for t in texts], "byte")
    config = replace(config, dataset=str(folder), documents=True, eval_iters=0)
    done = train(config)
    result = evaluate(EvalConfig(checkpoint=config.out_dir, device="cpu"))
    assert result["loss"] == pytest.approx(done.val_loss, rel=1e-5)
    without = train(replace(config, documents=False, eval_only=True, init_from="resume")).val_loss
    assert without != done.val_loss
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("train", "val"):
        (np.arange(5000) % 50).astype("<u2").tofile(bare / f"{name}.bin")
    with pytest.raises(ValueError, match="needs an end-of-text id"):
        train(replace(config, dataset=str(bare), out_dir=str(tmp_path / "no")))


@pytest.mark.parametrize("chunk", [1, 7, 16, 40])
def test_logits_in_chunks_give_the_same_loss_and_gradients(chunk):
    whole, parts, x, y = tiny(), tiny(loss_chunk=chunk), tokens(2, 20), tokens(2, 20, 1)
    y[0, :5] = -1
    a, b = whole(x, y), parts(x, y)
    a.backward()
    b.backward()
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    for p, q in zip(whole.parameters(), parts.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)
