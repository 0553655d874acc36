"""Kernels of the hoisted part of cells, on the processor, and calls in two parts."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flashrnn import eager, flashrnn, functional, get_cell, hoisting
from flashrnn.cells.hoisting import hoisted as in_two
from flashrnn.cuda import hoisted
from flashrnn.residual import residual_dtype
from tests.cells.test_hoisting import LAYERNORM_LSTM, first_part
from tests.cuda.host_kernel import HostKernel, compile_for_host
from tests.problems import NORMALISED_INPUTS, random_inputs
from tests.suite import results
from tests.tolerances import assert_close


@pytest.fixture(autouse=True)
def on_host(monkeypatch):
    def kernel(direction, parts, heads, head_dim, dtype, bias, device):
        given = parts, direction, heads, head_dim, dtype, bias
        library = compile_for_host("flashrnn_hoisted", hoisted.prelude(*given), "kernels/hoisted.cuh")
        threads, shared = hoisted.block(*given[:2], head_dim)
        return HostKernel(library, hoisted.parameters(*given), 1, threads, shared, at_once=3)

    monkeypatch.setattr(hoisted, "_kernel", kernel)
    monkeypatch.setattr(hoisted, "sum_of_partials", lambda partial, dtype: partial.sum(0).to(dtype))


@pytest.mark.parametrize(
    ("cell", "D", "dtype", "half_bias"),
    [
        (LAYERNORM_LSTM, 200, torch.bfloat16, True),
        (LAYERNORM_LSTM, 30, torch.float32, False),
        (NORMALISED_INPUTS, 130, torch.float16, False),
    ],
)
def test_values_and_gradients(cell, D, dtype, half_bias):
    parts = in_two(cell)
    Wx, _, b, _ = random_inputs(cell, B=2, T=3, N=2, D=D, dtype=torch.float32)
    Wx = Wx.detach().to(dtype).transpose(0, 1).contiguous().transpose(0, 1)
    b = b.detach().to(dtype if half_bias else torch.float32)
    exact = [x.detach().double().requires_grad_() for x in (Wx, b)]
    expected, _ = first_part(cell, *exact)
    found = hoisted.values(parts, Wx, b, training=True)
    d = torch.randn(found.shape).to(dtype)
    d_Wx, d_b = torch.autograd.grad(expected, exact, d.double())
    found_Wx, found_b = hoisted.gradients(parts, Wx, b, d)
    d_b = d_b[[cell.gates.index(gate) for gate in parts.gates]]
    found = found.view(residual_dtype(dtype))
    named = {"values": (found, expected), "d_Wx": (found_Wx, d_Wx), "d_b": (found_b, d_b)}
    assert_close(*({name: pair[k] for name, pair in named.items()} for k in (0, 1)), dtype)


@pytest.mark.slow
def test_call_in_two_parts_equals_the_reference(monkeypatch):
    """The loop runs on the CPU; all inputs have gradients."""

    def loop(cell, backend, *rest):
        return eager.recurrence(cell, "cpu_fused", *rest)

    monkeypatch.setattr(hoisting, "eager", SimpleNamespace(recurrence=loop, cast=eager.cast))
    monkeypatch.setattr(functional, "hoisting", SimpleNamespace(recurrence=hoisting.recurrence, serves=lambda *_: True))
    inputs = random_inputs(LAYERNORM_LSTM, B=2, T=3, N=1, D=16, dtype=torch.float32)
    found = results(flashrnn, inputs, function=LAYERNORM_LSTM, backend="cpu_fused")
    monkeypatch.undo()
    reference = results(flashrnn, inputs.to(torch.float64), function=LAYERNORM_LSTM, backend="vanilla")
    assert_close(found, reference, torch.float32)


def test_compiled_call_of_an_untraced_cell():
    cell = replace(get_cell("lstm"), name="not_traced")

    def call(x):
        return x if hoisting.serves(cell, "auto", torch.bfloat16, torch.device("cuda"), 40, 1, 64) else -x

    assert torch.compile(call, backend="eager", fullgraph=True)(torch.ones(1)) == -1
