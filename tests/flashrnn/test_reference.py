"""The reference backend, compared with numerical derivatives and with autograd through a plain loop."""

import logging
import re
from itertools import pairwise

import pytest
import torch

from flashrnn import Cell, flashrnn, get_cell, reference
from tests.problems import (
    BUILT_IN,
    CELLS,
    MINIMAL_GATED,
    NORMALISED,
    NORMALISED_LSTM,
    PEEPHOLE_LSTM,
    Inputs,
    all_states,
    cell_name,
    plain_loop,
    random_inputs,
    random_reset,
    reference_results,
    results,
)
from tests.suite import check_numbers_beyond_float16
from tests.tolerances import assert_close

LINEAR = Cell("linear", lambda g, h: 0.5 * h + g, states=("h",))
NO_GRAPH = Cell("no_graph", lambda g, p, h, c: (torch.lgamma(g) * c, p - h), states=("h", "c"), recurrent_gates=("p",))


def check_against_plain_loop(cell: Cell, inputs: Inputs, reset: torch.Tensor | None = None) -> None:
    out = results(all_states, inputs, function=cell, reset=reset, backend="vanilla")
    assert_close(out, results(plain_loop, inputs, function=cell, reset=reset), torch.float64)


@pytest.mark.parametrize("cell", [*CELLS, *NORMALISED], ids=cell_name)
def test_gradcheck(cell):
    """Checks derivatives of all states and last states by all inputs. One sequence has no reset.

    With one head, because the number of numerical derivatives grows with the square of the size; several heads are
    compared with autograd through a plain loop.
    """
    reset = torch.tensor([[False, True, False], [False, False, False]])
    inputs = tuple(random_inputs(cell, 2, 3, 1, 3 if cell in NORMALISED else 2))

    def outputs(*x):
        h, last, states = all_states(*x, function=cell, reset=reset, backend="vanilla")
        return h, last, *states[1:]

    assert torch.autograd.gradcheck(outputs, inputs)


@pytest.mark.parametrize("cell", BUILT_IN, ids=cell_name)
@pytest.mark.parametrize(
    ("T", "B", "N", "D"), [(1, 1, 1, 1), (1, 3, 3, 4), (2, 3, 1, 17), (63, 1, 3, 17), (63, 3, 1, 4)]
)
def test_results_equal_autograd_through_a_plain_loop(cell, T, B, N, D):
    check_against_plain_loop(cell, random_inputs(cell, B, T, N, D))


@pytest.mark.parametrize("cell", [get_cell("slstm"), MINIMAL_GATED, NORMALISED_LSTM, LINEAR], ids=cell_name)
@pytest.mark.parametrize("steps", [1, 2, 7, 8])
def test_backward_in_several_chunks(cell, steps, monkeypatch):
    monkeypatch.setattr(reference, "_CHUNK", steps * 2 * 2 * 3)
    check_against_plain_loop(cell, random_inputs(cell, 2, 7, 2, 3), random_reset(2, 7))


@pytest.mark.parametrize("missing", [0, 1], ids=["last states alone", "all states alone"])
@pytest.mark.parametrize("cell", [get_cell("slstm"), LINEAR], ids=cell_name)
def test_gradients_of_a_single_output(cell, missing):
    inputs = random_inputs(cell, 2, 3, 2, 2)
    out, ref = (
        torch.autograd.grad(run(*inputs, function=cell)[1 - missing].sum(), inputs) for run in (flashrnn, plain_loop)
    )
    names = inputs._fields
    assert_close(dict(zip(names, out, strict=True)), dict(zip(names, ref, strict=True)), torch.float64)


def test_cell_without_a_scalar_graph_trains_with_a_log_message(caplog):
    reference._functions.cache_clear()
    with caplog.at_level(logging.WARNING, "flashrnn"):
        check_against_plain_loop(NO_GRAPH, random_inputs(NO_GRAPH, 2, 5, 2, 3))
        check_against_plain_loop(NO_GRAPH, random_inputs(NO_GRAPH, 2, 5, 2, 3), random_reset(2, 5))
    (record,) = caplog.records
    assert re.search(r"'no_graph' .*aten\.lgamma\.default.* longer", record.getMessage())


