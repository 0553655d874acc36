"""Sequences of different lengths in a padded batch, compared with one after the other."""

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from flashrnn import Cell, FlashRNN, dispatch, flashrnn, get_cell
from flashrnn.documents import Documents, _read, _rows_of_documents
from flashrnn.reference import Reference
from tests.flashrnn.networks import results
from tests.problems import random_inputs
from tests.tolerances import assert_close

LENGTHS = [2, 9, 0, 4, 1, 1, 7, 3]  # lengths of documents; 27 in total


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def documents(lengths=LENGTHS):
    """Return cumulative lengths and the equivalent reset mask."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    reset = torch.zeros(1, sum(lengths) + 1, dtype=torch.bool)
    reset[0, cu_seqlens] = True
    return cu_seqlens, reset[:, :-1]


class Spy(Reference):
    """The reference with a list of the time steps of each call, and whether all states are requested."""

    def __init__(self):
        self.calls = []

    def forward(self, cell, inputs, all_states, training):
        self.calls.append((inputs.Wx.shape[1], all_states))
        return super().forward(cell, inputs, all_states, training)


@pytest.fixture
def calls(monkeypatch):
    spy = Spy()
    monkeypatch.setattr(dispatch, "BACKENDS", (spy,))
    return spy.calls


@pytest.mark.parametrize("function", ["gru", "lstm", "slstm"])
@pytest.mark.parametrize("bidirectional", [False, True], ids=["", "bidirectional"])
def test_documents_in_a_layer_equal_a_reset_mask(function, bidirectional, calls):
    options = {"num_layers": 2, "bidirectional": bidirectional, "function": function, "dtype": torch.float64}
    rnn, (cu_seqlens, reset) = FlashRNN(5, 6, **options), documents()
    outcomes = {}
    for batch_first, x in (
        (False, randn(27, 1, 5)),
        (True, randn(27, 1, 5).transpose(0, 1)),
        (True, randn(27, 1, 5)[:, 0]),
    ):
        rnn.batch_first = batch_first
        for given in ({"cu_seqlens": cu_seqlens}, {"reset": reset}):
            calls.clear()
            x = x.detach().clone().requires_grad_()
            out, last = rnn(x, **given)
            last = last if isinstance(last, tuple) else (last,)
            loss = out.sin().sum() + sum((2 * s).sin().sum() for s in last)
            gradients = torch.autograd.grad(loss, [x, *rnn.parameters()])
            named = {f"last {k}": s for k, s in enumerate(last)} | {f"d {k}": d for k, d in enumerate(gradients)}
            outcomes[next(iter(given))] = {"out": out, **named}
            assert {T for T, _ in calls} == {9 if "cu_seqlens" in given else 27}
        assert_close(outcomes["cu_seqlens"], outcomes["reset"], torch.float64)


@pytest.mark.parametrize("return_states", [False, True], ids=["h", "all states"])
def test_documents_in_the_function_equal_a_reset_mask(return_states, calls):
    cell, (cu_seqlens, reset) = get_cell("slstm"), documents()
    inputs = random_inputs(cell, 1, 27, 2, 4)
    options = {"function": cell, "return_states": return_states}
    found = flashrnn(*inputs[:3], None, cu_seqlens=cu_seqlens, **options)
    expected = flashrnn(*inputs[:3], None, reset=reset, **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert calls == [(9, return_states), (27, return_states)]


def test_one_long_document_runs_in_one_row(calls):
    rnn, (cu_seqlens, _) = FlashRNN(5, 6), documents([14, 1, 12])
    rnn(torch.zeros(27, 1, 5), cu_seqlens=cu_seqlens)
    assert calls == [(27, False)]


def test_all_rows_but_one_are_at_least_half_full():
    generator = torch.Generator().manual_seed(0)
    for count in range(1, 40):
        lengths = torch.randint(1, 100, (count,), generator=generator).tolist()
        rows = _rows_of_documents(lengths)
        assert sorted(number for row in rows for number in row) == list(range(count))
        used = [sum(lengths[number] for number in row) for row in rows]
        assert max(used) <= max(lengths)
        assert sum(2 * n < max(lengths) for n in used) <= 1


@pytest.mark.parametrize("given", ["reset", "hx", "packed"])
def test_arguments_that_exclude_cu_seqlens(given):
    rnn, (cu_seqlens, reset) = FlashRNN(5, 6, function="gru"), documents()
    x = pack_sequence([torch.zeros(27, 5)]) if given == "packed" else torch.zeros(27, 1, 5)
    options = {"reset": {"reset": reset}, "hx": {"hx": torch.zeros(1, 1, 6)}, "packed": {}}[given]
    with pytest.raises(ValueError, match="cu_seqlens"):
        rnn(x, cu_seqlens=cu_seqlens, **options)


@pytest.mark.parametrize("function", ["gru", "lstm"])
@pytest.mark.parametrize("bidirectional", [False, True], ids=["", "bidirectional"])
def test_packed_sequences_request_all_states_only_if_necessary(function, bidirectional, calls):
    rnn = FlashRNN(5, 6, bidirectional=bidirectional, function=function, num_layers=2)
    packed = pack_sequence([torch.zeros(n, 5) for n in (3, 8, 1)], enforce_sorted=False)
    rnn(packed)
    if function == "gru":  # its only state is h
        rnn(packed, torch.zeros(4 if bidirectional else 2, 3, 6))
    assert set(calls) == {(8, False)}


def test_packed_sequences_of_equal_length_equal_the_padded_batch(calls):
    rnn = FlashRNN.from_torch(torch.nn.LSTM(5, 6, dtype=torch.float64))
    x, states = randn(4, 3, 5), (randn(1, 3, 6), randn(1, 3, 6))
    for given in (None, states):
        packed, padded = results(rnn, pack_sequence(x.unbind(1)), given), results(rnn, x, given)
        assert_close({name: value.view_as(padded[name]) for name, value in packed.items()}, padded, torch.float64)
    assert {all_states for _, all_states in calls} == {False}


def test_derivatives_of_spread_and_gather():
    rows = Documents([2, 3, 1], torch.device("cpu"))

    def there_and_back(x):
        return rows.gather(rows.spread(x, False).sin(), False)

    x = randn(1, 6, 2).requires_grad_()
    options = {"check_forward_ad": True, "check_batched_grad": True}
    assert torch.autograd.gradcheck(there_and_back, x, **options)
    assert torch.autograd.gradgradcheck(there_and_back, x)


def _log_of_gate(g, h):
    return torch.tanh(torch.log(torch.abs(g)) + h)


def test_padding_of_a_cell_without_gradient_at_zero_does_not_reach_weights():
    cell = Cell("log_of_gate", _log_of_gate, states=("h",))
    rnn = FlashRNN(3, 4, function=cell, bias=False, backend="vanilla", dtype=torch.float64)
    data = [randn(steps, 3) for steps in (7, 5, 4)]
    packed = torch.autograd.grad(rnn(pack_sequence(data))[0].data.sum(), list(rnn.parameters()))
    apart = torch.autograd.grad(sum(rnn(x.unsqueeze(1))[0].sum() for x in data), list(rnn.parameters()))
    torch.testing.assert_close(packed, apart)


def test_cu_seqlens_are_read_once_until_they_change(monkeypatch):
    """Reading them from a GPU would wait for the GPU."""
    reads = []
    monkeypatch.setattr("flashrnn.documents._read", lambda *args: reads.append(1) or _read(*args))
    rnn, x = FlashRNN(5, 6, function="gru", dtype=torch.float64), randn(8, 1, 5)
    cu_seqlens, other = torch.tensor([0, 2, 4, 8]), torch.tensor([0, 4, 6, 8])
    first = rnn(x, cu_seqlens=cu_seqlens)[0]
    torch.testing.assert_close(rnn(x, cu_seqlens=cu_seqlens)[0], first, rtol=0, atol=0)
    assert len(reads) == 1
    cu_seqlens.copy_(other)
    torch.testing.assert_close(rnn(x, cu_seqlens=cu_seqlens)[0], rnn(x, cu_seqlens=other.clone())[0], rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"cu_seqlens .* 0 .*7.*\[0, 4, 6, 8\]"):
        rnn(x[1:], cu_seqlens=cu_seqlens)
    with torch.inference_mode():
        rnn(x, cu_seqlens=torch.tensor([0, 2, 4, 8]))
        rnn(x, cu_seqlens=other)
    rnn(x, cu_seqlens=other)[0].sum().backward()


def test_list_of_cu_seqlens_is_an_error():
    with pytest.raises(TypeError, match="cu_seqlens must be an integer tensor, got list"):
        FlashRNN(5, 6)(torch.zeros(3, 1, 5), cu_seqlens=[0, 3])
