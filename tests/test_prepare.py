"""From documents to a prepared folder: the same bytes for any number of workers, nothing half done, nothing lost."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from prepared import ROOT, TEXTS, documents_of, files, several

from data import documents as docs
from data.build import build
from data.documents import Document, cut
from data.python.prepare import documents as stdlib
from data.shards import Corpus
from data.tokenizer import train_bpe

# --- documents


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_documents_return_in_order_with_end_of_text_between(tmp_path, kind):
    found = Corpus(build(tmp_path / "c", several(), kind, vocab_size=400, val_fraction=0.2))
    train, val = documents_of(found, "train"), documents_of(found, "val")
    assert sorted(train + val) == sorted(TEXTS) and 30 < len(val) < 90
    assert [t for t in TEXTS if t in set(train)] == train
    assert found.meta["documents"] == {"train": len(train), "val": len(val)}
    assert found.meta["bytes"] == {"train": len("".join(train).encode()), "val": len("".join(val).encode())}
    assert found.meta["tokenizer"] == {"kind": kind, "hash": found.tokenizer.hash}


def test_text_like_end_of_text_is_text(tmp_path):
    text = "the string <|endoftext|> appears here " * 50
    found = Corpus(build(tmp_path / "c", several([text]), "bpe", vocab_size=300))
    ids = found.split("train").read(0, found.meta["tokens"]["train"])
    assert (ids != found.tokenizer.eot).all() and text.startswith(found.tokenizer.decode(ids))


def test_equal_texts_are_on_one_side_and_both_sides_have_some(tmp_path):
    for fraction in (0.000001, 0.3, 0.999999):
        found = Corpus(build(tmp_path / str(fraction), several(TEXTS[:9] * 3), "byte", val_fraction=fraction))
        train, val = set(documents_of(found, "train")), set(documents_of(found, "val"))
        assert min(found.meta["documents"].values()) >= 1 and not train & val
    with pytest.raises(ValueError, match="all documents are the same"):
        build(tmp_path / "same", several(["a", "a"]), "byte")


def test_a_single_document_is_cut_at_a_character(tmp_path):
    text = "你好😀é" * 1000
    for fraction in (0.1, 0.1003, 0.1007):
        found = Corpus(build(tmp_path / str(fraction), several(["", text]), "char", val_fraction=fraction))
        (train,), (val,) = documents_of(found, "train"), documents_of(found, "val")
        assert train + val == text
        assert 0 <= len(text.encode()) * (1 - fraction) - len(train.encode()) < 4


def test_a_few_long_documents_are_each_cut(tmp_path):
    """Whole ones by hash could put most of the text into validation."""
    texts = ["first line\n" * 3000, "second line\n" * 500, "third line\n" * 9000]
    found = Corpus(build(tmp_path / "few", several(texts), "byte", val_fraction=0.05))
    train, val = documents_of(found, "train"), documents_of(found, "val")
    assert [a + b for a, b in zip(train, val)] == texts
    assert all(len(b) == pytest.approx(0.05 * len(t), abs=1) for b, t in zip(val, texts))


def test_val_documents_do_not_train_the_bpe(tmp_path):
    found = Corpus(build(tmp_path / "c", several(), "bpe", vocab_size=400, val_fraction=0.2))
    assert found.tokenizer.hash == train_bpe(documents_of(found, "train"), 400).hash


def test_pieces_encode_as_the_whole(monkeypatch):
    text = "".join(chunk for document in stdlib() for chunk in document.chunks)[:3_000_000] + "\r\n\r\n  x\n\n\n" * 99
    bpe = train_bpe([text], 600)
    whole = bpe.encode_array(text)
    lines = re.sub(r"\s+", " ", text[:400_000])   # without a newline
    for size in (1000, 70_001):
        parts = list(cut([text[:500], text[500:]], size))
        assert "".join(parts) == text and len(parts) > len(text) // size // 3
        assert np.array_equal(np.concatenate([bpe.encode_array(p) for p in parts]), whole)
        parts = list(cut([lines], size))
        assert "".join(parts) == lines and len(parts) > 4
        assert np.array_equal(np.concatenate([bpe.encode_array(p) for p in parts]), bpe.encode_array(lines))
    monkeypatch.setattr(docs, "LONGEST", 5000)
    assert [len(p) for p in cut(["好" * 12_000], 1000)] == [5000, 5000, 2000]   # no place to cut: memory stays bounded


# --- a build


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_any_number_of_workers_writes_the_same_bytes(tmp_path, kind, monkeypatch):
    monkeypatch.setattr("data.build.PIECE", 3000)
    made = [files(build(tmp_path / str(w), several(TEXTS * 5), kind, 400, workers=w)) for w in (1, 2, 5)]
    assert made[0] == made[1] == made[2] and set(made[0]) == {"train_000000.bin", "val_000000.bin", "meta.json", "tokenizer.json"}


def test_prepared_again_only_if_something_changed(tmp_path, capsys):
    out = tmp_path / "c"
    build(out, several(), "byte")
    times = {p: (out / p).stat().st_mtime_ns for p in files(out)}
    capsys.readouterr()
    build(out, several(), "byte", workers=1)
    assert capsys.readouterr().out.startswith("already prepared") and times == {p: (out / p).stat().st_mtime_ns for p in files(out)}
    for texts, kind, why in (([*TEXTS[:-1], "x"], "byte", "sources"), ([*TEXTS[:-1], "x"], "char", "settings")):
        build(out, several(texts), kind)
        assert why in capsys.readouterr().out
        assert Corpus(out).tokenizer.kind == kind
    (out / "train_000000.bin").write_bytes(b"\0" * 2000)   # damage is repaired
    build(out, several([*TEXTS[:-1], "x"]), "char")
    assert "again" in capsys.readouterr().out and len(Corpus(out).split("train")) > 0


def test_bad_input_loses_nothing(tmp_path):
    out = build(tmp_path / "c", several(), "byte")
    before = files(out)

    def torn():
        yield from several()()
        raise ValueError("torn")

    for bad in (lambda: several([])(), lambda: several(["", ""])(), torn):
        with pytest.raises(ValueError):
            build(out, bad, "byte")
    for change in ({"val_fraction": 0.0}, {"val_fraction": 1.0}, {"tokenizer": "bpe", "vocab_size": 256}):
        with pytest.raises(ValueError):
            build(**{"out": out, "documents": several(), "tokenizer": "byte"} | change)
    assert files(out) == before and not list(out.glob(".building*"))


KILLED = """
import os, sys, time, data.build as b
from data.documents import Document
moved = 0
def replace(source, target, real=os.replace):
    global moved
    real(source, target)
    moved += ".building" in str(source) and ".building" not in str(target)
    if moved == int(sys.argv[2]): os.kill(os.getpid(), 9)
