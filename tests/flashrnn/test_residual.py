"""Residuals: equal for all backends, and convertible between their formats."""

from itertools import permutations

import pytest
import torch

from flashrnn import Cell, get_cell
from flashrnn import residual as module
from flashrnn.cells.trace import trace
from flashrnn.dispatch import BACKENDS
from flashrnn.memory_format import in_format
from flashrnn.problem import Inputs, StateGradients
from flashrnn.residual import Residual, converted, empty_gates
from tests.problems import CELLS, NORMALISED, cell_name, random_inputs, random_reset
from tests.tolerances import assert_close

NAMES = ("vanilla", "cpu_fused", "triton_fused")
RECURRENT_LAST = Cell(  # the reference reorders its gates, with recurrent ones first
    "recurrent_last", lambda a, g, h: torch.sigmoid(a) * torch.tanh(g + h), ("h",), ("a",), recurrent_gates=("g",)
)
BY_NAME = {backend.name: backend for backend in BACKENDS}


def inputs_of(cell: Cell, time_major: bool = False) -> Inputs:
    Wx, R, b, states = (x.detach() for x in random_inputs(cell, 3, 4, 2, 16, torch.float32))
    if time_major:
        Wx = Wx.transpose(0, 1).contiguous().transpose(0, 1)
    return Inputs(Wx, R, b, states, random_reset(3, 4))


def residual(name: str, cell: Cell, inputs: Inputs) -> Residual:
    backend = BY_NAME[name]
    results, gates = backend.forward(cell, inputs, all_states=False, training=True)
    gate_format = backend.gate_format(cell, 2, 16, torch.float32)
    return Residual(inputs.R, inputs.states, inputs.reset, results.h, results.aux, gates, gate_format, b=inputs.b)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("cell", "time_major"),
    [*((cell, False) for cell in CELLS), (get_cell("gru"), True), (RECURRENT_LAST, True)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_all_backends_store_the_same_gates(cell, time_major):
    inputs = inputs_of(cell, time_major)
    expected = residual("vanilla", cell, inputs)
    for name in NAMES[1:]:
        found = residual(name, cell, inputs)
        assert found.gates.stride() == empty_gates(cell, inputs.Wx, True, found.gate_format).stride()
        assert_close({"gates": found.gates_in("GND", cell)}, {"gates": expected.gates}, torch.float32)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("time_major", [False, True], ids=["", "time_major"])
@pytest.mark.parametrize("cell", [CELLS[1], RECURRENT_LAST], ids=cell_name)
def test_backward_reads_the_residual_of_another_backend(cell, time_major):
    inputs = inputs_of(cell, time_major)
    grads = StateGradients(torch.randn(inputs.Wx.shape[0], 4, 2, 16), (None,) * (len(cell.states) - 1), None)
    expected = BY_NAME["vanilla"].backward(cell, residual("vanilla", cell, inputs), grads)
    for writer, reader in permutations(NAMES, 2):
        found = BY_NAME[reader].backward(cell, residual(writer, cell, inputs), grads)
        assert_close(found._asdict(), expected._asdict(), torch.float32)


@pytest.mark.parametrize("time_major", [False, True], ids=["", "time_major"])
def test_gates_are_stored_as_the_format_specifies(monkeypatch, time_major):
    monkeypatch.setattr(module, "_WHOLE_LINES_ABOVE", 7)
    cell = CELLS[2]
    by_gate = torch.randn(2, 3, 4, 2, 8).half()
    by_gate = in_format(by_gate, inputs_of(cell, time_major).Wx)
    values = by_gate[1, 2, 3, 1, 5]  # gate 3 of unit 5 of head 1, which is unit 1 of 2 in piece 2 of 4
    places = {"GND": (3, 1, 5), "NGD": (1, 3, 5), "NDG": (1, 5, 3), "NDG+": (1, 23), "PNDG": (2, 1, 1, 3)}
    for given, place in places.items():
        gates = converted(by_gate, "GND", given, cell, None, 8)
        assert gates[1, 2, *place] == values
        for wanted in places:
            expected = converted(by_gate, "GND", wanted, cell, None, 8)
            assert torch.equal(converted(gates, given, wanted, cell, None, 8), expected)


@pytest.mark.parametrize("cell", [cell for cell in NORMALISED if trace(cell).statistics.names], ids=cell_name)
def test_gates_are_converted_to_statistics_and_back(cell):
    without = residual("vanilla", cell, inputs_of(cell))
    stored = without._replace(gates=without.gates_in("NDV+", cell), gate_format="NDV+")
    assert stored.gates.shape == empty_gates(cell, inputs_of(cell).Wx, True, "NDV+").shape
    assert_close({"gates": stored.gates_in("GND", cell)}, {"gates": without.gates}, torch.float32)
    grads = StateGradients(torch.randn(3, 4, 2, 16), (None,) * (len(cell.states) - 1), None)
    found, expected = (BY_NAME["vanilla"].backward(cell, one, grads) for one in (stored, without))
    assert_close(found._asdict(), expected._asdict(), torch.float32)
