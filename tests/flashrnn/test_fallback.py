"""A backend whose kernels cannot be compiled: `auto` selects the next one with a warning; otherwise it is an error."""

import warnings

import pytest
import torch

from flashrnn import dispatch, eager, flashrnn, get_cell
from flashrnn.problem import KernelUnavailable
from flashrnn.reference import Reference
from tests.problems import Inputs, random_inputs, results
from tests.tolerances import assert_close

LSTM = get_cell("lstm")


class Counting(Reference):
    """The reference with a list of its passes, which fails to compile for more than `largest` sequences."""

    def __init__(self, name: str, largest: int) -> None:
        self.name, self.largest, self.calls = name, largest, []

    def forward(self, cell, inputs, all_states, training):
        if inputs.Wx.shape[0] > self.largest:
            raise KernelUnavailable("no compiler found")
        self.calls.append("forward")
        return super().forward(cell, inputs, all_states, training)

    def backward(self, cell, residual, grads):
        self.calls.append("backward")
        return super().backward(cell, residual, grads)


@pytest.fixture
def backends(monkeypatch) -> tuple[Counting, Counting]:
    """Return a backend for at most two sequences and one for any number, which "auto" tries in this order."""
    both = Counting("small", 2), Counting("any", 1000)
    monkeypatch.setattr(dispatch, "BACKENDS", both)
    monkeypatch.setattr(dispatch, "_FAILED", {})
    dispatch._warn_of_fallback.cache_clear()
    return both


@pytest.fixture(params=["eager", "operator"])
def way(request, monkeypatch) -> str:
    """Run calls eagerly, or as operators."""
    if request.param == "operator":
        monkeypatch.setattr(eager, "serves", lambda inputs: False)
    return request.param


def of_batch(B: int) -> Inputs:
    return random_inputs(LSTM, B, 3, 1, 4)


@pytest.mark.usefixtures("way")
def test_auto_selects_the_next_backend_for_both_passes_and_warns_once(backends):
    small, any_ = backends
    expected = results(flashrnn, of_batch(3), backend="any")
    with pytest.warns(RuntimeWarning, match=r"'small' .*no compiler found"):
        first = results(flashrnn, of_batch(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = results(flashrnn, of_batch(3))
        results(flashrnn, of_batch(4))
        with torch.no_grad():
            flashrnn(*of_batch(3))
    for found in (first, second):
        assert_close(found, expected, torch.float64)
    assert any_.calls == ["forward", "backward"] * 4 + ["forward"]
    assert small.calls == []


@pytest.mark.usefixtures("way")
def test_named_backend_raises_the_error(backends):
    with pytest.raises(KernelUnavailable, match=r"^no compiler found$"):
        flashrnn(*of_batch(3), backend="small")


@pytest.mark.usefixtures("way")
def test_backward_uses_the_backend_of_the_forward(backends):
    """Even if this backend has failed in the meantime for another call of the same layer."""
    small, any_ = backends
    inputs = of_batch(2)
    h, _ = flashrnn(*inputs)
    with pytest.warns(RuntimeWarning, match="'small'"):
        results(flashrnn, of_batch(3))
    torch.autograd.grad(h.sum(), inputs)
    assert small.calls == ["forward", "backward"]
    assert any_.calls == ["forward", "backward"]


def test_auto_selects_the_next_backend_in_compiled_calls(backends):
    torch.compiler.reset()
    any_, inputs = backends[1], of_batch(3)
    expected = results(flashrnn, inputs, backend="any")
    any_.calls.clear()
    with pytest.warns(RuntimeWarning, match="'small'"):
        found = results(torch.compile(flashrnn, fullgraph=True, backend="aot_eager"), inputs)
    assert_close(found, expected, torch.float64)
    assert any_.calls == ["forward", "backward"]


def test_other_errors_are_raised(backends, monkeypatch):
    def forward(*_):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(backends[0], "forward", forward)
    with pytest.raises(torch.OutOfMemoryError, match=r"^no memory$"):
        flashrnn(*of_batch(1))
    assert backends[1].calls == []
