"""wandb: what reaches it, that nothing is lost, and that it can neither stop nor delay a run."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, needs_loopback, tiny
from test_train import command, config, metrics, same, wait_for  # noqa: F401

from engine import dashboard
from engine.checkpoint import find_step, load_model, read_progress
from train import train

ID = "wandb_id"


class Wandb(SimpleNamespace):
    """A wandb that notes what is asked of it."""

    def __init__(self, **broken):
        self.inits, self.rows, self.axes, self.codes = [], [], [], []
        self.Settings, self.setup = lambda **kw: kw, lambda settings: SimpleNamespace(settings=SimpleNamespace(mode="online"))
        self.login = lambda **kw: kw == {"prompt": False, "verify": False}
        self.Table, self.teardown = lambda columns, data: (columns, data), lambda: None
        vars(self).update(broken)

    def init(self, **kw):
        self.inits.append(kw)
        return SimpleNamespace(dir="wandb/run-1/files", url="http://run", settings=SimpleNamespace(mode=kw["mode"]), finish=self.finish, log=self.log,
                               define_metric=lambda name, step_metric=None, summary=None: self.axes.append((name, step_metric)))

    def log(self, values):
        self.rows.append(values)

    def finish(self, exit_code):
        self.codes.append(exit_code)


@pytest.fixture
def fake(monkeypatch):
    def put(**broken) -> Wandb:
        monkeypatch.setitem(sys.modules, "wandb", Wandb(**broken))
        return sys.modules["wandb"]
    return put


def test_keys_axis_settings_and_end(config, fake):  # noqa: F811
    """P75."""
    wandb, on = fake(), replace(config, wandb_log=True, eval_interval=4)
    train(on)
    (init,), lines = wandb.inits, [json.loads(line) for line in (Path(on.out_dir) / "metrics.jsonl").read_text().splitlines()]
    assert (init["project"], init["name"], init["mode"], init["resume"]) == ("heed", "run", "online", "allow")
    assert init["id"] == (Path(on.out_dir) / ID).read_text()
    assert init["config"]["n_layer"] == 2 and init["config"]["machine"]["ranks"] == 1 and init["config"]["machine"]["torch"] == torch.__version__
    assert dict(wandb.axes)["*"] == "tokens" and wandb.codes == [0]
    assert [r["tokens"] for r in wandb.rows] == [line["tokens"] for line in lines] and len(lines) == 12 + 3 + 3
    steps = [r for r in wandb.rows if "train/loss" in r]
    assert {frozenset(r) for r in steps[1:]} == {frozenset(["iter", "tokens", "train/loss", "lr", "grad_norm", "tokens_per_s", "memory_gb"])}
    assert [r["train/loss"] for r in steps] == [m["loss"] for m in metrics(on.out_dir).values()] and 0.05 < steps[-1]["memory_gb"] < 50
    assert [r["iter"] for r in wandb.rows if "val/loss" in r] == [4, 8, 12]
    columns, rows = wandb.rows[-1]["samples"]
    assert columns == ["iter", "tokens", "text"] and [r[0] for r in rows] == [4, 4, 8, 8, 12, 12] and all(len(r[2]) >= 100 for r in rows)
    assert [dashboard.renamed(k) for k in ("val_loss/plays", "loss", "other/loss")] == ["val/loss/plays", "train/loss", "other/loss"]


def test_it_is_off_by_default_and_changes_nothing_of_the_training(config, fake):  # noqa: F811
    wandb, config = fake(), replace(config, eval_interval=3, dropout=0.5)
    train(config)
    train(replace(config, out_dir=config.out_dir + "_off", wandb_log=True, wandb_mode="disabled"))
    assert not wandb.inits and not (Path(config.out_dir) / ID).exists()
    train(replace(config, out_dir=config.out_dir + "_on", wandb_log=True))
    assert wandb.inits and metrics(config.out_dir) == metrics(config.out_dir + "_on")
    a, b = (load_model(config.out_dir + end)[0] for end in ("", "_on"))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))


def test_samples_leave_mode_and_random_state(corpus):
    from data.shards import Corpus
    model, before = tiny(block_size=32).train(), torch.get_rng_state()
    texts = dashboard.sample(model, Corpus(corpus).tokenizer)
    assert model.training and torch.equal(torch.get_rng_state(), before) and texts[0] != texts[1]
    assert texts == dashboard.sample(model, Corpus(corpus).tokenizer)


def test_a_resumed_run_goes_on_in_its_own_without_holes(config, fake):  # noqa: F811
    """P73: the same id; what a kill may have kept from wandb is logged again; rows of samples go on."""
    wandb, config = fake(), replace(config, wandb_log=True, eval_interval=3, lr_decay_iters=12)
    train(replace(config, max_iters=6))
    first, wandb.rows = wandb.rows, []
    train(replace(config, init_from="resume"))
    train(replace(config, out_dir=config.out_dir + "_other"))
    a, b, c = (init["id"] for init in wandb.inits)
    assert a == b != c
    steps = [r["iter"] for r in wandb.rows if "train/loss" in r][:9]
    assert steps == [*range(4, 13)] and [r["iter"] for r in first if "train/loss" in r] == [*range(1, 7)]
    assert [r[0] for r in [r for r in wandb.rows if "samples" in r][1]["samples"][1]] == [3, 3, 6, 6, 9, 9, 12, 12]


def test_a_run_that_had_no_dashboard_gets_a_whole_one(config, fake):  # noqa: F811
    wandb = fake()
    train(replace(config, max_iters=6))
    train(replace(config, wandb_log=True, init_from="resume"))
    assert [r["iter"] for r in wandb.rows if "train/loss" in r] == [*range(1, 13)]


def test_a_run_that_fails_is_marked_so(config, fake, monkeypatch):  # noqa: F811
    import train as script
    wandb = fake()
    for error in (ValueError, KeyboardInterrupt):
        monkeypatch.setattr(script, "backward", lambda *args, error=error: (_ for _ in ()).throw(error("x")))
        with pytest.raises(error):
            train(replace(config, wandb_log=True))
    assert wandb.codes == [1, 1]


def broken(*args, **kw):
    raise RuntimeError("it is broken\nreally")


@pytest.mark.parametrize("what", ["Settings", "setup", "login", "init", "log", "finish", "Table"])
def test_whatever_wandb_raises_the_run_goes_on(config, fake, capsys, what):  # noqa: F811
    fake(**{what: broken})
    assert train(replace(config, wandb_log=True, eval_interval=6)).iter == 12
    assert len(metrics(config.out_dir)) == 12
    out = capsys.readouterr().out
    assert 1 <= out.count("(RuntimeError: it is broken really)") <= 2 and out.count("warning") <= 2
    assert what != "finish" or "to upload the rest: wandb sync wandb/run-1" in out


def test_samples_that_fail_are_one_line(config, fake, capsys, monkeypatch):  # noqa: F811
    wandb = fake()
    monkeypatch.setattr(dashboard, "generate", broken)
    assert train(replace(config, wandb_log=True)).iter == 12 and wandb.codes == [0]
    assert capsys.readouterr().out.count("warning: no samples (RuntimeError: it is broken really)") == 1


def test_a_wandb_that_never_answers_is_left_behind(config, fake, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr(dashboard, "FINISH", 0.5)
    wandb, forever = fake(), threading.Event()
    wandb.log = lambda values: forever.wait(60)
    start = time.time()
    assert train(replace(config, wandb_log=True)).iter == 12
    assert time.time() - start < 15 and "is left behind" in capsys.readouterr().out
    forever.set()


@pytest.mark.parametrize("missing", [None, SimpleNamespace()])
def test_without_wandb_there_is_a_hint(config, monkeypatch, capsys, missing):  # noqa: F811
    monkeypatch.setitem(sys.modules, "wandb", missing)
    assert train(replace(config, wandb_log=True)).iter == 12
    assert capsys.readouterr().out.count("pip install wandb") == 1


# the real one


@pytest.fixture
def env(tmp_path) -> dict:
    """No key, no settings, and no server but a local one."""
    pytest.importorskip("wandb")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    return {**clean, "WANDB_DIR": str(tmp_path), "WANDB_CONFIG_DIR": str(tmp_path), "WANDB_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path),
            "NETRC": str(tmp_path / "netrc"), "WANDB_ERROR_REPORTING": "false", "WANDB_BASE_URL": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1"}


def run(config, env, **changes) -> tuple[str, float]:  # noqa: F811
    start = time.time()
    done = subprocess.run(command(config, wandb_log=True, **changes), env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=100)
    assert done.returncode == 0 and "Traceback" not in done.stdout, done.stdout
    return done.stdout, time.time() - start


def records(folder: Path) -> list:
    """The records of a .wandb file: 7 bytes, then LevelDB's log: blocks of 32 KiB, of pieces (crc, length, whole/first/middle/last)."""
    from wandb.proto.wandb_internal_pb2 import Record
    (file,) = folder.glob("*.wandb")
    data, found, part, at = file.read_bytes(), [], b"", 7
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        n, kind = int.from_bytes(data[at + 4:at + 6], "little"), data[at + 6]
        part, at = part + data[at + 7:at + 7 + n], at + 7 + n
        if kind in (1, 4):
            found.append(Record.FromString(part))
            part = b""
    return found


