import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn import functional as F

from flashrnn import Cell, FlashRNN, get_cell
from flashrnn.cells import recorder
from flashrnn.cells.graph import UntraceableCell
from flashrnn.cells.printers.pytorch import torch_function
from flashrnn.cells.trace import _traced, trace
from tests.problems import CELLS, cell_name
from tests.tolerances import assert_close


def cell_of(activation) -> Cell:
    return Cell("mine", lambda g, h: activation(g + 0.5 * h) + 0.1 * h, states=("h",))


def values_of(cell: Cell) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(200, generator=generator, dtype=torch.float64) for _ in (*cell.gates, *cell.states)]
    if "n" in cell.states:
        n = len(cell.gates) + cell.states.index("n")
        values[n] = 1 + values[n].abs()
    return [value.requires_grad_() for value in values]


def by_graphs(cell: Cell, values: list[torch.Tensor], d_new: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    graphs, names = trace(cell), (*cell.gates, *cell.states)
    forward = torch_function(graphs.forward, names, list(graphs.forward.outputs))(*values)
    factors = torch_function(graphs.factors, names, list(graphs.factors.outputs))(*values)
    arguments = (*graphs.factors.outputs, *(f"d_new_{state}" for state in cell.states))
    backward = torch_function(graphs.backward, arguments, list(graphs.backward.outputs))(*factors, *d_new)
    out = dict(zip((*graphs.forward.outputs, *graphs.backward.outputs), (*forward, *backward), strict=True))
    return {name: torch.as_tensor(value, dtype=torch.float64).expand(200) for name, value in out.items()}


def by_autograd(cell: Cell, values: list[torch.Tensor], d_new: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    new = cell.update(values[: len(cell.gates)], values[len(cell.gates) :])
    gradients = torch.autograd.grad(new, values, d_new, materialize_grads=True)
    names = [f"new_{state}" for state in cell.states] + [f"d_{name}" for name in (*cell.gates, *cell.states)]
    return dict(zip(names, (*new, *gradients), strict=True))


def check_graphs(cell: Cell) -> None:
    values = values_of(cell)
    d_new = [torch.randn(200, generator=torch.Generator().manual_seed(1), dtype=torch.float64) for _ in cell.states]
    assert_close(by_graphs(cell, values, d_new), by_autograd(cell, values, d_new), torch.float64)


@pytest.mark.parametrize("cell", CELLS, ids=cell_name)
def test_graphs_equal_the_step_and_its_gradient(cell):
    check_graphs(cell)


ACTIVATIONS = {
    "relu": torch.relu, "relu6": F.relu6, "leaky_relu": F.leaky_relu, "elu": F.elu, "selu": F.selu, "celu": F.celu,
    "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu, "mish": F.mish,
    "softplus": F.softplus, "softsign": F.softsign, "logsigmoid": F.logsigmoid, "hardtanh": F.hardtanh,
    "hardswish": F.hardswish, "tanhshrink": F.tanhshrink, "threshold": lambda x: F.threshold(x, 0.1, 0.2),
    "sin": torch.sin, "erf": torch.erf, "expm1": torch.expm1, "log1p": lambda x: torch.log1p(x * x),
    "sqrt": lambda x: torch.sqrt(x * x + 1), "rsqrt": lambda x: torch.rsqrt(x * x + 1), "abs": torch.abs,
    "reciprocal": lambda x: torch.reciprocal(x * x + 1), "sign": lambda x: torch.sign(x) * x,
    "square": torch.square, "power": lambda x: (x * x + 1) ** x, "base": lambda x: (2.0**x) + x**3,
    "clamp": lambda x: x.clamp(-0.5, 0.5), "clamp_min": lambda x: x.clamp(min=0.1),
    "clamp_max": lambda x: x.clamp(max=0.1),
    "exp2": torch.exp2, "log2": lambda x: torch.log2(x * x + 1), "sinh": torch.sinh, "cosh": torch.cosh,
    "tan": torch.tan, "atan": torch.atan, "asin": lambda x: torch.asin(torch.tanh(x)), "erfc": torch.erfc,
    "acos": lambda x: torch.acos(torch.tanh(x)), "atan2": lambda x: torch.atan2(x, x * x - 1),
    "hypot": lambda x: torch.hypot(x, x * x - 1), "copysign": lambda x: torch.copysign(x * x, x - 0.1),
    "floor": lambda x: torch.floor(x) * x, "ceil": lambda x: torch.ceil(x) * x, "trunc": lambda x: torch.trunc(x) * x,
    "round": lambda x: torch.round(3 * x) * x, "fmod": lambda x: torch.fmod(x, 0.3) + torch.fmod(x, x * x - 1),
    "remainder": lambda x: x % 0.3 + x % -0.7 + torch.remainder(x, x * x - 1),
    "quotient": lambda x: x * torch.div(x, 0.3, rounding_mode="floor") + x * torch.div(x, 0.3, rounding_mode="trunc"),
    "maximum": lambda x: torch.maximum(x, 0.3 * x), "minimum": lambda x: torch.minimum(x, 0.3 * x),
    "where": lambda x: torch.where((x > 0) & ~(x > 1) | (x < -1), x, 0.1), "xor": lambda x: ((x > 0) ^ (x > 1)) * x,
    "truth_times_number": lambda x: (x > 0) * x, "truth_as_number": lambda x: (x > 0).to(x.dtype) - x,
    "number_as_truth": lambda x: torch.where(torch.relu(x).bool(), x, 2 * x),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.2),
    "alpha": lambda x: torch.add(x, x * x, alpha=0.5) - torch.sub(1.0, x, alpha=0.3),
    "lerp": lambda x: torch.lerp(x, x * x, 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5), "logaddexp": lambda x: torch.logaddexp(x, -x),
    "detach": lambda x: x.detach() * x, "in_place": lambda x: (x * 1).mul_(2).add_(x, alpha=0.5).pow_(2),
    "activations_in_place": lambda x: (x * 2).tanh_() + F.relu(x + 0, True) * F.elu(x + 0, 0.5, True),
    "filled_in_place": lambda x: x.clone().zero_().addcmul_(x, x) + x.clone().fill_(0.3) + torch.empty_like(x).copy_(x),
    "constant_tensor": lambda x: torch.tensor(0.25) * x + torch.full_like(x, 0.1) + x.new_zeros(()),
    "constant_expression": lambda x: torch.sigmoid(torch.ones_like(x)) * x, "constant": torch.ones_like,
}  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_element_wise_operations_have_graphs(activation):
    check_graphs(cell_of(activation))


def test_factors_do_not_depend_on_gradients():
    """Only a few multiplications per step of an LSTM's backward pass depend on the next step."""
    graphs = trace(get_cell("lstm"))
    assert [node.op for node in graphs.backward.nodes].count("mul") <= 7
    assert len(graphs.factors.outputs) <= 6
    assert not any(name.startswith("d_") for name in graphs.factors.inputs)


def test_trace_is_cached():
    assert trace(get_cell("gru")) is trace(get_cell("gru"))


def test_threads_can_trace_concurrently():
    cells = [cell_of(lambda x, k=k: torch.tanh(x + k)) for k in range(4)]
    with ThreadPoolExecutor(4) as pool:
        traces = list(pool.map(trace, cells))
    assert len({repr(graphs.forward) for graphs in traces}) == 4


@pytest.mark.parametrize("wrong", [lambda x: x, torch.abs, lambda x: 1.0001 * x.clamp(min=0), lambda x: 0 * x])
def test_graph_that_differs_from_the_step_is_an_error(monkeypatch, wrong):
    monkeypatch.setitem(recorder.PARTS, "relu", wrong)
    with pytest.raises(UntraceableCell, match=r"new_h .*g=\S+, h="):
        trace(cell_of(torch.relu))


def test_gradient_that_differs_from_autograd_is_an_error(monkeypatch):
    """The compared points include the kink at 0, where PyTorch's relu has the gradient 0."""
    monkeypatch.setitem(recorder.PARTS, "threshold_backward", lambda grad, x, threshold: torch.where(x >= 0, grad, 0.0))
    with pytest.raises(UntraceableCell, match=r"d_g .*g=0, h=0"):
        trace(cell_of(torch.relu))


@pytest.mark.parametrize(
    "context",
    [
        torch.inference_mode,
        torch.no_grad,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.device("meta"),
    ],
    ids=["inference_mode", "no_grad", "autocast", "default_device"],
)
def test_trace_does_not_depend_on_modes_of_pytorch(context):
    first, second = (Cell("mine", get_cell("slstm").step, get_cell("slstm").states) for _ in range(2))
    with context():
        inside = trace(first)
    assert inside == trace(second)


@pytest.mark.parametrize(
    ("activation", "operator"),
    [
        (torch.lgamma, "aten.lgamma.default"),
        (lambda x: x + x.to(torch.int64), "aten._to_copy.default{'dtype': torch.int64}"),
    ],
    ids=["lgamma", "integers"],
)
def test_operator_without_a_scalar_form_is_named(activation, operator):
    with pytest.raises(UntraceableCell, match=f"'mine' .*{re.escape(operator)}.*sigmoid"):  # sigmoid has one
        trace(cell_of(activation))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("inner", [lambda x: x, lambda x: x.detach()], ids=["with gradient", "without"])
def test_cast_to_a_narrow_dtype_is_an_error(dtype, inner):
    """Kernels would compute another function without the cast."""
    with pytest.raises(UntraceableCell, match=f"'mine' .*{dtype}"):
        trace(cell_of(lambda x: torch.tanh(x) + inner(x).to(dtype).to(x.dtype)))


def test_cast_to_the_dtype_of_kernels_is_allowed():
    with_casts = trace(cell_of(lambda x: torch.tanh(x.float()).to(x.dtype)))
    assert with_casts == trace(cell_of(torch.tanh))


def test_python_branch_on_values_is_an_error():
    def step(g, h):
        plain = h.as_subclass(torch.Tensor)  # the checks of `Cell` do not find a branch on this tensor
        return g if (plain > -9).any() else h

    with pytest.raises(UntraceableCell, match=r"'mine'.*aten\.any"):
        trace(Cell("mine", step, states=("h",)))


def test_first_trace_can_happen_in_a_compiled_model():
    """PyTorch's tracing modes cannot be nested, and a trace in an operator of a compiled model crashed the process."""
    cell = Cell("mine", lambda g, h: torch.tanh(g), states=("h",))
    layer = torch.compile(FlashRNN(4, 4, function=cell, backend="vanilla"), fullgraph=True, backend="aot_eager")
    before = _traced.cache_info().currsize
    layer(torch.randn(3, 2, 4))[0].sum().backward()
    assert _traced.cache_info().currsize == before + 1


def test_captured_tensor_with_dimensions_is_an_error():
    tau = torch.tensor([0.3])
    with pytest.raises(UntraceableCell, match=r"'mine' .*\[1\]"):
        trace(Cell("mine", lambda g, h: tau * torch.tanh(g) + h, states=("h",)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_dependent_constants_are_those_of_the_kernels_dtype(dtype):
    def step(g, n, h):
        return torch.sigmoid(g) * h / torch.clamp(n, min=torch.finfo(n.dtype).tiny)

    graph = trace(Cell("tiny", step, states=("h",)), dtype).forward
    assert torch.finfo(dtype).tiny in [node.value for node in graph.nodes if node.op == "const"]


def test_cell_can_be_traced_in_anomaly_mode():
    """The checks for NaN in this mode have no scalar form."""
    cell = Cell("watched", lambda g, h: torch.tanh(g), states=("h",))
    with torch.autograd.set_detect_anomaly(True):
        trace(cell, torch.float32)
        assert torch.is_anomaly_enabled()
