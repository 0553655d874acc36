"""The tutorial of a new cell works on this machine, for its cell and for those from the literature."""

import re
from pathlib import Path

import pytest
import torch

import flashrnn
from flashrnn.accuracy import BOUNDS
from scripts.train import train
from tests.docs.pages import PAGES
from tests.docs.test_pages import TUTORIAL, train_commands
from tests.suite import Case, check
from tests.tiny_runs import SHORT, TINY, config, evaluate

LITERATURE = re.findall(r"^([A-Z_]+) = flashrnn\.Cell\(", PAGES[TUTORIAL].read_text(), flags=re.MULTILINE)


@pytest.fixture(scope="module")
def tutorial(run_page):
    return run_page(TUTORIAL)


def test_all_backends_agree_with_the_reference(tutorial):
    assert "vanilla" in tutorial["errors"]
    for backend, errors in tutorial["errors"].items():
        assert max(errors) < BOUNDS[tutorial["dtype"]], backend


def test_cell_is_timed_and_compared_with_the_lstm(tutorial):
    assert set(tutorial["milliseconds"]) == {"coupled LSTM", "LSTM", "nn.LSTM"}
    assert min(tutorial["milliseconds"].values()) > 0


@pytest.mark.parametrize("backend", flashrnn.backends())
@pytest.mark.parametrize("cell", ["COUPLED_LSTM", *LITERATURE])
def test_cells_run_on_every_backend(tutorial, backend, cell):
    device = "cuda" if torch.cuda.is_available() and backend != "cpu_fused" else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    check(backend, Case(tutorial[cell], B=3, T=9, D=16), dtype, device)


def test_page_contains_cells_from_the_literature():
    assert len(LITERATURE) == 5


def test_cell_trains_and_is_evaluated_from_its_checkpoint(tutorial, tmp_path):
    """Runs the page's command with a tiny model."""
    command, _ = train_commands(PAGES[TUTORIAL].read_text())
    trained = train(config(*command, *TINY["parity"], *SHORT, f"run_dir={tmp_path}"))
    evaluated = evaluate(str(tmp_path))
    assert evaluated["ranges"] == trained["ranges"]


def test_config_file_names_the_same_model(tutorial):
    """The fixture run_page has changed to the folder with the page's files."""
    command, _ = train_commands(PAGES[TUTORIAL].read_text())
    by_file = config("model=coupled_lstm", f"hydra.searchpath=[file://{Path.cwd()}/configs]")
    assert by_file.model == config(*command).model
