"""Gradients with early sums."""

import re

import pytest
import torch

from flashrnn import Cell, get_cell, layer_norm, rms_norm
from flashrnn.cells.early_sums import gradient_with_early_sums
from flashrnn.cells.hoisting import hoisted
from flashrnn.cells.printers.cuda import exchanges, head_functions
from flashrnn.cells.printers.pytorch import torch_function
from flashrnn.cells.trace import trace
from tests.problems import COMPETING, NORMALISED_LSTM, NORMALISED_STATE, cell_name

LAYERNORM_LSTM = get_cell("layernorm_lstm")
LOOP = hoisted(LAYERNORM_LSTM).loop


def _two_norms(x, r, h, c):
    c = torch.sigmoid(x) * c + layer_norm(r)
    return torch.tanh(rms_norm(c)) - c, c


def _three_norms(x, r, h, c):
    h, c = _two_norms(x, rms_norm(x + r), h, c)
    return h, c


def _cell(step) -> Cell:
    return Cell(step.__name__, step, states=("h", "c"), input_gates=("x",), recurrent_gates=("r",))


@pytest.mark.parametrize("cell", [LAYERNORM_LSTM, LOOP, NORMALISED_LSTM, _cell(_two_norms)], ids=cell_name)
def test_gradient_is_the_same(cell):
    gradient, found = trace(cell).statistics.gradient, gradient_with_early_sums(cell)
    generator = torch.Generator().manual_seed(0)
    given = {name: torch.randn(3, 8, generator=generator, dtype=torch.float64) for name in gradient.inputs}
    for name in given:
        if name.startswith("statistic"):  # equal for all units
            given[name] = given[name][:, :1].expand(3, 8)
    outputs = list(gradient.outputs)
    expected, results = (torch_function(graph, list(given), outputs)(*given.values()) for graph in (gradient, found))
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other))


@pytest.mark.parametrize(
    "cell", [get_cell("lstm"), get_cell("layernorm_gru"), COMPETING, NORMALISED_STATE], ids=cell_name
)
def test_gradients_without_sums_of_sums_have_none(cell):
    assert gradient_with_early_sums(cell) is None


def test_early_sums_are_exchanged_before_the_gradient_of_h_arrives():
    """Those are sums of products of factors; the others are two of the norm of c, and two of that of the gates."""
    assert [len(one.sums) for one in exchanges(LOOP, "backward", early_sums=True)] == [4, 4]
    assert exchanges(LOOP, "forward", early_sums=True) == exchanges(LOOP, "forward")
    text = head_functions(LOOP, early_sums=True).split("cells_backward")[1]
    calls = re.findall(r"units.template (begin<\d|end<\d|reduce)|(late)\(", text)
    assert ["".join(call) for call in calls] == ["begin<0", "late", "begin<1", "end<0", "end<1"]
