"""The tutorial of a new mixer: a model trains with it, and evaluates from its checkpoint."""

from pathlib import Path

from scripts.train import train
from tests.tiny_runs import SHORT, TINY, config, evaluate


def test_the_mixer_trains_by_its_file(run_page, tmp_path):
    run_page("docs/tutorial_mixer.md")
    reader = f"hydra.searchpath=[file://{Path.cwd()}/configs]"
    trained = train(config("model=average", *TINY["parity"], *SHORT, f"run_dir={tmp_path}", reader))
    assert evaluate(str(tmp_path))["ranges"] == trained["ranges"]
