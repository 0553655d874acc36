"""The tutorial of a new cell: what it shows holds on this machine, for its cell and for those from the literature."""

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


def test_every_backend_of_this_machine_agrees_with_the_reference(tutorial):
    assert "vanilla" in tutorial["errors"]
    for backend, errors in tutorial["errors"].items():
        assert max(errors) < BOUNDS[tutorial["dtype"]], backend


def test_the_cell_was_timed_beside_the_lstm(tutorial):
    assert set(tutorial["milliseconds"]) == {"coupled LSTM", "LSTM", "nn.LSTM"}
    assert min(tutorial["milliseconds"].values()) > 0


@pytest.mark.parametrize("backend", flashrnn.backends())
@pytest.mark.parametrize("cell", ["COUPLED_LSTM", *LITERATURE])
def test_cells_run_on_every_backend(tutorial, backend, cell):
    device = "cuda" if torch.cuda.is_available() and backend != "cpu_fused" else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    check(backend, Case(tutorial[cell], B=3, T=9, D=16), dtype, device)


def test_all_cells_from_the_literature_are_found():
    assert len(LITERATURE) == 5


def test_the_cell_trains_and_is_evaluated_from_its_checkpoint(tutorial, tmp_path):
    """The page's command, on a model that is done in a moment."""
    command, _ = train_commands(PAGES[TUTORIAL].read_text())
    trained = train(config(*command, *TINY["parity"], *SHORT, f"run_dir={tmp_path}"))
    evaluated = evaluate(str(tmp_path))
    assert evaluated["ranges"] == trained["ranges"]


def test_a_file_of_its_own_names_the_same_model(tutorial):
    """The run_page fixture has made the reader's folder the current one."""
    command, _ = train_commands(PAGES[TUTORIAL].read_text())
    by_file = config("model=coupled_lstm", f"hydra.searchpath=[file://{Path.cwd()}/configs]")
    assert by_file.model == config(*command).model
