"""A repeated forward pass is launched as the first one was; here a plan takes note of the arguments of its launches."""

from types import SimpleNamespace

import pytest
import torch

from flashrnn import get_cell
from flashrnn.cuda.resident import backend
from flashrnn.problem import Inputs

B, T, N, D = 3, 5, 2, 8
LSTM = get_cell("lstm")


@pytest.fixture
def launches(monkeypatch) -> list[tuple[tuple, dict]]:
    """The sizes and variant of the plan, and the arguments, of each launch."""
    found = []

    def plan(choose, *sizes) -> SimpleNamespace:
        return SimpleNamespace(launch=lambda arguments, device: found.append((sizes, dict(arguments))))

    monkeypatch.setattr(backend, "_plan", plan)
    zeros = torch.zeros(1, dtype=torch.uint8)
    monkeypatch.setattr(backend, "zeros", lambda device, size: zeros)
    return found


def inputs(dtype: torch.dtype, time_major: bool = False, bias: torch.dtype | None = None, **others) -> Inputs:
    Wx = torch.randn(T, B, 4, N, D, dtype=dtype).transpose(0, 1)
    b = None if bias is None else torch.randn(4, N, D, dtype=bias)
    return Inputs(Wx if time_major else Wx.contiguous(), torch.randn(4, N, D, D, dtype=dtype), b, **others)


@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize(
    ("dtype", "bias", "others"),
    [
        (torch.bfloat16, torch.bfloat16, {"states": None, "reset": None}),
        (torch.bfloat16, torch.float32, {"states": torch.randn(2, B, N, D), "reset": torch.zeros(B, T).bool()}),
        (torch.float32, torch.float32, {"states": torch.randn(N, B, 2, D).transpose(0, 2), "reset": None}),
    ],
)
def test_launch_is_that_of_the_first_call(launches, time_major, dtype, bias, others):
    given = inputs(dtype, time_major, bias, **others)
    (h, _, last), _ = backend.CudaFused().forward(LSTM, given, all_states=False, training=False)
    repeated_h, repeated_last = backend.CudaFused().repeated(LSTM, given)(given)
    for result, expected in ((repeated_h, h), (repeated_last, last)):
        assert (result.shape, result.stride(), result.dtype) == (expected.shape, expected.stride(), expected.dtype)
    (sizes, first), (repeated_sizes, repeated) = launches
    assert repeated_sizes == sizes
    assert [*repeated] == [*first]
    for name in ("x", "R", "bias", "initial", "reset"):
        assert (first[name] is None) == (repeated[name] is None)
        assert first[name] is None or torch.equal(first[name], repeated[name])
    assert repeated["h"].data_ptr() == repeated_h.data_ptr()
    assert repeated["last"] is repeated_last


def test_biases_of_none_are_zeros_in_the_states_dtype(launches):
    given = inputs(torch.bfloat16, states=None, reset=None)
    backend.CudaFused().repeated(LSTM, given)(given)
    (((*_, variant, _), arguments),) = launches
    assert not variant.half_bias
    assert not arguments["bias"].any()


def test_inputs_that_have_to_be_copied_take_the_long_way(launches):
    given = inputs(torch.bfloat16, bias=torch.float32, states=None, reset=None)
    repeated = backend.CudaFused().repeated(LSTM, given)
    rows = torch.randn(given.Wx.numel() + 1).to(torch.bfloat16)[1:].view(given.Wx.shape)
    assert repeated(given._replace(Wx=rows)) is None
    assert backend.CudaFused().repeated(LSTM, given._replace(Wx=torch.randn(B, T, 4, D, N).mT)) is None
