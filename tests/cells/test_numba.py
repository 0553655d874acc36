"""Element-wise functions of the CPU kernels, compared with PyTorch in float64."""

import math

import pytest
import torch

from flashrnn import Cell
from flashrnn.cells.graph import OPERATORS
from flashrnn.cpu.backend import CpuFused
from flashrnn.problem import Inputs

FUNCTIONS = (
    "exp", "exp2", "expm1", "log", "log1p", "tanh", "sigmoid", "sqrt", "rsqrt", "abs", "sign", "sin", "cos", "atan",
    "erf", "erfc", "floor", "round"
)  # fmt: skip
LARGE = [10.0**k for k in range(-45, 39)]
POINTS = torch.tensor([0.0, *LARGE, *(-x for x in LARGE), math.inf, -math.inf, math.nan])
GRID = torch.cat([torch.linspace(-110, 110, 20001), torch.linspace(-2, 2, 20001), POINTS])


def computed(operator: str, x: torch.Tensor) -> torch.Tensor:
    """Return `operator` of x, computed by a cell whose only state it is."""
    function = OPERATORS[operator]
    cell = Cell(f"only_{operator}", lambda g, h: function(g) + 0 * h, states=("h",))
    zeros = x.new_zeros(1, 1, 1)
    inputs = Inputs(x.view(-1, 1, 1, 1, 1), x.new_zeros(1, 1, 1, 1), zeros, None, None)
    return CpuFused().forward(cell, inputs, False, False)[0].h.flatten()


@pytest.mark.parametrize("operator", FUNCTIONS)
def test_functions_are_accurate_to_two_units_in_the_last_place(operator):
    ours, exact = computed(operator, GRID), OPERATORS[operator](GRID.double())
    normal = exact.abs().float().isfinite() & (exact.abs() > 2**-126)
    error = ((ours.double() - exact) / exact)[normal].abs()
    assert error.max() < 2**-22
    assert error.square().mean().sqrt() < 1e-7


@pytest.mark.parametrize(
    ("operator", "dtype"),
    [
        *((operator, torch.float32) for operator in FUNCTIONS),
        *((operator, torch.float64) for operator in ("exp", "log", "tanh", "sigmoid", "round")),
    ],
    ids=str,
)
def test_nan_infinities_and_overflow_as_in_pytorch(operator, dtype):
    x = POINTS.to(dtype)
    ours, theirs = computed(operator, x), OPERATORS[operator](x)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.isinf(), theirs.isinf())
    assert torch.equal(ours[ours.isinf()], theirs[ours.isinf()])


@pytest.mark.parametrize("operator", ["max", "min"])
def test_maximum_propagates_nan_of_either_operand(operator):
    cell = Cell(f"two_{operator}", lambda a, b, h: OPERATORS[operator](a, b) + 0 * h, states=("h",))
    x = torch.tensor([[1.0, 2.0], [2.0, 1.0], [math.nan, 1.0], [1.0, math.nan]])
    inputs = Inputs(x.view(4, 1, 2, 1, 1), x.new_zeros(2, 1, 1, 1), x.new_zeros(2, 1, 1), None, None)
    ours = CpuFused().forward(cell, inputs, False, False)[0].h.flatten()
    torch.testing.assert_close(ours, OPERATORS[operator](*x.T), equal_nan=True)
