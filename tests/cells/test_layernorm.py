"""The built-in cells with layer norms, compared with loops that use PyTorch's layer norm."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from flashrnn import flashrnn, get_cell
from tests.problems import Inputs, random_inputs, results
from tests.tolerances import assert_close


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Return PyTorch's layer norm of x [B, N, gates * D]."""
    return (1 + gain) * F.layer_norm(x, x.shape[-1:], eps=eps) + (0 if bias is None else bias)


def together(gates: Tensor) -> Tensor:
    """Return gates [..., G, N, D] as [..., N, G * D]."""
    return gates.movedim(-3, -2).flatten(-2)


def layernorm_lstm(Wx: Tensor, R: Tensor, b: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Normalise x and R h, each over all gates, and then c, as in Haste."""
    x_bias, r_bias, bias, x_gain, r_gain = (together(part) for part in b[:20].split(4))
    c_gain, c_bias = b[20:]
    (h, c), out = states, []
    for x in Wx.unbind(1):
        x = layer_norm(together(x) + x_bias, x_gain)
        r = layer_norm(together(torch.einsum("gnij,bnj->bgni", R, h)) + r_bias, r_gain)
        i, f, z, o = (x + r + bias).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(z)
        h = torch.sigmoid(o) * torch.tanh(layer_norm(c, c_gain, c_bias))
        out.append(h)
    return torch.stack(out, 1), torch.stack([h, c])


def layernorm_gru(Wx: Tensor, R: Tensor, b: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    before, gain, bias = (together(part) for part in b.split(3))
    (h,), out = states, []
    for x in Wx.unbind(1):
        parts = together(x + torch.einsum("gnij,bnj->bgni", R, h)) + before
        reset, candidate, update = layer_norm(parts, gain, bias, eps=1e-3).chunk(3, -1)
        candidate = torch.tanh(torch.sigmoid(reset) * candidate)
        update = torch.sigmoid(update - 1)
        h = update * candidate + (1 - update) * h
        out.append(h)
    return torch.stack(out, 1), h[None]


@pytest.mark.parametrize("loop", [layernorm_lstm, layernorm_gru])
def test_equals_a_loop_of_pytorch_layer_norms(loop):
    cell = get_cell(loop.__name__)
    inputs = random_inputs(cell, 3, 12, 2, 8)
    assert_close(results(flashrnn, inputs, function=cell, backend="vanilla"), results(loop, inputs), torch.float64)


def test_errors_do_not_grow_over_a_long_sequence():
    """Norms keep the states in range, so that errors of float32 do not accumulate."""
    cell = get_cell("layernorm_gru")
    inputs = Inputs(*(x.detach() for x in random_inputs(cell, 1, 2000, 1, 8, torch.float32)))
    h, _ = flashrnn(*inputs, function=cell)
    expected, _ = flashrnn(*(x.double() for x in inputs), function=cell, backend="vanilla")
    assert_close({"h": h}, {"h": expected}, torch.float32)
