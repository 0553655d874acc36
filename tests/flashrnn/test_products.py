"""The gradient of R after the time loop of a backward pass."""

import pytest
import torch

from flashrnn import get_cell
from flashrnn.memory_format import empty_in_format
from flashrnn.products import previous_h, weight_gradient, weight_gradient_of_states
from tests.problems import MINIMAL_GATED, PEEPHOLE_LSTM, cell_name, random_reset

# Cells with all kinds of gates: with both parts, recurrent-only, input-only, and with only a bias.
KINDS = (get_cell("elman"), get_cell("gru"), MINIMAL_GATED, PEEPHOLE_LSTM)


SIZES = [(1, 3, 5), (2, 3, 40), (2, 1, 5), (1, 3, 1)]


@pytest.mark.parametrize("start", ["zeros", "states", "reset"])
@pytest.mark.parametrize(("N", "B", "T"), SIZES)
@pytest.mark.parametrize("time_major", [False, True], ids=["", "time_major"])
@pytest.mark.parametrize("cell", KINDS, ids=cell_name)
def test_weight_gradient(cell, time_major, B, T, start, N):
    """Compares d_R with the sum of the products of the gates' gradients and the previous h."""
    D = 4
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    Gi = len(cell.input_gates)
    Wx = randn(T, B, Gi, N, D).transpose(0, 1) if time_major else randn(B, T, Gi, N, D)
    h, d_gates = empty_in_format(Wx, N, D).copy_(randn(B, T, N, D)), randn(B, T, len(cell.recurrent_gates), N, D)
    states = None if start == "zeros" else randn(len(cell.states), B, N, D)
    reset = random_reset(B, T) if start == "reset" else None

    initial = torch.zeros_like(h[:, 0]) if states is None else states[0]
    before = torch.cat([initial[:, None], h[:, :-1]], 1)
    assert torch.equal(previous_h(h, initial, None), before)
    if reset is not None:
        before[reset] = 0
        assert torch.equal(previous_h(h, initial, reset), before)

    gates = [gate for gate in cell.recurrent_gates if gate not in cell.input_gates]
    d_Wx, d_u = empty_in_format(Wx, Gi, N, D).zero_(), empty_in_format(Wx, len(gates), N, D)
    for k, gate in enumerate(cell.recurrent_gates):
        target = d_u[:, :, gates.index(gate)] if gate in gates else d_Wx[:, :, cell.input_gates.index(gate)]
        target.copy_(d_gates[:, :, k])
    expected, left = torch.einsum("btgni,btnj->gnij", d_gates, before), d_Wx.clone()
    torch.testing.assert_close(weight_gradient(cell, d_Wx, d_u, previous_h(h, initial, reset)), expected)
    torch.testing.assert_close(weight_gradient_of_states(cell, d_Wx, d_u, h, states, reset), expected)
    assert torch.equal(d_Wx, left)


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize(("N", "B", "T"), SIZES)
@pytest.mark.parametrize("time_major", [False, True], ids=["", "time_major"])
@pytest.mark.parametrize("cell", KINDS, ids=cell_name)
def test_weight_gradient_with_half_of_the_heads_backwards(cell, time_major, B, T, states, N):
    D, only = 4, [gate for gate in cell.recurrent_gates if gate not in cell.input_gates]
    generator = torch.Generator().manual_seed(0)

    def randn(*inner):
        rows = torch.randn(T, B, *inner, generator=generator, dtype=torch.float64).transpose(0, 1)
        return rows if time_major else rows.contiguous()

    d_Wx, d_u, h = randn(len(cell.input_gates), 2 * N, D), randn(len(only), 2 * N, D), randn(2 * N, D)
    initial = torch.randn(len(cell.states), B, 2 * N, D, dtype=torch.float64) if states else None
    left = d_Wx.clone()
    found = weight_gradient_of_states(cell, d_Wx, d_u, h, initial, None, bidirectional=True)
    assert torch.equal(d_Wx, left)
    for way, heads in enumerate((slice(N), slice(N, None))):
        of_half = (x[..., heads, :] for x in (d_Wx, d_u, h))
        one = [(x.flip(1) if way else x).contiguous() for x in of_half]
        expected = weight_gradient_of_states(cell, *one, None if initial is None else initial[:, :, heads], None)
        torch.testing.assert_close(found[:, heads], expected)


@pytest.mark.parametrize("T", [5, 40])
@pytest.mark.parametrize("time_major", [False, True], ids=["", "time_major"])
def test_first_step_does_not_read_the_previous_sequence_in_memory(time_major, T):
    """If only first steps have gradients, and initial states are zero, the gradient of R is exactly zero."""
    cell, (B, N, D) = get_cell("lstm"), (3, 2, 4)
    order = (lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)) if time_major else lambda x: x
    d_Wx = order(torch.zeros(B, T, 4, N, D))
    d_Wx[:, 0] = torch.randn(B, 4, N, D)
    h = order(torch.randn(B, T, N, D))
    assert not weight_gradient_of_states(cell, d_Wx, d_Wx[:, :, :0], h, None, None).any()
