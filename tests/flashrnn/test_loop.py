"""Backend `vanilla` has derivatives of all orders and modes."""

import pytest
import torch

from flashrnn import FlashRNN, flashrnn, get_cell
from tests.problems import LEAKY_ELMAN, MINIMAL_GATED, random_inputs
from tests.tolerances import assert_close


def recurrence(function, reset=None, return_states=False):
    def run(*inputs):
        h, last, *every = flashrnn(
            *inputs, function=function, backend="vanilla", reset=reset, return_states=return_states
        )
        return h, last, *(every[0][1:] if every else ())

    return run


@pytest.mark.parametrize(
    ("cell", "heads", "head_dim"),
    [(get_cell("lstm"), 1, 2), (get_cell("gru"), 2, 1), (MINIMAL_GATED, 1, 2), (LEAKY_ELMAN, 2, 2)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_second_derivatives_and_forward_mode(cell, heads, head_dim):
    inputs, reset = random_inputs(cell, 1, 3, heads, head_dim), torch.tensor([[False, True, False]])
    run = recurrence(cell, reset, return_states=len(cell.states) > 1)
    assert torch.autograd.gradcheck(run, tuple(inputs), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, tuple(inputs))


def test_second_derivatives_of_one_head_without_states():
    Wx, R, b, _ = random_inputs(MINIMAL_GATED, 2, 3, 1, 2)
    assert torch.autograd.gradgradcheck(recurrence(MINIMAL_GATED), (Wx, R, b))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 2])
def test_torch_func_derivatives_equal_autograd(heads, dtype):
    inputs = random_inputs(LEAKY_ELMAN, 2, 3, heads, 4, dtype)
    run = recurrence(LEAKY_ELMAN)

    def loss(*inputs):
        return run(*inputs)[0].double().square().sum()

    expected = torch.autograd.grad(loss(*inputs), inputs)
    found = torch.func.grad(loss, argnums=(0, 1, 2, 3))(*(x.detach() for x in inputs))
    assert_close(dict(enumerate(found)), dict(enumerate(expected)), dtype)


def test_torch_func_hessian():
    rnn = FlashRNN(2, 2, backend="vanilla", dtype=torch.float64)
    x, parameters = torch.randn(3, 2, 2, dtype=torch.float64), dict(rnn.named_parameters())

    def loss(parameters):
        return torch.func.functional_call(rnn, parameters, (x,))[0].square().sum()

    hessian = torch.func.hessian(loss)(parameters)["recurrent_l0.b"]["input_l0.weight"]
    (d_b,) = torch.autograd.grad(loss(parameters), parameters["recurrent_l0.b"], create_graph=True)
    (row,) = torch.autograd.grad(d_b[1, 0, 1], parameters["input_l0.weight"])
    torch.testing.assert_close(hessian[1, 0, 1], row)


def test_gradients_of_dependent_inputs_are_partial_derivatives():
    """If R is computed from Wx, the gradient of R must not propagate to Wx twice."""
    inputs = random_inputs(LEAKY_ELMAN, 2, 3, 1, 2)

    def loss(Wx):
        R = inputs.R * Wx.mean()
        return recurrence(LEAKY_ELMAN)(Wx, R, *inputs[2:])[0].sum()

    first = torch.autograd.grad(loss(inputs.Wx), inputs.Wx)
    again = torch.autograd.grad(loss(inputs.Wx), inputs.Wx, create_graph=True)
    torch.testing.assert_close(again, first)
