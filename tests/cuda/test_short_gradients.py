"""The kernel for the gradients of all weights after a short sequence, on the processor, and its binaries."""

import pytest
import torch

from flashrnn import get_cell, products
from flashrnn.cuda import short_gradients
from flashrnn.cuda.short_gradients import ShortGradients, compile_kernel, serves
from flashrnn.cuda.spec import KernelSpec, Variant
from flashrnn.gpu import named_gpu
from tests.cuda.host_kernel import short_gradients_on_host
from tests.cuda.resident.test_kernels import GPUS
from tests.cuda.test_weight_gradient import random_operands
from tests.suite import Case

LSTM, GRU, ELMAN = map(get_cell, ("lstm", "gru", "elman"))


@pytest.fixture
def on_host(monkeypatch):
    """Run the kernel on the processor."""
    monkeypatch.setattr(short_gradients, "_kernel", short_gradients_on_host)


@pytest.mark.parametrize(
    ("case", "dtype", "states", "features", "bidirectional"),
    [
        (Case(LSTM, B=5, T=20, N=2, D=40, time_major=True), torch.bfloat16, True, 72, False),
        (Case(GRU, B=3, T=5, N=2, D=10, reset=True), torch.float16, True, 14, False),
        (Case(LSTM, B=4, T=1, N=1, D=136), torch.float16, True, None, False),
        (Case(GRU, B=3, T=7, N=2, D=12, time_major=True), torch.bfloat16, True, 4, True),
        (Case(ELMAN, B=2, T=1, N=1, D=2), torch.bfloat16, False, 2, False),
        (Case(GRU, B=5, T=7, N=1, D=36, time_major=True), torch.float32, True, 140, False),
        (Case(LSTM, B=3, T=2, N=2, D=10, reset=True), torch.float32, True, 6, False),
        (Case(GRU, B=1, T=1, N=1, D=64), torch.float32, False, None, False),
    ],
    ids=lambda value: str(value) if isinstance(value, Case) else None,
)
def test_gradients_are_sums_over_steps_and_sequences(on_host, case, dtype, states, features, bidirectional):
    cell, B, T, N, D = case[:5]
    spec = KernelSpec(
        "backward", cell, N, D, B, dtype, named_gpu("H100"), Variant(reset=case.reset, bidirectional=bidirectional)
    )
    assert serves(spec, T)
    d_Wx, d_u, h, initial, reset = random_operands(case, dtype, states)
    partial, x = torch.randn(3, len(cell.gates), N, D), None
    if features:
        x = torch.randn(*((T, B) if case.time_major else (B, T)), features).to(dtype)
    made = ShortGradients(spec, T, case.time_major, len(partial), 0)
    assert x is None or made.multiplies(x)
    for b_dtype in (dtype, torch.float32):
        d_R, d_b, d_W = made(d_Wx, d_u, h, initial, reset, partial, b_dtype, x)
        assert d_b.dtype == b_dtype
        torch.testing.assert_close(d_b, partial.sum(0).to(b_dtype))
    exact = [None if one is None else one.double() for one in (d_Wx, d_u, h, initial)]
    _agree(d_R, products.weight_gradient_of_states(cell, *exact, reset, bidirectional))
    if x is None:
        assert d_W is None
    else:
        rows = d_Wx.transpose(0, 1) if case.time_major else d_Wx
        _agree(d_W, rows.double().flatten(0, 1).flatten(1).t() @ x.double().flatten(0, 1))


def _agree(found: torch.Tensor, expected: torch.Tensor) -> None:
    eps = torch.finfo(found.dtype).eps
    scale = 1.0 if expected.numel() < 2 else expected.std().item()
    torch.testing.assert_close(found.double(), expected, rtol=eps, atol=1e-4 * scale)


def test_more_rows_are_not_supported():
    spec = KernelSpec("backward", LSTM, 1, 64, 16, torch.float16, named_gpu("H100"))
    assert serves(spec, 16)
    assert not serves(spec, 17)
    assert not serves(KernelSpec("backward", LSTM, 1, 64, 1, torch.float16, named_gpu("H100")), 64)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("cell", "head_dim"), [("gru", 2), ("lstm", 64), ("lstm", 768), ("gru", 100)])
def test_no_register_spills(cell, head_dim, dtype, gpu):
    spec = KernelSpec("backward", get_cell(cell), 1, head_dim, 16, dtype, named_gpu(gpu), Variant(reset=True))
    assert compile_kernel(spec).spilled == 0
