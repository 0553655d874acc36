"""Reductions over the units of a head: the functions, their graphs, and backends that support them."""

import copy
import pickle
import re

import pytest
import torch
from torch.nn import functional as F

import flashrnn
from flashrnn import Cell, FlashRNN, get_cell
from flashrnn.cells.graph import REDUCTIONS, UntraceableCell
from flashrnn.cells.printers.cuda import early_values, exchanges, head_functions
from flashrnn.cells.printers.pytorch import torch_function
from flashrnn.cells.reductions import variance
from flashrnn.cells.trace import trace
from flashrnn.dispatch import choose, units_to_add
from flashrnn.gpu import named_gpu
from flashrnn.problem import Problem
from tests.problems import (
    CELLS,
    COMPETING,
    NORMALISED,
    NORMALISED_ELMAN,
    NORMALISED_LSTM,
    cell_name,
    plain_loop,
    random_inputs,
    results,
)
from tests.tolerances import assert_close


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def test_layer_norm_of_several_values_is_that_of_their_concatenation():
    values = randn(3, 5, 7)
    expected = F.layer_norm(torch.cat([*values], -1), (21,), eps=1e-3)
    torch.testing.assert_close(torch.cat(flashrnn.layer_norm(*values, eps=1e-3), -1), expected)
    torch.testing.assert_close(flashrnn.layer_norm(values[0]), F.layer_norm(values[0], (7,)))


def test_rms_norm_of_several_values_is_that_of_their_concatenation():
    values = randn(3, 5, 7)
    expected = F.rms_norm(torch.cat([*values], -1), (21,), eps=1e-3)
    torch.testing.assert_close(torch.cat(flashrnn.rms_norm(*values, eps=1e-3), -1), expected)
    torch.testing.assert_close(flashrnn.rms_norm(values[0]), F.rms_norm(values[0], (7,), eps=1e-5))


@pytest.mark.parametrize("norm", [flashrnn.layer_norm, lambda *x: flashrnn.layer_norm(*x)[0]], ids=["alone", "jointly"])
def test_layer_norm_is_accurate_for_a_large_mean(norm):
    """In float32, squares of the values would lose their variation."""
    far = (1e4 + randn(3, 64)).float()
    values = [far] if norm is flashrnn.layer_norm else [far, far + 1]
    torch.testing.assert_close(norm(*values).double(), norm(*(x.double() for x in values)), rtol=2e-3, atol=2e-3)


def test_reductions_return_the_same_value_for_every_unit():
    x = randn(2, 3, 5)
    for reduction, expected in ((flashrnn.sum, x.sum(-1)), (flashrnn.mean, x.mean(-1)), (flashrnn.max, x.amax(-1))):
        assert reduction(x).shape == x.shape
        torch.testing.assert_close(reduction(x), expected[..., None].expand_as(x))
    with pytest.raises(TypeError, match=r"flashrnn\.mean .*float"):
        flashrnn.mean(1.0)


