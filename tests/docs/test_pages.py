"""The Python code of the README and the documentation runs, and their commands are valid."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts.train import train
from tests.docs.pages import PAGES, has_code
from tests.tiny_runs import SHORT, TINY, config
from training import checkpoint

TUTORIAL = "docs/tutorial_cell.md"  # tested in test_tutorial_cell.py


@pytest.mark.parametrize("page", [page for page in PAGES if has_code(page) and page != TUTORIAL])
def test_code_runs(run_page, page):
    run_page(page)


def test_optimizer_of_the_training_page_trains(run_page, tmp_path):
    run_page("docs/training.md")
    reader = f"hydra.searchpath=[file://{Path.cwd()}/configs]"
    train(config("optim=sgd", *TINY["parity"], *SHORT, f"run_dir={tmp_path}", reader))
    (group, _) = checkpoint.load(checkpoint.find(str(tmp_path)))["optimizer_states"][0]["param_groups"]
    assert group["momentum"] == 0.95


def train_commands(text):
    for line in re.findall(r"^ *(python -m scripts\.train\b.*)$", text, flags=re.MULTILINE):
        yield [argument for argument in shlex.split(line, comments=True)[3:] if argument != "-m"]


@pytest.mark.parametrize("page", [page for page, path in PAGES.items() if list(train_commands(path.read_text()))])
def test_options_and_keys_of_training_commands_exist(page):
    for arguments in train_commands(PAGES[page].read_text()):
        of_run = [argument for argument in arguments if not argument.startswith("hydra.") and "$" not in argument]
        config(*(re.sub(r"=([^\[,]+),.*", r"=\1", argument) for argument in of_run))  # the first values of a sweep


@pytest.mark.parametrize("page", PAGES)
def test_programs_of_commands_exist(page):
    for module in re.findall(r"python -m (scripts[\w.]*\w)", PAGES[page].read_text()):
        assert find_spec(module), module
