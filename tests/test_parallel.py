"""DDP: any number of ranks is one process."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT, needs_loopback
from test_train import command, config, metrics, wait_for  # noqa: F401

from data.loader import Loader
from data.shards import Corpus
from engine.checkpoint import find_step, load_model, read_progress
from train import train

pytestmark = needs_loopback      # ranks talk over it
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def torchrun(ranks: int, *argv: str, **kw) -> subprocess.Popen:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *argv]
    return subprocess.Popen(launch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENV, **kw)


@pytest.mark.parametrize("ranks, batch, accumulation", [(1, 4, 2), (2, 4, 2), (2, 2, 4), (3, 2, 3), (4, 4, 2)])
def test_any_number_of_ranks_gives_the_losses_of_one_process(config, ranks, batch, accumulation):  # noqa: F811
    """C3, C4: loss, norm, learning rate and validation loss of every step; one rank logs and saves."""
    config = replace(config, dropout=0.0, batch_size=batch, gradient_accumulation_steps=accumulation, eval_interval=5, max_iters=8)
    train(config)
    run = torchrun(ranks, *command(config, out_dir=config.out_dir + "_ranks")[1:])
    out = run.communicate(timeout=120)[0]
    assert run.returncode == 0, out
    assert out.count("parameters ") == 1 and out.count("validation loss") == 2
    a, b = metrics(config.out_dir), metrics(config.out_dir + "_ranks")
    assert a.keys() == b.keys() and len(a) == 8
    for i in a:
        assert all(a[i][k] == pytest.approx(b[i][k], rel=2e-5) for k in a[i]), (i, a[i], b[i])
    val = [[json.loads(line)["val_loss"] for line in (Path(d) / "metrics.jsonl").read_text().splitlines() if "val_loss" in line] for d in (config.out_dir, config.out_dir + "_ranks")]
    assert val[0] == pytest.approx(val[1], rel=2e-5)
    for p, q in zip(load_model(config.out_dir)[0].parameters(), load_model(config.out_dir + "_ranks")[0].parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_rows_that_do_not_divide_are_refused_with_what_would(config):  # noqa: F811
    loader = lambda rows, ranks: Loader(Corpus(config.dataset).split("train"), 16, rows, 0, 0, ranks)
    with pytest.raises(ValueError, match="5 rows a step .* do not divide over 2 ranks: 4 or 6 rows would"):
        loader(5, 2)
    assert len(loader(6, 2).batch(0)) == 3


def test_two_nodes_are_two_torchruns(config):  # noqa: F811
    """P43: the second node writes nothing; losses are those of one process."""
    config = replace(config, dropout=0.0, max_iters=3)
    train(config)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    runs = [subprocess.Popen(launch + command(config, out_dir=config.out_dir + "_nodes")[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENV) for _ in range(2)]
    out = "".join(run.communicate(timeout=120)[0] for run in runs)
    assert not any(run.returncode for run in runs) and out.count("parameters ") == 1, out
    a, b = metrics(config.out_dir), metrics(config.out_dir + "_nodes")
    assert len(b) == 3 and all(a[i]["loss"] == pytest.approx(b[i]["loss"], rel=2e-5) for i in a)


def test_gradients_of_two_and_four_ranks_are_those_of_one(tmp_path):
    """C3: also with 3 and 97 valid targets; and the ranks' parameters are equal bit for bit after the step."""
    script = tmp_path / "step.py"
    script.write_text(f"""
import contextlib, sys, torch
sys.path.insert(0, {str(ROOT / 'tests')!r})
from conftest import tiny
from engine.parallel import Ranks, leave
from train import backward
ranks = Ranks("cpu")
for masked in (False, True):
    g = torch.Generator().manual_seed(0)
    x, y = torch.randint(65, (8, 16), generator=g), torch.randint(65, (8, 16), generator=g)
    if masked:
        y[:4] = -1
        y[0, :3] = 5
        y[6, 2:] = -1
    model = tiny().train()
    own = slice(ranks.rank * 8 // ranks.size, (ranks.rank + 1) * 8 // ranks.size)
    loss = backward(ranks.wrap(model), x[own], y[own], 2, contextlib.nullcontext, ranks, lambda loss: loss)
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    torch.save([loss, [p.grad for p in model.parameters()], [p.data for p in model.parameters()]], {str(tmp_path)!r} + f"/{{ranks.size}}_{{ranks.rank}}_{{masked}}.pt")
leave()
""", encoding="utf-8")
    for n in (1, 2, 4):
        run = torchrun(n, str(script))
        assert run.wait(timeout=120) == 0, run.stdout.read()
    for masked in (False, True):
        one = torch.load(tmp_path / f"1_0_{masked}.pt")
        for n in (2, 4):
            first, *others = (torch.load(tmp_path / f"{n}_{rank}_{masked}.pt") for rank in range(n))
            torch.testing.assert_close(first[0], one[0], rtol=1e-5, atol=1e-6)
            for a, b in zip(first[1], one[1]):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
            assert all(torch.equal(a, b) for other in others for a, b in zip(first[2], other[2]))


