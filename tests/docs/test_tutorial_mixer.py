"""The tutorial of a new mixer: a model with it trains, and is evaluated from its checkpoint."""

from pathlib import Path

from scripts.train import train
from tests.tiny_runs import SHORT, TINY, config, evaluate


def test_mixer_of_the_page_trains(run_page, tmp_path):
    run_page("docs/tutorial_mixer.md")
    reader = f"hydra.searchpath=[file://{Path.cwd()}/configs]"
    trained = train(config("model=average", *TINY["parity"], *SHORT, f"run_dir={tmp_path}", reader))
    assert evaluate(str(tmp_path))["ranges"] == trained["ranges"]
