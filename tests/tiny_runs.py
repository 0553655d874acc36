"""Tiny runs of scripts.train, in the process of the test or in others, and their results."""

import csv
import os
import re
from functools import cache
from pathlib import Path

from omegaconf import OmegaConf

from tests import fresh
from training import evaluation
from training.configuration import CONFIGS, composed, with_values

ROOT = Path(__file__).parents[1]
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
        "samples=false",
    ],
}
SHORT = [
    "trainer.max_steps=8",
    "schedule.warmup_steps=2",
    "val_every=4",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
    "trainer.accelerator=cpu",
]


def config(*overrides, name="train"):
    """Return the config of a command with these overrides.

    Hydra takes 0.1 s. It therefore composes each selection of groups and new keys only once, and the values of existing
    keys are set in a copy.
    """
    values = [one for one in overrides if _is_value(one)]
    return with_values(_composed(tuple(one for one in overrides if one not in values), name), values)


def _is_value(override):
    key = re.match(r"(?!hydra\.)([\w.]+)=", override)
    return key is not None and not Path(CONFIGS, key[1]).is_dir()


_composed = cache(composed)


def configs_in(folder):
    """Return a function that builds configs of tiny runs in a folder.

    `build("parity", "model=gru", run="a")` returns the config of a run in folder/outputs/parity/a.
    """
    texts = folder / "texts"
    texts.mkdir()
    for number in range(40):
        texts.joinpath(f"{number}.txt").write_text(f"the {number}th of forty texts says {number} and {number**3}. " * 9)

    def build(experiment="parity", *overrides, run="run"):
        source = [f"data.source={texts}/*.txt"] if experiment == "text_tiny" else []
        folders = [f"experiment={experiment}", f"run_dir={folder}/outputs/{experiment}/{run}", *source]
        return config(*folders, *TINY[experiment], *SHORT, *overrides)

    return build


def environment():
    """Return the environment of a command that runs on one thread."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def run(module, *arguments, folder):
    """Run a command in its own process, as a user does."""
    return fresh.run([module, *arguments], folder, environment())


def evaluate(ckpt, *overrides):
    """Return the result of scripts.evaluate with ckpt=... and these overrides."""
    return evaluation.evaluate(str(ckpt), OmegaConf.from_dotlist(list(overrides)))


def metrics(folder):
    return list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))


def losses(folder):
    return {int(row["step"]): row["train/loss"] for row in metrics(folder) if row["train/loss"]}
