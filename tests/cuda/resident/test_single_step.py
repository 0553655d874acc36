"""The kernel for a single time step of a layer, on the processor, and its binaries."""

import pytest
import torch

from flashrnn import Cell, get_cell
from flashrnn.cuda.resident import single_step
from flashrnn.cuda.resident.single_step import SingleStep, compile_kernel, serves, spec_of
from flashrnn.dispatch import VANILLA
from flashrnn.gpu import named_gpu
from flashrnn.problem import Inputs, state_dtype
from flashrnn.residual import as_gnd
from tests.cuda.host_kernel import single_step_on_host
from tests.cuda.resident.test_kernels import GPUS
from tests.problems import MINIMAL_GATED, PEEPHOLE_LSTM, cell_name

LSTM, GRU, SLSTM = map(get_cell, ("lstm", "gru", "slstm"))
CASES = [  # sequences, heads, units of a head, features
    (LSTM, (1, 1, 6, 5), torch.float32),
    (GRU, (3, 2, 16, 16), torch.bfloat16),
    (SLSTM, (9, 1, 40, 3), torch.float16),
    (PEEPHOLE_LSTM, (2, 2, 160, 24), torch.bfloat16),
    (MINIMAL_GATED, (3, 2, 16, 16), torch.float32),
]
MORE_CASES = [
    (LSTM, (2, 2, 160, 24), torch.bfloat16),
    (LSTM, (9, 1, 40, 3), torch.bfloat16),
    (LSTM, (3, 2, 16, 16), torch.float16),
    (GRU, (2, 2, 160, 24), torch.float32),
    (GRU, (1, 1, 6, 5), torch.float16),
    (SLSTM, (2, 2, 160, 24), torch.float32),
    (MINIMAL_GATED, (9, 1, 40, 3), torch.bfloat16),
    (PEEPHOLE_LSTM, (3, 2, 16, 16), torch.float16),
]


@pytest.mark.parametrize(
    ("cell", "sizes", "dtype"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_CASES)],
    ids=lambda value: cell_name(value) if isinstance(value, Cell) else str(value),
)
def test_step(monkeypatch, cell, sizes, dtype):
    """Compares a step with a plain loop, with and without states, biases, resets and what a backward pass needs."""
    B, N, D, features = sizes
    monkeypatch.setattr(single_step, "_kernel", single_step_on_host)
    torch.manual_seed(0)
    Gi, Gr, G = map(len, (cell.input_gates, cell.recurrent_gates, cell.gates))
    x, W = torch.randn(B, features, dtype=dtype), torch.randn(Gi * N * D, features, dtype=dtype) / features**0.5
    R, b = torch.randn(Gr, N, D, D, dtype=dtype) / D**0.5, torch.randn(G, N, D, dtype=dtype)
    states = [torch.rand(1, B, N * D).to(dtype).to(state_dtype(dtype)) for _ in cell.states]
    reset = torch.arange(B) % 2 == 0
    step = SingleStep(spec_of(cell, N, D, B, dtype, named_gpu("H100")), torch.device("cuda", 0))
    for *given, training in [(b, [], None, False), (None, states, None, True), (b, states, reset, True)]:
        h, aux, last, gates = step.of_layer(x, W, R, *given, training)
        expected, expected_last, expected_gates = _exact(cell, x, W, R, *given)
        eps = max(torch.finfo(dtype).eps, 2e-6)

        def agree(found, exact, eps=eps) -> None:
            torch.testing.assert_close(found.double(), exact, rtol=2 * eps, atol=2 * eps)

        assert h.dtype == dtype
        agree(h, expected)
        assert {state.dtype for state in last} == {state_dtype(dtype)}
        agree(torch.stack(list(last))[:, 0], expected_last)
        assert (aux is not None) == (gates is not None) == training
        if training:
            agree(aux.flatten(1), expected_last[1:].flatten(1))
            b = given[0] if given[0] is None else given[0].double()
            by_gate = as_gnd(gates, step.gate_format, cell, torch.zeros(G, N, D) if b is None else b, D)
            agree(by_gate.flatten(3), expected_gates.flatten(3))


def _exact(cell, x, W, R, b, states, reset) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return h [B, H], the last states [S, B, H] and the gates [B, 1, G, N, D] in float64."""
    inner, B = R.shape[1:3], len(x)
    Wx = (x.double() @ W.double().t()).view(B, 1, -1, *inner)
    before = torch.zeros(len(cell.states), B, *inner, dtype=torch.float64)
    if states:
        before += torch.stack(list(states)).view(before.shape)
    if reset is not None:
        before[:, reset] = 0
    b = torch.zeros(len(cell.gates), *inner) if b is None else b
    inputs = Inputs(Wx, R.double(), b.double(), before, None)
    (h, _, last), gates = VANILLA.forward(cell, inputs, False, True)
    gate_format = VANILLA.gate_format(cell, *inner, torch.float64)
    return h.flatten(1), last.flatten(2), as_gnd(gates, gate_format, cell, inputs.b, inner[1])


def test_few_sequences_and_no_reductions_over_units():
    assert serves(LSTM, 64, 1, torch.float32)
    assert not serves(LSTM, 64, 256, torch.float32)
    assert serves(LSTM, 512, 32, torch.float32)
    assert not serves(LSTM, 512, 32, torch.bfloat16)
    assert not serves(get_cell("layernorm_lstm"), 64, 1, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("cell", "head_dim"), [("gru", 2), ("slstm", 768)])
def test_no_register_spills(cell, head_dim, dtype, gpu):
    spec = spec_of(get_cell(cell), 1, head_dim, 1, dtype, named_gpu(gpu))
    assert compile_kernel(spec).spilled == 0