STEPS = {
    "sum": lambda g, h: torch.tanh(flashrnn.sum(g * h)),
    "mean": lambda g, h: torch.tanh(g - flashrnn.mean(g)) + flashrnn.mean(h),
    "max": lambda g, h: torch.tanh(g - flashrnn.max(g)) + flashrnn.max(h),
    "variance": lambda g, h: g * torch.sqrt(variance(g) + 1) + variance(h),
    "of a constant": lambda g, h: g / flashrnn.sum(torch.ones_like(g)) + h - flashrnn.mean(torch.ones_like(g)),
    "of a reduction": lambda g, h: g * flashrnn.mean(h * flashrnn.mean(g)) + flashrnn.mean(flashrnn.mean(h)),
    "alone": lambda g, h: flashrnn.mean(g),
    "in place": lambda g, h: h.mul_(2).add_(flashrnn.mean(h)) + g,
    "in a branch": lambda g, h: torch.where(g > flashrnn.mean(g), g, h),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_graphs_equal_the_step_and_its_gradient(step):
    """Values [sequences, units] contain equal numbers."""
    check_graphs(Cell("mine", step, states=("h",)))


@pytest.mark.parametrize("cell", NORMALISED, ids=cell_name)
def test_graphs_of_normalised_cells(cell):
    check_graphs(cell)


def check_graphs(cell: Cell) -> None:
    values = [x.requires_grad_() for x in randn(len(cell.gates) + len(cell.states), 9, 5).round(decimals=1)]
    d_new = [*randn(len(cell.states), 9, 5)]
    new = cell.update([x.clone() for x in values[: len(cell.gates)]], [x.clone() for x in values[len(cell.gates) :]])
    expected = *new, *torch.autograd.grad(new, values, d_new, materialize_grads=True)
    graphs, names = trace(cell, torch.float64), (*cell.gates, *cell.states)
    forward = torch_function(graphs.forward, names, list(graphs.forward.outputs))(*values)
    factors = torch_function(graphs.factors, names, list(graphs.factors.outputs))(*values)
    arguments = (*graphs.factors.outputs, *(f"d_new_{state}" for state in cell.states))
    backward = torch_function(graphs.backward, arguments, list(graphs.backward.outputs))(*factors, *d_new)
    labels = (*graphs.forward.outputs, *graphs.backward.outputs)
    out = {
        k: torch.as_tensor(x, dtype=torch.float64).expand(9, 5)
        for k, x in zip(labels, (*forward, *backward), strict=True)
    }
    assert_close(out, dict(zip(labels, expected, strict=True)), torch.float64)
    by_statistics = gradient_by_statistics(cell, [x.detach() for x in values], [x.detach() for x in new], d_new)
    assert_close(by_statistics, dict(zip(by_statistics, expected[len(new) :], strict=True)), torch.float64)


def gradient_by_statistics(cell: Cell, values: list, new: list, d_new: list) -> dict[str, torch.Tensor]:
    """Return the gradients, computed from the values that a forward pass stores (see `cells.statistics`)."""
    statistics, names = trace(cell, torch.float64).statistics, (*cell.gates, *cell.states)
    given = dict(zip((*names, *(f"after_{state}" for state in cell.states)), (*values, *new), strict=True))
    stored = torch_function(statistics.forward, list(given), list(statistics.forward.outputs))(*given.values())
    given |= zip((f"d_new_{state}" for state in cell.states), d_new, strict=True)
    given = {name: x for name, x in given.items() if name not in statistics.normalised}
    given |= dict(zip(statistics.forward.outputs, stored, strict=True))
    outputs = [f"d_{name}" for name in names]
    gradients = torch_function(statistics.gradient, list(given), outputs)(*given.values())
    return {k: torch.as_tensor(x, dtype=torch.float64).expand(9, 5) for k, x in zip(outputs, gradients, strict=True)}


def test_kernels_need_one_exchange_per_norm():
    found = {
        name: [len(exchanges(get_cell(name), d)) for d in ("forward", "backward")]
        for name in ("layernorm_lstm", "layernorm_gru")
    }
    assert found == {"layernorm_lstm": [2, 2], "layernorm_gru": [1, 1]}


def test_early_parts_are_what_a_step_computes_without_the_previous_one():
    """The norm of the inputs alone, if there is one, and the gates from what the forward stores."""
    text = head_functions(get_cell("layernorm_lstm"), early=True)
    forward, step, backward, gradient = re.split(r"(?=template <)", text)[1:]
    assert [part.count("units.template reduce<") for part in (forward, step, backward, gradient)] == [1, 2, 0, 2]
    assert [part.count("late(") for part in (forward, step, backward, gradient)] == [0, 1, 0, 1]
    assert [early_values(get_cell("layernorm_gru"), d) for d in ("forward", "backward")] == [0, 6]


def test_joint_norm_of_gates_takes_three_reductions_forward_and_two_backward():
    """The number does not depend on the number of gates."""

    def step(i, f, z, o, h):
        i, f, z, o = flashrnn.layer_norm(i, f, z, o)
        return torch.sigmoid(o) * torch.tanh(i + f * z)

    graphs = trace(Cell("mine", step, states=("h",)))
    counts = [sum(node.op in REDUCTIONS for node in graph.nodes) for graph in (graphs.forward, graphs.backward)]
    assert counts == [3, 2]


@pytest.mark.parametrize(
    ("cell", "backend"),
    [*((cell, "vanilla") for cell in NORMALISED), (NORMALISED_ELMAN, "cpu_fused"), (COMPETING, "cpu_fused")],
    ids=lambda value: getattr(value, "name", value),
)
def test_norms_of_equal_units(cell, backend):
    """The variance is zero, and the mean of eight equal values is exact."""
    inputs = random_inputs(cell, 2, 4, 2, 8)
    with torch.no_grad():
        for x in (inputs.Wx, inputs.b, inputs.states):
            x[:] = x[..., :1]
        inputs.R[:] = 0.1
    expected = results(lambda *x, **y: plain_loop(*x, **y)[:2], inputs, function=cell)
    assert_close(results(flashrnn.flashrnn, inputs, function=cell, backend=backend), expected, torch.float64)


@pytest.mark.parametrize("cell", CELLS, ids=cell_name)
def test_element_wise_cells_have_no_reductions(cell):
    assert not trace(cell).reduces


@pytest.mark.parametrize(
    "step",
    [
        lambda g, h: g - g.mean(-1, keepdim=True),
        lambda g, h: flashrnn.mean(h.flip(-1) * g) + g,
        lambda g, h: flashrnn.mean(h.flip(-2)) + g,
        lambda g, h: flashrnn.mean(g) + h.flip(-1),
    ],
    ids=["torch.mean", "of what is mixed", "of other sequences", "mixed after it"],
)
def test_step_that_mixes_units_without_reductions_is_an_error(step):
    with pytest.raises(ValueError, match=r"flashrnn\.mean"):
        Cell("mine", step, states=("h",))


def test_trace_error_names_the_line_of_the_step():
    def step(g, h):
        g = flashrnn.layer_norm(g)
        return torch.lgamma(g) + h

    with pytest.raises(
        UntraceableCell, match=r"aten\.lgamma.*test_reductions\.py, line \d+: return torch\.lgamma\(g\)"
    ):
        trace(Cell("mine", step, states=("h",)))


def problem(device: str, head_dim: int = 64, dtype: torch.dtype = torch.float32) -> Problem:
    return Problem(NORMALISED_LSTM, 1, head_dim, dtype, torch.device(device), True, False)


def test_backends_support_reductions():
    assert choose("cuda", problem("cuda")._replace(assumed_gpu=named_gpu("H100"))).name == "cuda"
    assert choose("auto", problem("cpu")).name == "cpu_fused"


def test_heads_of_cells_with_reductions_are_not_padded():
    """Reductions would include the padding."""
    on_gpu = problem("cuda", 33, torch.bfloat16)._replace(assumed_gpu=named_gpu("H100"))
    assert units_to_add(on_gpu._replace(cell=get_cell("lstm"))) == 7
    assert units_to_add(on_gpu) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_single_steps_equal_the_whole_sequence(dtype):
    torch.manual_seed(0)
    layer, x = FlashRNN(6, 16, num_layers=2, num_heads=2, function=NORMALISED_ELMAN).to(dtype), randn(4, 3, 6).to(dtype)
    with torch.no_grad():
        out, h = layer(x)
        states, steps = None, []
        for x_t in x:
            step, states = layer.step(x_t, states)
            steps.append(step)
    torch.testing.assert_close(torch.stack(steps), out)
    torch.testing.assert_close(states, h)


def test_layer_can_be_exported_and_compiled():
    torch.compiler.reset()
    layer, x = FlashRNN(3, 16, num_heads=2, function=NORMALISED_ELMAN), randn(4, 2, 3).float()
    exported = torch.export.export(layer, (x,)).module()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for other in (exported, compiled):
            torch.testing.assert_close(other(x)[0], layer(x)[0], rtol=0, atol=0)
    compiled(x)[0].sum().backward()


def test_copies_and_pickles_are_the_same_cell():
    assert copy.deepcopy(NORMALISED_LSTM) is NORMALISED_LSTM
    assert pickle.loads(pickle.dumps(NORMALISED_LSTM)) is NORMALISED_LSTM
