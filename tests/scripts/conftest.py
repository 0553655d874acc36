"""Runs of scripts.train within the test's own process, on the smallest models."""

import shutil

import pytest
from hydra import compose, initialize_config_dir

from scripts.config import CONFIGS

TINY = {
    "parity": [
        "model.d_model=8",
        "model.num_blocks=1",
        "data.max_length=6",
        "data.eval_lengths=[6,9,12]",
        "data.eval_batches=1",
        "data.batch_size=4",
    ],
    "text_tiny": [
        "model.d_model=8",
        "model.num_blocks=1",
        "model.num_heads=1",
        "data.tokenizer=bpe:300",
        "data.context_length=8",
        "data.batch_size=64",
        "data.val_fraction=0.3",
    ],
}
SHORT = [
    "trainer.max_steps=8",
    "optim.warmup_steps=2",
    "val_every=4",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
    "trainer.accelerator=cpu",
]


def config(*overrides):
    with initialize_config_dir(CONFIGS, version_base="1.3"):
        return compose("train", overrides=list(overrides))


@pytest.fixture
def tiny_config(tmp_path, monkeypatch):
    """tiny_config("parity", "model=gru", run="a"): the config of a tiny run in tmp_path/outputs/parity/a."""
    monkeypatch.chdir(tmp_path)
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        texts.joinpath(f"{number}.txt").write_text(f"the {number}th of forty texts says {number} and {number**3}. " * 9)

    def build(experiment="parity", *overrides, run="run"):
        folder = tmp_path / "outputs" / experiment / run
        source = [f"data.source={texts}/*.txt"] if experiment == "text_tiny" else []
        folders = [f"experiment={experiment}", f"run_dir={folder}", *source]
        return config(*folders, *TINY[experiment], *SHORT, *overrides)

    return build


@pytest.fixture
def change_texts(tmp_path):
    """change_texts(): the texts of tiny_config("text_tiny") become other ones, and what was prepared is gone."""

    def change():
        for file in tmp_path.glob("texts/*.txt"):
            file.write_text(f"{file.stem} quite other words about something else, {file.stem * 3}. " * 9)
        shutil.rmtree(tmp_path / "corpora")

    return change