os.replace = replace
if sys.argv[2] == "0":
    real = b.ShardWriter.write
    def write(self, ids): real(self, ids); self.file.flush(); os.kill(os.getpid(), 9)
    b.ShardWriter.write = write
b.build(sys.argv[1], lambda: [Document("", ["b" * i]) for i in range(1, 300)], "byte")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="kill -9 is of Unix")
@pytest.mark.parametrize("moved", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("older", [False, True])
def test_killed_at_any_point_it_never_looks_finished(tmp_path, moved, older):
    out = tmp_path / "c"
    if older:
        build(out, several(), "char")
    before = files(out) if older else {}
    run = subprocess.run([sys.executable, "-c", KILLED, str(out), str(moved)], cwd=ROOT, capture_output=True)
    assert run.returncode == -signal.SIGKILL, run.stderr
    if moved == 4:      # everything is in place
        assert Corpus(out).tokenizer.kind == "byte"
    elif moved == 0:    # nothing was replaced
        assert files(out) == before
    if moved < 4 and not (older and moved == 0):
        with pytest.raises(FileNotFoundError):
            Corpus(out)
    build(out, lambda: [Document("", ["b" * i]) for i in range(1, 300)], "byte")
    whole = build(tmp_path / "whole", lambda: [Document("", ["b" * i]) for i in range(1, 300)], "byte")
    assert files(out) == files(whole) and not (out / ".building").exists()


def test_two_at_once_wait_for_each_other(tmp_path):
    code = "import sys; from data.text.prepare import main; main(sys.argv[1:])"
    (tmp_path / "in.txt").write_text("some words\n" * 20_000, encoding="utf-8")
    command = [sys.executable, "-c", code, f"--input={tmp_path}/in.txt", f"--out={tmp_path}/out"]
    runs = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [run.communicate(timeout=60)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert sorted("already prepared:" in s for s in said) == [False, True]


def test_spawn_starts_nothing_twice(tmp_path):
    (tmp_path / "in.txt").write_text("some words\n" * 2000, encoding="utf-8")
    code = (
        "import multiprocessing as mp, runpy, sys; mp.set_start_method('spawn');"
        f"sys.argv = ['prepare.py', '--input={tmp_path}/in.txt', '--out={tmp_path}/out', '--workers=2'];"
        f"runpy.run_path({str(ROOT / 'data/text/prepare.py')!r}, run_name='__main__')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert run.returncode == 0 and run.stdout.count("prepared:") == 1, run.stderr
