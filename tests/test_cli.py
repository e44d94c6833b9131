"""The command line: what is accepted, what is refused and how, and that nothing heavy is imported for it."""

import json
import re
import subprocess
import sys
from dataclasses import asdict
from typing import Literal

import pytest
from conftest import ROOT

from config import GPTConfig, TrainConfig, from_dict
from engine import cli
from engine.cli import parse


@pytest.fixture
def preset(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("from __future__ import annotations\nimport math\nfrom pathlib import Path\n_hidden = 3\nn_layer = 2 * _hidden\nlearning_rate = 1\nmin_lr = None\nlayers = 'attention*2'\n", encoding="utf-8")
    return str(path)


def test_defaults_then_presets_then_flags(preset, tmp_path):
    second = tmp_path / "second.py"
    second.write_text("n_layer = 3\n", encoding="utf-8")
    assert parse(TrainConfig, [], presets=True) == TrainConfig(out_dir="out/default")
    c = parse(TrainConfig, [preset, "--n_head=2"], presets=True)
    assert (c.n_layer, c.learning_rate, c.n_head, c.out_dir, c.layers) == (6, 1.0, 2, "out/mine", "attention*2")
    assert parse(TrainConfig, [preset, str(second)], presets=True).n_layer == 3
    c = parse(TrainConfig, ["--n_layer=4", preset, "--out_dir", "here"], presets=True)
    assert (c.n_layer, c.out_dir) == (4, "here")


@pytest.mark.parametrize("argv, field, value", [
    (["--n_layer=4"], "n_layer", 4), (["--n-layer", "4"], "n_layer", 4), (["--learning_rate", "1"], "learning_rate", 1.0), (["--learning_rate=1e-3"], "learning_rate", 1e-3),
    (["--min_lr=None"], "min_lr", None), (["--min-lr", "none"], "min_lr", None), (["--n_kv_head", "2"], "n_kv_head", 2), (["--dropout=0"], "dropout", 0.0),
    *[([f"--bias={w}"], "bias", True) for w in ("true", "True", "yes", "on", "1", "TRUE")], *[(["--bias", w], "bias", False) for w in ("false", "no", "off", "0", "False")],
    (["--bias"], "bias", True), (["--bias", "--n_layer=2"], "bias", True), (["--no-bias"], "bias", False), (["--no_tie_embeddings"], "tie_embeddings", False),
    (["--compile=none"], "compile", None), (["--compile"], "compile", True), (["--no-compile"], "compile", False), (["--init_from=resume"], "init_from", "resume"),
    (["--layers", "attention(window=3) attention"], "layers", "attention(window=3) attention"), (["--dataset=a=b"], "dataset", "a=b"), (["--norm", "layernorm"], "norm", "layernorm"),
])
def test_spellings(argv, field, value):
    got = getattr(parse(TrainConfig, argv, presets=True), field)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize("argv, message", [
    (["--n_layr=4"], "did you mean --n_layer?"), (["-batch_size=4"], "did you mean --batch_size?"), (["--nosuchthing=1"], "unknown flag --nosuchthing=1"),
    (["--n_layer=four"], "--n_layer"), (["--n_layer=4.5"], "4.5"), (["--n_layer"], "needs a value"), (["--norm=rms"], "'rmsnorm', 'layernorm'"), (["--bias=maybe"], "--bias"),
    (["--batch_size=1e1"], "--batch_size"), (["--learning_rate=fast"], "--learning_rate"), (["--min_lr=-1"], "min_lr=-1.0 must be at least 0"), (["--dropout=1"], "must be below 1"),
    (["nosuch.py"], "no preset 'nosuch.py'"), (["check"], "no preset 'check'"), (["--seed=-1"], "at least 0"), (["--lr_decay_iters=50"], "must be above warmup_iters"), (["config/demoo.py"], "did you mean 'config/demo.py'?"), (["--n_head=5"], "no multiple of n_head=5"), (["--n_layer", "none"], "n_layer"),
])
def test_mistakes_are_one_line_and_exit_2(argv, message, capsys):
    with pytest.raises(SystemExit) as e:
        parse(TrainConfig, argv, presets=True)
    err = capsys.readouterr().err
    assert e.value.code == 2 and message in err and err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize("text, message", [
    ("n_layr = 3", "unknown key 'n_layr': did you mean 'n_layer'?"), ("n_layer = '3'", "n_layer='3' is no int"), ("norm = 'rms'", "did you mean 'rmsnorm'?"),
    ("n_layer = 3.0", "n_layer=3.0 is no int"), ("bias = 1", "bias=1 is no bool"), ("x y", "SyntaxError"), ("import nosuchmodule", "nosuchmodule"), ("n_head = 7", "n_head=7"), ("n_layer = None", "n_layer=None is no int"),
])
def test_mistakes_in_presets_are_one_line_and_exit_2(text, message, tmp_path, capsys):
    path = tmp_path / "wrong.py"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit) as e:
        parse(TrainConfig, [str(path)], presets=True)
    err = capsys.readouterr().err
    assert e.value.code == 2 and message in err and err.count("\n") == 1