def history(folder: Path) -> list[dict]:
    return [{"/".join([i.key or i.nested_key[0]]): json.loads(i.value_json) for i in r.history.item} for r in records(folder) if r.HasField("history")]


def offline(env) -> list[Path]:
    return sorted(Path(env["WANDB_DIR"]).glob("wandb/offline-run-*"))


def test_without_a_key_a_run_is_offline_whole_and_quick(config, env):  # noqa: F811
    out, _ = run(config, env, eval_interval=6)
    (folder,) = offline(env)
    assert out.count("wandb sync") == 1 and folder.name in out and out.count("\nwandb") == 1, out
    rows = history(folder)
    assert [r["iter"] for r in rows if "train/loss" in r] == [*range(1, 13)] and [r["tokens"] for r in rows if "val/loss" in r] == [6 * 64, 12 * 64]
    (end,) = [r.exit for r in records(folder) if r.HasField("exit")]
    assert end.exit_code == 0 and list(folder.glob("files/media/table/samples*"))
    (Path(config.out_dir) / ID).unlink()
    assert "warning" not in out


def test_killed_and_resumed_offline_no_step_is_missing(config, env):  # noqa: F811
    """P73: also where the kill comes right after a checkpoint."""
    config = replace(config, wandb_log=True, eval_interval=20, max_iters=100_000, lr_decay_iters=40)
    child = subprocess.Popen(command(config), env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = Path(config.out_dir) / "metrics.jsonl"
    while not any(f.stat().st_size > 10_000 for f in Path(env["WANDB_DIR"]).glob("wandb/*/*.wandb")):
        time.sleep(0.05)
    wait_for(lines, f'"iter": {lines.read_text().count("lr") // 20 * 20 + 65},')
    child.kill()
    child.wait()
    n = read_progress(find_step(config.out_dir, "latest")).iter
    out, _ = run(config, env, init_from="resume", max_iters=n + 3)
    folders = offline(env)
    assert len(folders) == 2 and len({f.name[-8:] for f in folders}) == 1 and all(f.name in out for f in folders), out
    steps = [r["iter"] for f in folders for r in history(f) if "train/loss" in r]
    assert set(steps) >= {*range(1, n + 4)}


def test_ctrl_c_ends_the_run_in_order(config, env):  # noqa: F811
    child = subprocess.Popen(command(config, wandb_log=True, max_iters=100_000), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(Path(config.out_dir) / "metrics.jsonl", '"iter": 5,')
    child.send_signal(signal.SIGINT)
    out = child.communicate(timeout=60)[0]
    (folder,) = offline(env)
    assert child.returncode == 0 and "--init_from=resume" in out
    assert [r["iter"] for r in history(folder) if "train/loss" in r] == [*range(1, read_progress(find_step(config.out_dir, "latest")).iter + 1)]


@needs_loopback
@pytest.mark.parametrize("server", ["never answers", *(pytest.param(s, marks=pytest.mark.slow) for s in ("refuses", "has no name"))])
def test_a_server_that_does_not_answer_costs_a_few_seconds_at_the_end_and_no_line(config, env, server):  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = {"refuses": "http://127.0.0.1:9", "has no name": "http://no.such.host.invalid", "never answers": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        out, seconds = run(config, {**env, "WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": url[server]}, wandb_mode="online")
    assert [r["iter"] for f in offline(env) for r in history(f) if "train/loss" in r] == [*range(1, 13)]
    assert seconds < 25 and out.count("warning: ") == 1 and "wandb sync" in out, out


class Server(BaseHTTPRequestHandler):
    """As much of wandb's server as a run needs: runs, their rows, and a place for files."""

    protocol_version = "HTTP/1.1"
    runs: dict[str, list] = {}
    alive = True

    def answer(self, what: dict) -> None:
        body = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        while not Server.alive:
            time.sleep(0.1)
        if self.path.endswith("/graphql"):
            asked = json.loads(body)
            values, name = asked["variables"], asked["variables"].get("name")
            project = {"id": "p", "name": "heed", "entity": {"id": "e", "name": "me"}}
            rows = Server.runs.get(name, [])
            bucket = {"id": "b", "name": name, "displayName": name, "config": "{}", "summaryMetrics": "{}", "wandbConfig": '{"t": 1}', "tags": [], "createdAt": "2030-01-01T00:00:00",
                      "historyLineCount": len(rows), "eventsLineCount": 0, "logLineCount": 0, "historyTail": json.dumps(rows[-1:]), "eventsTail": "[]", "project": project}
            if asked["operationName"] == "UpsertBucket":
                Server.runs.setdefault(name, [])
                return self.answer({"data": {"upsertBucket": {"bucket": bucket, "inserted": not rows}}})
            return self.answer({"data": {"model": {**project, "bucket": bucket} if rows else None, "serverInfo": {"features": []}, "viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}},
                                         "createRunFiles": {"runID": "b", "uploadHeaders": [], "files": [
                                             {"name": f, "uploadUrl": f"{self.server.url}/{f}"} for f in values.get("files", [])]}}})
        if self.path.endswith("/file_stream"):
            new = json.loads(body).get("files", {}).get("wandb-history.jsonl", {"offset": 0, "content": []})
            Server.runs[self.path.split("/")[-2]][new["offset"]:new["offset"] + len(new["content"])] = new["content"]
        self.answer({})

    def do_PUT(self):
        self.do_POST()

    def log_message(self, *args):
        pass


@pytest.fixture
def server(env):
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as http:
        http.daemon_threads, http.handle_error, http.url = True, lambda *args: None, f"http://127.0.0.1:{http.server_address[1]}"
        Server.runs, Server.alive = {}, True
        threading.Thread(target=http.serve_forever, daemon=True).start()
        env.update(WANDB_API_KEY="0" * 40, WANDB_BASE_URL=http.url)
        yield Server
        Server.alive = True
        http.shutdown()


@pytest.mark.slow
@needs_loopback
def test_a_server_gets_everything_and_a_resumed_run_is_one_with_it(config, env, server):  # noqa: F811
    out, _ = run(config, env, max_iters=6)
    run(config, env, init_from="resume")
    (rows,) = [[json.loads(r) for r in rows] for rows in server.runs.values()]
    assert not offline(env) and "wandb: http" in out
    assert [r["_step"] for r in rows] == [*range(len(rows))] and {r["iter"] for r in rows if "train/loss" in r} == {*range(1, 13)}


@pytest.mark.slow
@needs_loopback
def test_a_server_that_falls_silent_during_the_run_leaves_the_rest_to_sync(config, env, server):  # noqa: F811
    child = subprocess.Popen(command(config, wandb_log=True, max_iters=100_000), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not server.runs:
        time.sleep(0.05)
    server.alive = False
    time.sleep(1)
    child.send_signal(signal.SIGINT)
    start = time.time()
    out = child.communicate(timeout=60)[0]
    assert child.returncode == 0 and time.time() - start < 20, out
    (folder,) = Path(env["WANDB_DIR"]).glob("wandb/run-*")
    assert f"wandb sync {folder}" in out, out
    assert [r["iter"] for r in history(folder) if "train/loss" in r] == [*range(1, read_progress(find_step(config.out_dir, "latest")).iter + 1)]


@needs_loopback
def test_two_ranks_make_one_run(config, env):  # noqa: F811
    """P74."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *command(config, wandb_log=True)[1:]]
    done = subprocess.run(launch, env={**env, "WANDB_MODE": "offline", "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100)
    (folder,) = offline(env)
    assert done.returncode == 0 and done.stdout.count("wandb is offline") == 1, done.stdout
    assert [r["iter"] for r in history(folder) if "train/loss" in r] == [*range(1, 13)]