def test_every_mixer_trains_on_two_ranks_as_on_one(tmp_path):
    """Loss and gradients; a parameter that gets none would hang or stop DDP."""
    script = tmp_path / "step.py"
    script.write_text(f"""
import contextlib, sys, torch
sys.path.insert(0, {str(ROOT / 'tests')!r})
from conftest import tiny, tokens
from engine.parallel import Ranks, leave
from mixers import MIXERS
from train import backward
ranks, found = Ranks("cpu"), {{}}
for word, mlp in [*((word, "swiglu") for word in MIXERS), ("rwkv6", "rwkv6"), ("rwkv7", "rwkv7")]:
    model = tiny(layers=word, mlp=mlp).train()
    x, y = tokens(4, 20), tokens(4, 20, 1)
    own = slice(ranks.rank * 4 // ranks.size, (ranks.rank + 1) * 4 // ranks.size)
    for _ in range(2):                       # a parameter left out is only noticed at the next call
        model.zero_grad()
        loss = backward(ranks.wrap(model), x[own], y[own], 1, contextlib.nullcontext, ranks, lambda loss: loss)
    found[word, mlp] = [loss, *(p.grad for p in model.parameters())]
torch.save(found, {str(tmp_path)!r} + f"/{{ranks.size}}_{{ranks.rank}}.pt")
leave()
""", encoding="utf-8")
    for n in (1, 2):
        run = torchrun(n, str(script))
        out = run.communicate(timeout=300)[0]
        assert run.returncode == 0, out
    one, *two = (torch.load(tmp_path / name) for name in ("1_0.pt", "2_0.pt", "2_1.pt"))
    for key in one:
        for other in two:
            for a, b in zip(one[key], other[key], strict=True):
                assert a is not None and b is not None, key
                torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5 * a.abs().max().item(), msg=lambda m, key=key: f"{key}: {m}")


def test_all_ranks_stop_together_and_go_on_with_another_number(config):  # noqa: F811
    config = replace(config, dropout=0.0, lr_decay_iters=40, max_iters=100_000)
    run = torchrun(2, *command(config)[1:])
    wait_for(Path(config.out_dir) / "metrics.jsonl", '"iter": 5,')
    run.send_signal(signal.SIGTERM)
    out = run.communicate(timeout=60)[0]
    assert out.count("--init_from=resume") == 1, out
    n = read_progress(find_step(config.out_dir, "latest")).iter
    train(replace(config, init_from="resume", max_iters=n + 3))
    train(replace(config, out_dir=config.out_dir + "_whole", max_iters=n + 3))
    a, b = metrics(config.out_dir), metrics(config.out_dir + "_whole")
    assert all(a[i]["loss"] == pytest.approx(b[i]["loss"], rel=1e-4) for i in b) and len(a) == len(b) == n + 3


def test_a_rank_that_dies_ends_the_job_and_is_named(config):  # noqa: F811
    run = torchrun(2, *command(replace(config, max_iters=100_000))[1:])
    wait_for(Path(config.out_dir) / "metrics.jsonl", '"iter": 5,')
    children = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True).stdout.split()
    start = time.time()
    os.kill(int(children[1]), signal.SIGKILL)
    out = run.communicate(timeout=60)[0]
    assert run.returncode != 0 and time.time() - start < 50 and "Signal 9" in out and f"(pid: {children[1]})" in out
