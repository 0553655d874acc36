"""The weights of an LSTM as views of one buffer, or copied into one."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from flashrnn import FlashRNN, flat_weights


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(flat_weights, "_DEVICE", "cpu")


def network(**options) -> FlashRNN:
    torch.manual_seed(0)
    return FlashRNN(5, 6, num_layers=2, bidirectional=True, **options)


def is_flat(rnn: FlashRNN) -> bool:
    """Return whether a call reads the memory of the parameters; check that its values are those of a copy."""
    flat = flat_weights.of(rnn)
    assert torch.equal(flat, flat_weights._copy(rnn))
    return flat.data_ptr() == rnn.input_l0.weight.data_ptr()


WAYS = {
    "made": lambda rnn: rnn,
    "converted": lambda rnn: rnn.double(),
    "copied": copy.deepcopy,
    "pickled": lambda rnn: pickle.loads(pickle.dumps(rnn)),
    "in a model": lambda rnn: nn.Sequential(rnn).double()[0],
    "from PyTorch": lambda rnn: FlashRNN.from_torch(rnn.to_torch()),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bias", [True, False])
def test_parameters_are_views_of_one_buffer(way, bias):
    before = network(bias=bias)
    state = before.state_dict()
    rnn = WAYS[way](before)
    assert is_flat(rnn)
    assert_close(rnn.state_dict(), state, check_dtype=False)


def test_buffer_contains_updated_parameters():
    rnn = network()
    rnn.load_state_dict(FlashRNN(5, 6, num_layers=2, bidirectional=True).state_dict())
    rnn(torch.randn(3, 2, 5))[0].sum().backward()
    torch.optim.SGD(rnn.parameters(), lr=1.0).step()
    assert is_flat(rnn)


def test_replaced_parameter_is_copied_until_flatten_parameters():
    rnn = network()
    rnn.recurrent_l1.R = nn.Parameter(torch.randn_like(rnn.recurrent_l1.R))
    assert not is_flat(rnn)
    rnn.flatten_parameters()
    assert is_flat(rnn)


@pytest.mark.parametrize("change", [{"function": "gru"}, {"num_heads": 2}, {"function": "slstm"}], ids=str)
def test_other_networks_are_not_flattened(change):
    rnn = FlashRNN(5, 6, **change)
    assert rnn.recurrent_l0.R.untyped_storage().data_ptr() != rnn.input_l0.weight.untyped_storage().data_ptr()


def test_shared_parameters_stay_shared():
    rnn = FlashRNN(6, 6, num_layers=2)
    rnn.recurrent_l1.R = rnn.recurrent_l0.R
    rnn.double()
    assert rnn.recurrent_l1.R is rnn.recurrent_l0.R
    assert not is_flat(rnn)
