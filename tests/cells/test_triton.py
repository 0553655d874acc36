"""Printed Triton functions, in Triton's interpreter, agree with the graphs' PyTorch functions."""

from collections.abc import Sequence

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from flashrnn import Cell
from flashrnn.cells.graph import OPERATORS, Graph
from flashrnn.cells.printers.functions import Function, functions
from flashrnn.cells.printers.triton import cell_functions, device_function
from flashrnn.triton.launch import load
from tests.cells.graphs import by_graph, every_operator, operands, values_of
from tests.problems import CELLS, cell_name


def apply(values, results, function: tl.constexpr, ARGUMENTS: tl.constexpr, RESULTS: tl.constexpr, SIZE: tl.constexpr):
    """Compute the columns of `results` from those of `values`, with SIZE rows."""
    row = tl.arange(0, SIZE)
    arguments = ()
    for k in tl.static_range(ARGUMENTS):
        arguments += (tl.load(values + k * SIZE + row),)
    out = function(*arguments)
    for k in tl.static_range(RESULTS):
        tl.store(results + k * SIZE + row, out[k])


def in_triton(function: Function, values: Tensor) -> Tensor:
    """Return the results [count, results] of a printed function for values [count, arguments]."""
    arguments, results = (sum(map(len, groups.values())) for groups in (function.inputs, function.outputs))
    size = triton.next_power_of_2(len(values))
    columns = torch.ones(arguments, size)
    columns[:, : len(values)] = values.T
    out = columns.new_empty(results, size)
    (printed,) = load(device_function(function), "test", [function.name])
    triton.jit(apply)[(1,)](columns, out, printed, arguments, results, size)
    return out[:, : len(values)].T


def flat(groups: dict[str, Sequence[str]]) -> list[str]:
    return [name for names in groups.values() for name in names]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("cell", CELLS, ids=cell_name)
def test_printed_functions_of_cells(cell):
    values = torch.cat(values_of(cell), 1)
    forward, factors, backward = functions(cell)
    for function in (forward, factors):
        expected = by_graph(function.graph, flat(function.inputs), flat(function.outputs), values)
        torch.testing.assert_close(in_triton(function, values), expected, rtol=1e-5, atol=1e-6)
    d_new = torch.randn(len(values), len(cell.states), generator=torch.Generator().manual_seed(1))
    values = torch.cat([expected, d_new], 1)
    expected = by_graph(backward.graph, flat(backward.inputs), flat(backward.outputs), values)
    torch.testing.assert_close(in_triton(backward, values), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("interpreted")
def test_every_operator_and_constant():
    graph = every_operator()
    names = list(graph.outputs)
    out = in_triton(Function("operators", graph, {"a": ("x", "y")}, {"out": names}), operands())
    expected = by_graph(graph, "xy", names, operands())
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("op", ["atan", "erfc", "exp", "exp2", "expm1", "log1p", "sigmoid", "tanh"])
def test_relative_errors_are_small(op):
    """Even for the smallest results, which are differences of two numbers near 1."""
    graph = Graph()
    graph.outputs = {"out": graph.add(op, graph.input("x"))}
    sizes = torch.logspace(-30, 0.9, 1000)
    x = torch.cat([-sizes, sizes])
    x = x[x > -1] if op == "log1p" else x
    out = in_triton(Function("of_one", graph, {"a": ("x",)}, {"out": ("out",)}), x[:, None])[:, 0]
    exact = OPERATORS[op](x.double())
    torch.testing.assert_close(out.double(), exact, rtol=6e-6 if op == "erfc" else 2**-19, atol=0)


@pytest.mark.usefixtures("interpreted")
def test_large_gates_saturate_exactly():
    """Overflow does not cause NaN."""
    cell = Cell("saturated", lambda a, b, h: torch.sigmoid(a) + torch.tanh(b) + 0 * h, ("h",))
    large = torch.tensor([-1e30, -1e4, -100.0, 100.0, 1e4, 1e30])
    out = in_triton(functions(cell)[0], torch.stack([large, large, torch.zeros(6)], 1))
    assert torch.equal(out[:, 0], torch.tensor([-1.0, -1.0, -1.0, 2.0, 2.0, 2.0]))


def test_redefined_cell_gets_new_kernels():
    """Triton caches kernels by their source, and a notebook may redefine a cell of the same name."""
    texts = [cell_functions(Cell("mine", step, ("h",))) for step in (lambda g, h: g + h, lambda g, h: g - h)]
    first, second = (load(text, "mine", ["cell_forward"])[0] for text in texts)
    assert first.cache_key != second.cache_key
