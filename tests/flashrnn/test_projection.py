"""The option proj_size; test_torch_samples compares values and gradients with nn.LSTM."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from flashrnn import FlashRNN
from tests.flashrnn.networks import results
from tests.tolerances import assert_close

OPTIONS = {"num_layers": 2, "proj_size": 3, "dtype": torch.float64}


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def states(layers, batch):
    return randn(layers, batch, 3), randn(layers, batch, 6)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_packed_sequences_with_initial_states(bidirectional):
    lstm = nn.LSTM(5, 6, bidirectional=bidirectional, **OPTIONS)
    x = pack_sequence([randn(3, 5), randn(7, 5), randn(1, 5)], enforce_sorted=False)
    initial = states(4 if bidirectional else 2, 3)
    assert_close(results(FlashRNN.from_torch(lstm), x, initial), results(lstm, x, initial), torch.float64)


def test_steps_equal_the_whole_sequence():
    rnn, x, state = FlashRNN(5, 6, **OPTIONS), randn(4, 2, 5), states(2, 2)
    out, last = rnn(x, state)
    for t in range(4):
        y, state = rnn.step(x[t], state)
        torch.testing.assert_close(y, out[t], rtol=0, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-12)


def test_reset_at_the_first_step_ignores_the_initial_state():
    rnn, x = FlashRNN(5, 6, **OPTIONS), randn(4, 2, 5)
    reset = torch.tensor([[True, False, True, False], [False, False, True, False]])
    out, _ = rnn(x, states(2, 2), reset)
    torch.testing.assert_close(out[:, :1], rnn(x[:, :1], None, reset[:1])[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(out[2:], rnn(x[2:])[0], rtol=0, atol=1e-12)
    first, _ = rnn(x[:2, 1:], tuple(s[:, 1:] for s in states(2, 2)))
    torch.testing.assert_close(out[:2, 1:], first, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lower_precision(dtype):
    rnn = FlashRNN(5, 32, proj_size=16, dtype=dtype)
    x = randn(4, 2, 5).to(dtype)
    out, last = rnn(x, (randn(1, 2, 16).to(dtype), randn(1, 2, 32).to(dtype)))
    assert out.dtype == dtype
    assert {s.dtype for s in last} == {torch.float32}
    assert torch.equal(last[0][0], out[-1].float())


def test_weights_are_initialised_within_the_bounds_of_nn_lstm():
    for parameter in FlashRNN(4, 100, proj_size=4).parameters():
        assert 0.09 < parameter.abs().max() <= 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"proj_size": 6}, "hidden_size=6, got 6"),
        ({"proj_size": -1}, "proj_size .*-1"),
        ({"proj_size": 3, "num_heads": 2}, "num_heads=2"),
        ({"proj_size": 3, "function": "gru"}, "'gru'"),
    ],
)
def test_wrong_options_are_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        FlashRNN(5, 6, **options)