def run(*argv, **kw):
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=120, **kw)


@pytest.mark.parametrize("script", ["train.py", "sample.py", "eval.py"])
def test_help_lists_every_field_and_imports_no_torch(script, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')", encoding="utf-8")
    out = run(str(ROOT / script), "--help", env={"PYTHONPATH": str(tmp_path), "PATH": ""})
    assert out.returncode == 0, out.stderr
    for name in TrainConfig.__dataclass_fields__ if script == "train.py" else ("checkpoint", "device", "dtype"):
        assert f"--{name}" in out.stdout
    wrong = run(str(ROOT / script), "--devise=cpu", env={"PYTHONPATH": str(tmp_path), "PATH": ""})
    assert wrong.returncode == 2 and wrong.stderr == "error: unknown flag --devise=cpu: did you mean --device?\n"


def test_a_wrong_word_in_layers_exits_2_before_anything_is_written(tmp_path):
    out = run(str(ROOT / "train.py"), "--layers=attentionn", "--dataset=nowhere", cwd=tmp_path)
    assert out.returncode == 2 and out.stderr == "error: layers: unknown mixer 'attentionn': did you mean 'attention'?\n" and not list(tmp_path.iterdir())


@pytest.mark.parametrize("version, fine", [("1.11.0", False), ("2.10.1+cu128", False), ("2.11.0", True), ("2.13.0+cpu", True), ("3.0", True)])
def test_an_old_torch_is_one_line(version, fine, monkeypatch):
    monkeypatch.setattr(sys.modules["torch"], "__version__", version)
    if fine:
        cli.require_torch()
    else:
        with pytest.raises(ValueError, match=f"needs torch 2.11 or newer, found {version.split('+')[0]}"):
            cli.require_torch()


def test_an_old_torch_is_refused_before_it_is_imported(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')", encoding="utf-8")
    info = tmp_path / "torch-1.11.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.11.0\n", encoding="utf-8")
    out = run(str(ROOT / "train.py"), env={"PYTHONPATH": str(tmp_path), "PATH": ""})
    assert out.returncode == 2 and "needs torch 2.11 or newer, found 1.11.0" in out.stderr


def test_the_config_package_imports_no_torch():
    assert run("-c", "import sys, config, engine.cli; print('torch' in sys.modules)", cwd=ROOT).stdout == "False\n"


def test_configs_go_through_json():
    c = TrainConfig(n_layer=3, min_lr=0.1, layers="attention*2")
    d = json.loads(json.dumps(asdict(c)))
    assert from_dict(TrainConfig, d) == c and from_dict(TrainConfig, {**d, "of_a_newer_version": 1}) == c
    assert from_dict(GPTConfig, d).n_layer == 3


def test_presets_in_the_repository_parse_and_say_what_to_expect():
    for path in sorted((ROOT / "config").rglob("*.py")):
        if path.stem not in ("__init__", "check"):
            parse(TrainConfig, [str(path)], presets=True)
            last = re.search(r"(# .*\n?)+\Z", path.read_text(encoding="utf-8")).group()
            assert re.match(r"# .*loss \d\.\d+.* in \d+ (s|min|h).*\b20\d\d-\d\d\b", last) or re.search(r"not made|No run .* yet|no run .* yet", last), \
                f"{path.name} does not end with loss, time, machine and date"


def test_scripts_and_notebooks_import_a_run():
    code = "from train import TrainConfig, train; from model import GPT, GPTConfig; import sample, eval; print(GPT(GPTConfig(vocab_size=9, n_layer=1, n_embd=8, n_head=1)).cfg.n_layer)"
    assert run("-c", code, cwd=ROOT).stdout == "1\n"


def test_literals_and_optionals_of_any_dataclass():
    from config.check import coerce
    assert coerce(3, float | None, "x") == 3.0 and coerce(None, int | None, "x") is None
    for value, hint in [(True, int), (3, bool), (None, int), ("a", Literal["b"]), (1.5, int)]:
        with pytest.raises(ValueError, match="x"):
            coerce(value, hint, "x")
