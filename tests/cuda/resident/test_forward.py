"""The arguments of launches of forward passes, recorded by a fake plan."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from flashrnn import get_cell
from flashrnn.cuda.resident import backend, calls
from flashrnn.cuda.spec import Variant
from flashrnn.problem import Inputs

B, T, N, D = 3, 5, 2, 64
LSTM = get_cell("lstm")


@pytest.fixture
def launches(monkeypatch) -> Iterator[list[tuple[tuple, dict]]]:
    """Return a list of the sizes and variant of the plan, and the arguments, of each launch."""
    found = []

    def plan(choose, *sizes) -> SimpleNamespace:
        return SimpleNamespace(launch=lambda arguments, device: found.append((sizes, dict(arguments))))

    monkeypatch.setattr(backend, "_plan", plan)
    zeros = torch.zeros(1, dtype=torch.uint8)
    monkeypatch.setattr(calls, "zeros", lambda device, size: zeros)
    backend._forward.cache_clear()
    yield found
    backend._forward.cache_clear()


def inputs(dtype: torch.dtype, time_major: bool = False, bias: torch.dtype | None = None, **others) -> Inputs:
    Wx = torch.randn(T, B, 4, N, D, dtype=dtype).transpose(0, 1)
    b = None if bias is None else torch.randn(4, N, D, dtype=bias)
    return Inputs(Wx if time_major else Wx.contiguous(), torch.randn(4, N, D, D, dtype=dtype), b, **others)


@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_results_have_the_memory_format_of_the_inputs(launches, time_major, training):
    given = inputs(torch.bfloat16, time_major, torch.bfloat16, states=torch.randn(2, B, N, D), reset=None)
    (h, aux, last), gates = backend.CudaFused().forward(LSTM, given, all_states=False, training=training)
    rows = (T, B) if time_major else (B, T)
    for result, inner in ((h, (N, D)), (aux[0], (N, D)), (gates, (4, N, D // 4, 4))):
        kept = result.numel() > 0
        assert kept == (training or result is h)
        memory = result.transpose(0, 1) if time_major else result
        assert not kept or (memory.shape == (*rows, *inner) and memory.is_contiguous())
    assert last.shape == (2, B, N, D)
    assert (h.dtype, aux.dtype, last.dtype, gates.dtype) == (
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float16,
    )
    (((*_, variant, _, _), arguments),) = launches
    assert variant == Variant(training=training, aux=torch.float16 if training else None, half_bias=True)
    for name, one in {"x": given.Wx, "bias": given.b, "initial": given.states, "h": h, "last": last}.items():
        assert arguments[name].data_ptr() == one.data_ptr()


def test_missing_biases_are_zeros_in_the_state_dtype(launches):
    given = inputs(torch.bfloat16, states=None, reset=None)
    backend.CudaFused().forward_of(LSTM, given.Wx, given.Wx.device, reset=False, half_bias=False)(given)
    (((*_, variant, _, _), arguments),) = launches
    assert not variant.half_bias
    assert not arguments["bias"].any()
