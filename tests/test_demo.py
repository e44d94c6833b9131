"""The README's first command, whole."""

import pytest
from conftest import ROOT

from config import TrainConfig
from engine.cli import parse
from tools.demo import DemoConfig, main
from train import train


@pytest.mark.slow
def test_the_demo_learns_more_than_letter_statistics_and_writes_words(tmp_path):
    """A loss that counting letters does not reach, and words that are words: what the README shows, with some room."""
    from data.shakespeare.prepare import offline
    if not offline():
        pytest.skip("the plays are not here: python -m data.shakespeare.prepare fetches them")
    done = train(parse(TrainConfig, [str(ROOT / "config" / "demo.py"), f"--out_dir={tmp_path / 'demo'}"], presets=True))
    result = main(DemoConfig(checkpoint=str(tmp_path / "demo")))
    assert done.iter == 1000 and result["val_loss"] <= 1.56 and result["known_words"] >= 0.9
