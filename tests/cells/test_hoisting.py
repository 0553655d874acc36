"""Cells in two parts: the normalisation of inputs before the time loop, and the loop."""

import pytest
import torch

from flashrnn import Cell, flashrnn, get_cell, layer_norm, rms_norm
from flashrnn.cells.hoisting import hoisted
from flashrnn.cells.printers.pytorch import torch_function
from tests.problems import CELLS, HOISTED, NORMALISED, cell_name, random_inputs

LAYERNORM_LSTM = get_cell("layernorm_lstm")


def first_part(cell, Wx, b):
    """Return the loop's inputs and biases, computed by PyTorch."""
    parts = hoisted(cell)
    of_gate = dict(zip(cell.gates, b.unbind(), strict=True))
    inputs = dict(zip(cell.input_gates, Wx.unbind(2), strict=True))
    gates = [inputs.get(gate, torch.zeros_like(Wx[:, :, 0])) + of_gate[gate] for gate in parts.gates]
    values = torch_function(parts.forward, parts.gates, parts.values)(*gates)
    biases = [torch.zeros_like(b[0])] * len(parts.values) + [of_gate[gate] for gate in parts.remaining]
    return torch.stack(values, dim=2), torch.stack(biases)


@pytest.mark.parametrize("cell", HOISTED, ids=cell_name)
def test_both_parts_together_equal_the_cell(cell):
    inputs = random_inputs(cell, B=3, T=5, N=2, D=6)
    Wx, R, b, states = inputs
    parts = hoisted(cell)
    values, biases = first_part(cell, Wx, b)
    out = flashrnn(values, R, biases, states, function=parts.loop, backend="vanilla")[0]
    expected = flashrnn(*inputs, function=cell, backend="vanilla")[0]
    d = torch.randn_like(expected)
    torch.testing.assert_close(out, expected)
    for one, other in zip(*(torch.autograd.grad(x, inputs, d) for x in (out, expected)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("cell", HOISTED, ids=cell_name)
def test_gradient_of_the_first_part(cell):
    parts = hoisted(cell)
    gates = [torch.randn(4, 7, dtype=torch.float64, requires_grad=True) for _ in parts.gates]
    d_values = [torch.randn(4, 7, dtype=torch.float64) for _ in parts.values]
    values = torch_function(parts.forward, parts.gates, parts.values)(*gates)
    names = (*parts.gates, *(f"d_{value}" for value in parts.values))
    found = torch_function(parts.gradient, names, [f"d_{gate}" for gate in parts.gates])(*gates, *d_values)
    for one, other in zip(found, torch.autograd.grad(values, gates, d_values), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_first_call_may_be_without_gradients(mode):
    hoisted.cache_clear()
    with mode():
        assert hoisted(LAYERNORM_LSTM) is not None


def test_biases_and_gains_of_inputs_are_hoisted():
    parts = hoisted(LAYERNORM_LSTM)
    assert len(parts.values) == 4
    recurrent = [f"r_{gate}" for gate in "ifzo"]
    assert parts.remaining == (*recurrent, *(f"{gate}_gain" for gate in recurrent), "c_gain", "c_bias")


@pytest.mark.parametrize("cell", [one for one in (*CELLS, *NORMALISED) if one not in HOISTED], ids=cell_name)
def test_other_cells_are_not_split(cell):
    assert hoisted(cell) is None


def test_part_with_more_results_than_inputs_is_not_hoisted():
    def step(x, r, h):
        return layer_norm(x) * h + rms_norm(x) * r

    assert hoisted(Cell("more_results", step, states=("h",), input_gates=("x",), recurrent_gates=("r",))) is None
