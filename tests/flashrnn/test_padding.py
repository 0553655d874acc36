"""Padding of odd head sizes, as for `cuda_fused`, tested with the reference."""

import pytest
import torch

from flashrnn import dispatch, flashrnn, functional, get_cell
from flashrnn.dispatch import choose
from flashrnn.memory_format import is_time_major
from tests.problems import CELLS, Inputs, all_states, cell_name, random_inputs, random_reset, results
from tests.tolerances import assert_close


@pytest.fixture
def padded(monkeypatch) -> list[int]:
    """Pad odd head sizes as on a GPU; return a list of the head sizes for which backends are chosen."""

    def padding(name, cell, heads, head_dim, *others):
        return -head_dim % 8

    padding._dynamo_marked_constant = True
    sizes = []

    def choosing(name, problem):
        sizes.append(problem.head_dim)
        return choose(name, problem)

    monkeypatch.setattr(functional, "padding", padding)
    monkeypatch.setattr(dispatch, "choose", choosing)
    return sizes


def odd_inputs(cell, time_major: bool = False) -> Inputs:
    Wx, *others = random_inputs(cell, 3, 5, 2, 5)
    if time_major:
        Wx = Wx.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    return Inputs(Wx, *others)


@pytest.mark.parametrize("with_reset", [False, True], ids=["", "reset"])
@pytest.mark.parametrize("time_major", [False, True], ids=["", "time major"])
@pytest.mark.parametrize("run", [flashrnn, all_states], ids=["h", "all states"])
@pytest.mark.parametrize("cell", CELLS, ids=cell_name)
def test_outputs_and_gradients_equal_those_without_padding(padded, monkeypatch, cell, run, time_major, with_reset):
    inputs = odd_inputs(cell, time_major)
    options = {"function": cell, "backend": "vanilla", "reset": random_reset(3, 5) if with_reset else None}
    out = results(run, inputs, **options)
    assert set(padded) == {8}
    monkeypatch.undo()
    assert_close(out, results(run, inputs, **options), torch.float64)


@pytest.mark.parametrize("time_major", [False, True], ids=["", "time major"])
def test_results_have_the_memory_format_without_padding(padded, monkeypatch, time_major):
    inputs = odd_inputs(get_cell("lstm"), time_major)
    h, last, states = all_states(*inputs)
    assert is_time_major(h) == time_major
    monkeypatch.undo()
    expected = all_states(*inputs)
    for out, ref in zip((h, last, *states), (*expected[:2], *expected[2]), strict=True):
        assert (out.shape, out.stride(), out.dtype) == (ref.shape, ref.stride(), ref.dtype)


def test_padding_without_states_biases_and_gradients(padded, monkeypatch):
    Wx, R, _, _ = odd_inputs(get_cell("slstm"))
    with torch.no_grad():
        out = flashrnn(Wx, R, None, function="slstm")
        assert set(padded) == {8}
        monkeypatch.undo()
        for x, y in zip(out, flashrnn(Wx, R, None, function="slstm"), strict=True):
            torch.testing.assert_close(x, y)


def test_even_head_sizes_are_not_padded(padded):
    flashrnn(*random_inputs(get_cell("gru"), 2, 3, 1, 6), function="gru")
    assert set(padded) == {6}


@pytest.mark.parametrize("run", [flashrnn, all_states], ids=["h", "all states"])
def test_compiled_calls_are_padded(padded, monkeypatch, run):
    torch.compiler.reset()
    inputs = odd_inputs(get_cell("lstm"), time_major=True)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    out = results(compiled, inputs, function="lstm")
    assert set(padded) == {8}
    monkeypatch.undo()
    assert_close(out, results(run, inputs, function="lstm"), torch.float64)


@pytest.mark.parametrize("with_padding", [False, True], ids=["", "padded"])
def test_compiled_call_accepts_several_odd_head_sizes(request, with_padding):
    """From the second size on, the size is a symbol in the compiler."""
    if with_padding:
        request.getfixturevalue("padded")
    torch.compiler.reset()
    compiled = torch.compile(flashrnn, fullgraph=True, backend="aot_eager")
    for D in (5, 7, 9) if with_padding else (5, 7):
        inputs = random_inputs(get_cell("lstm"), 2, 3, 1, D)
        assert_close(results(compiled, inputs), results(flashrnn, inputs), torch.float64)
