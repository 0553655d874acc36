"""Norms of recurrent gates that a kernel has centred."""

import pytest
import torch

from flashrnn import Cell, get_cell, layer_norm, rms_norm
from flashrnn.cells.centring import MEAN_SQUARE, centred, is_centred
from flashrnn.cells.printers.cuda import head_functions
from flashrnn.cells.printers.pytorch import torch_function
from flashrnn.cells.trace import trace
from tests.problems import NORMALISED, cell_name

LAYERNORM_LSTM = get_cell("layernorm_lstm")


def _of_two_gates(step, input_gates=("x",), recurrent_gates=("r", "u")) -> Cell:
    return Cell("mine", step, states=("h",), input_gates=input_gates, recurrent_gates=recurrent_gates)


def _jointly(x, r, u, h):
    r, u = layer_norm(r, u)
    return torch.tanh(x + r * torch.sigmoid(u))


@pytest.mark.parametrize("cell", [LAYERNORM_LSTM, _of_two_gates(_jointly)], ids=cell_name)
def test_step_of_centred_gates_is_that_of_gates(cell):
    assert is_centred(cell)
    generator = torch.Generator().manual_seed(0)
    names = (*cell.gates, *cell.states)
    values = {name: torch.randn(3, 8, generator=generator, dtype=torch.float64) for name in names}
    gates = torch.stack([values[gate] + k for k, gate in enumerate(cell.recurrent_gates)])
    gates_of_zero_mean = gates - gates.mean((0, 2), keepdim=True)
    given = values | dict(zip(cell.recurrent_gates, gates, strict=True))
    of_zero_mean = values | dict(zip(cell.recurrent_gates, gates_of_zero_mean, strict=True))
    of_zero_mean[MEAN_SQUARE] = gates_of_zero_mean.square().mean((0, 2))[:, None].expand(3, 8)
    step = trace(cell, torch.float64).forward
    outputs = list(step.outputs)
    expected = torch_function(step, list(given), outputs)(*given.values())
    found = torch_function(centred(cell, step), list(of_zero_mean), outputs)(*of_zero_mean.values())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("cell", [cell for cell in NORMALISED if cell is not LAYERNORM_LSTM], ids=cell_name)
def test_norms_with_inputs_or_of_other_values_are_not_centred(cell):
    assert not is_centred(cell)


@pytest.mark.parametrize(
    "step",
    [
        lambda x, r, u, h: torch.tanh(x + u * layer_norm(r, u)[0]),  # u is used without the norm, too
        lambda x, r, u, h: torch.tanh(x + u * layer_norm(r)),
        lambda x, r, u, h: torch.tanh(x + rms_norm(r, u)[0]),
    ],
    ids=["gate used twice", "one of two gates", "rms norm"],
)
def test_gates_that_are_not_only_normalised_are_not_centred(step):
    assert not is_centred(_of_two_gates(step))


def test_centred_step_reduces_one_norm_less():
    texts = [head_functions(LAYERNORM_LSTM, early=True, of_centred=of_centred) for of_centred in (False, True)]
    assert [text.count("units.template reduce<") for text in texts] == [5, 4]
