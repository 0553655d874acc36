"""Targets of the Makefile that delete files."""

import shutil
import subprocess
from pathlib import Path

import pytest

MADE = {"outputs/parity/run/checkpoints", "multirun/run", "corpora/tokens"}


@pytest.fixture
def clone(tmp_path):
    shutil.copy(Path(__file__).parents[1] / "Makefile", tmp_path)
    for folder in (*MADE, ".venv/bin", "site"):
        tmp_path.joinpath(folder).mkdir(parents=True)
    return tmp_path


def make(target, folder, answer=""):
    subprocess.run(["make", target], cwd=folder, input=answer, text=True, check=True, capture_output=True)
    return {path for path in (*MADE, ".venv", "site") if folder.joinpath(path).exists()}


def test_clean_keeps_runs_and_corpora(clone):
    assert make("clean", clone) == MADE


@pytest.mark.parametrize(("answer", "kept"), [("y\n", set()), ("n\n", MADE), ("\n", MADE)])
def test_distclean_deletes_runs_only_after_confirmation(clone, answer, kept):
    assert make("distclean", clone, answer) == kept