class LogGamma(torch.autograd.Function):
    """An autograd function in the style before PyTorch 2.0, which torch.func does not support."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.lgamma(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.digamma(ctx.saved_tensors[0])


class NewLogGamma(LogGamma):
    @staticmethod
    def forward(x):
        return torch.lgamma(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)


def test_cell_without_a_scalar_graph_may_use_an_autograd_function():
    cell = Cell("of_function", lambda g, h: torch.tanh(NewLogGamma.apply(g) + h), states=("h",))
    check_against_plain_loop(cell, random_inputs(cell, 1, 3, 1, 2))


def test_old_style_autograd_function_is_an_error_with_advice():
    cell = Cell("of_function", lambda g, h: torch.tanh(LogGamma.apply(g) + h), states=("h",))
    with pytest.raises(RuntimeError, match=r"'of_function' .*setup_context"):
        results(flashrnn, random_inputs(cell, 1, 3, 1, 2), function=cell)


@pytest.mark.parametrize("backend", ["vanilla", "auto"])
def test_step_may_work_in_place(backend):
    def step(i, f, z, o, h, c):
        c.mul_(f.sigmoid_()).add_(i.sigmoid_() * z.tanh_())
        return o.sigmoid_() * torch.tanh(c), c

    inputs = random_inputs(get_cell("lstm"), 1, 5, 1, 3)
    before = [x.detach().clone() for x in inputs]
    out = results(flashrnn, inputs, function=Cell("in_place", step, states=("h", "c")), backend=backend)
    assert_close(out, results(flashrnn, inputs, function="lstm"), torch.float64)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


@pytest.mark.parametrize("backend", ["vanilla", "auto"])
def test_step_in_place_may_return_a_tensor_twice(backend):
    def in_place(i, h, c):
        c.mul_(torch.sigmoid(h)).add_(torch.tanh(i)).add_(0.3 * h)
        return c, c

    def step(i, h, c):
        c = torch.sigmoid(h) * c + torch.tanh(i) + 0.3 * h
        return c, c

    cells = [Cell("twice", one, states=("h", "c")) for one in (in_place, step)]
    inputs = random_inputs(cells[0], 1, 5, 1, 3)
    out, expected = (results(flashrnn, inputs, function=cell, backend=backend) for cell in cells)
    assert_close(out, expected, torch.float64)


@pytest.mark.parametrize("cell", CELLS, ids=cell_name)
def test_missing_initial_states_are_zeros(cell):
    Wx, R, b, states = random_inputs(cell, 2, 3, 2, 2)
    for out, ref in zip(flashrnn(Wx, R, b, function=cell), flashrnn(Wx, R, b, 0 * states, cell), strict=True):
        assert torch.equal(out, ref)


@pytest.mark.parametrize("cell", CELLS, ids=cell_name)
def test_resets_equal_separate_documents(cell):
    """Neither states nor gradients cross the start of a document."""
    cu_seqlens = torch.tensor([0, 0, 3, 4, 4, 9, 9])  # lengths 0, 3, 1, 0, 5, 0
    inputs = random_inputs(cell, 1, 9, 2, 3)

    def one_by_one(Wx, R, b, states):
        documents = [Wx[:, start:end] for start, end in pairwise(cu_seqlens.tolist()) if start < end]
        outputs = [flashrnn(x, R, b, 0 * states, cell) for x in documents]
        return torch.cat([h for h, _ in outputs], dim=1), outputs[-1][1]

    def packed(Wx, R, b, states):
        h, last = flashrnn(Wx, R, b, function=cell, cu_seqlens=cu_seqlens)
        return h + 0 * states.sum(), last

    alone = results(one_by_one, inputs)
    assert_close(results(packed, inputs), alone, torch.float64)
    reset = torch.zeros(1, 9, dtype=torch.bool)
    reset[0, [0, 3, 4]] = True
    assert_close(results(flashrnn, inputs, function=cell, reset=reset), alone, torch.float64)


def test_first_step_without_reset_continues_from_the_initial_states():
    inputs = random_inputs(PEEPHOLE_LSTM, 1, 4, 1, 2)
    reset = torch.tensor([[False, False, True, False]])
    h, _ = flashrnn(*inputs, PEEPHOLE_LSTM, reset=reset)
    assert torch.equal(h[:, :2], flashrnn(inputs.Wx[:, :2], *inputs[1:], PEEPHOLE_LSTM)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("cell", CELLS, ids=cell_name)
def test_lower_precision_is_within_its_bound(cell, dtype):
    inputs = Inputs(*(x.to(dtype) for x in random_inputs(cell, 3, 20, 2, 16))).to(dtype)
    assert_close(results(all_states, inputs, function=cell), reference_results(inputs, cell), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("cell", BUILT_IN, ids=cell_name)
def test_continuing_from_the_last_states_equals_the_whole_sequence(cell, dtype):
    Wx, R, b, states = random_inputs(cell, 2, 7, 2, 3, dtype)
    h, last = flashrnn(Wx, R, b, states, cell)
    first, between = flashrnn(Wx[:, :4], R, b, states, cell)
    second, end = flashrnn(Wx[:, 4:], R, b, between, cell)
    assert h.dtype == dtype
    assert last.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(torch.cat([first, second], dim=1), h)
    assert torch.equal(end, last)
    assert torch.equal(last[0], h[:, -1].to(last.dtype))  # h continues with the value that was returned


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_biases_and_states_are_not_rounded_to_half_types(dtype):
    Wx, R, b, states = random_inputs(get_cell("lstm"), 2, 1, 2, 3, torch.float32)
    out, ref = (flashrnn(0 * Wx, 0 * R, b, states, dtype=d)[1] for d in (dtype, torch.float64))
    assert_close({"c": out[1]}, {"c": ref[1]}, torch.float32)


@pytest.mark.parametrize("cell", CELLS, ids=cell_name)
def test_time_major_memory_gives_equal_results(cell):
    inputs = random_inputs(cell, 3, 5, 2, 4)
    time_major = inputs.Wx.detach().transpose(0, 1).contiguous().requires_grad_()

    def from_time_major(Wx, *others, **options):
        return flashrnn(Wx.transpose(0, 1), *others, **options)

    out = results(from_time_major, inputs._replace(Wx=time_major), function=cell)
    out["gradient of Wx"] = out["gradient of Wx"].transpose(0, 1)
    for name, ref in results(flashrnn, inputs, function=cell).items():
        assert torch.equal(out[name], ref), name


def test_states_of_half_types_are_results_in_float32():
    inputs = [x.detach() for x in random_inputs(get_cell("slstm"), 2, 5, 1, 3, torch.bfloat16)]
    for training in (False, True):
        inputs[0].requires_grad_(training)
        h, last, states = all_states(*inputs, function="slstm")
        assert [state.shape for state in states] == [(2, 5, 1, 3)] * 4
        assert [state.dtype for state in (h, last, *states[1:])] == [torch.bfloat16] + [torch.float32] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cell", BUILT_IN, ids=cell_name)
def test_half_types_are_within_their_bounds(cell, dtype):
    """Otherwise, it could not be a peer for other backends."""
    inputs, options = random_inputs(cell, 4, 40, 2, 32, dtype), {"function": cell, "of_h": True, "backend": "vanilla"}
    assert_close(results(flashrnn, inputs, **options), results(flashrnn, inputs.to(torch.float64), **options), dtype)


def test_residual_of_states_beyond_float16():
    """An exponential gate without a stabiliser causes states beyond the range of half types."""

    def step(i, f, z, o, h, c, n):
        c, n = torch.sigmoid(f) * c + torch.exp(i) * torch.tanh(z), torch.sigmoid(f) * n + torch.exp(i)
        return torch.sigmoid(o) * c / n, c, n

    cell = Cell("exponential", step, states=("h", "c", "n"))
    for offset in (-18.0, 0.0, 14.0):
        inputs = random_inputs(cell, 3, 12, 1, 8)
        with torch.no_grad():
            inputs.b[0] += offset
            inputs.states[1:] = 1
        inputs, options = inputs.to(torch.bfloat16), {"function": cell, "backend": "vanilla"}
        assert_close(
            results(flashrnn, inputs, **options), results(flashrnn, inputs.to(torch.float64), **options), torch.bfloat16
        )


def test_operator_returns_no_residual_without_training():
    Wx, R, b, states = (x.detach() for x in random_inputs(get_cell("lstm"), 2, 5, 1, 3))
    arguments = (Wx, R, b, states, None, get_cell("lstm").key, "vanilla", False)
    for training in (False, True):
        _, aux, _, gates = torch.ops.flashrnn.forward(*arguments, training, "GND")
        assert (aux.shape[2], gates.shape[1]) == ((5, 5) if training else (0, 0))


def test_gradients_with_numbers_beyond_float16():
    check_numbers_beyond_float16("vanilla", "cpu")
