import logging

import pytest
import torch

from flashrnn import FlashRNN, UnsupportedProblem, backends, dispatch, flashrnn, get_cell
from flashrnn.reference import Reference
from tests.problems import random_inputs


class Picky(Reference):
    """A backend that supports only half types."""

    name = "picky"

    def unsupported_reason(self, problem):
        return None if problem.dtype in (torch.float16, torch.bfloat16) else f"{problem.dtype} is not a half type"


@pytest.fixture
def _picky_first(monkeypatch):
    monkeypatch.setattr(dispatch, "BACKENDS", (Picky(), Reference()))
    dispatch._log_choice.cache_clear()


def run(backend: str, dtype: torch.dtype = torch.float32, **sizes) -> torch.Tensor:
    sizes = {"B": 2, "T": 3, "N": 2, "D": 4} | sizes
    inputs = random_inputs(get_cell("gru"), **sizes, dtype=dtype)
    return flashrnn(*inputs, function="gru", backend=backend)[0]


@pytest.mark.usefixtures("_picky_first")
def test_error_of_a_named_backend_contains_its_reason():
    assert run("picky", torch.float16).dtype == torch.float16
    with pytest.raises(UnsupportedProblem, match=r"'picky': torch\.float32 is not a half type$"):
        run("picky")


@pytest.mark.usefixtures("_picky_first")
def test_auto_selects_the_first_supporting_backend_and_logs_it_once(caplog):
    with caplog.at_level(logging.INFO, "flashrnn"):
        run("auto")
        run("auto", B=3, T=5)  # the same layer with another batch
        run("auto", torch.float16)
        run("vanilla")
    assert [record.getMessage() for record in caplog.records] == [
        "gru 2 x 4, torch.float32 on cpu, by backend vanilla",
        "gru 2 x 4, torch.float16 on cpu, by backend picky",
    ]


def test_auto_lists_all_reasons_if_no_backend_supports_the_call(monkeypatch):
    monkeypatch.setattr(dispatch, "BACKENDS", (Picky(),))
    with pytest.raises(UnsupportedProblem, match=r"'picky'.*torch\.float32"):
        run("auto")


@pytest.mark.usefixtures("_picky_first")
def test_unknown_backend_lists_the_backends():
    assert backends() == ("picky", "vanilla")
    with pytest.raises(ValueError, match=r"'triton'.* auto, picky, vanilla"):
        FlashRNN(3, 4, backend="triton")


def test_backend_receives_the_whole_problem(monkeypatch):
    asked = []

    class Curious(Reference):
        def unsupported_reason(self, problem):
            asked.append(problem)

    monkeypatch.setattr(dispatch, "BACKENDS", (Curious(),))
    Wx, R, b, states = random_inputs(get_cell("lstm"), 2, 3, 4, 5, torch.float32)
    with torch.no_grad():
        FlashRNN(6, 20, num_heads=4, batch_first=True)(torch.randn(2, 3, 6))
        flashrnn(Wx, R, b, states)
    flashrnn(Wx, R, b, states, reset=torch.zeros(2, 3, dtype=torch.bool))
    layer, function = asked  # the second call has the problem of the first one, whose answer is cached
    assert (layer.cell, layer.dtype, layer.device) == (get_cell("lstm"), torch.float32, torch.device("cpu"))
    assert (layer.heads, layer.head_dim) == (4, 5)
    assert (layer.training, layer.reset) == (False, False)
    assert (function.training, function.reset) == (True, True)
