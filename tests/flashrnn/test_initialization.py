import pytest
import torch

from flashrnn import FlashRNN, Recurrence


def recurrence(function="slstm", **options) -> Recurrence:
    torch.manual_seed(0)
    return Recurrence(256, num_heads=4, function=function, **options)


def test_standard_is_uniform_within_the_inverse_root_of_the_head_size():
    module = recurrence(recurrent_init="standard", bias_init="standard")
    for parameter in (module.R, module.b):
        assert 0.12 < parameter.abs().max() <= 1 / 8
        assert abs(parameter.mean()) < 0.01


def test_input_weights_are_initialised_as_in_nn_lstm():
    """The bound is the inverse root of the hidden size, independent of the number of features."""
    torch.manual_seed(0)
    network, theirs = FlashRNN(1, 256, num_heads=4, num_layers=2), torch.nn.LSTM(1, 256, num_layers=2)
    for k in range(2):
        ours, expected = network.get_submodule(f"input_l{k}").weight, theirs.get_parameter(f"weight_ih_l{k}")
        assert ours.abs().max() <= 1 / 16
        torch.testing.assert_close(ours.std(), expected.std(), rtol=0.05, atol=0)


def test_reset_parameters_initialises_like_a_new_network():
    torch.manual_seed(0)
    network = FlashRNN(3, 8, num_layers=2, bidirectional=True)
    for parameter in network.parameters():
        torch.nn.init.constant_(parameter, 7)
    network.reset_parameters()
    for name, parameter in network.named_parameters():
        assert 0.1 < parameter.abs().max() <= 8**-0.5, name


def test_powerlaw_depends_on_the_layer():
    network = FlashRNN(3, 8, num_layers=3, bias_init="powerlaw")
    forget = [network.get_submodule(f"recurrent_l{k}").b[1, 0] for k in range(3)]
    alone = [recurrence(bias_init="powerlaw", block_index=k, num_blocks=3).b[1, 0] for k in range(3)]
    for ours, other in zip(forget, alone, strict=True):
        torch.testing.assert_close(ours[[0, -1]], other[[0, -1]])
    assert forget[0][3] < forget[1][3] < forget[2][3]


def test_zeros_initialise_r_and_b_with_zeros():
    module = recurrence(recurrent_init="zeros", bias_init="zeros")
    assert not module.R.any()
    assert not module.b.any()


@pytest.mark.parametrize(
    ("block_index", "num_blocks", "exponent"), [(0, 1, 0.3), (0, 3, 0.3), (1, 3, 0.95), (2, 3, 1.6)]
)
def test_powerlaw_of_the_forget_gate(block_index, num_blocks, exponent):
    """The formula of xLSTM: -(-5 + 12 (k / (D - 1))^(0.3 + 1.3 l / (L - 1))) for unit k of a head in block l of L."""
    module = recurrence(bias_init="powerlaw", block_index=block_index, num_blocks=num_blocks)
    i, f, z, o = module.b.detach()
    expected = torch.tensor([5 - 12 * (k / 63) ** exponent for k in range(64)])
    torch.testing.assert_close(f, expected.expand(4, 64))
    assert not torch.stack([i, z, o]).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recurrent_init": "xavier"}, "recurrent_init .* standard, zeros, .*'xavier'"),
        ({"bias_init": "ones"}, "bias_init .* standard, zeros, powerlaw, .*'ones'"),
        ({"bias_init": "powerlaw", "function": "gru"}, "'powerlaw' .*'gru'"),
    ],
)
def test_unknown_or_unsuitable_initialisation_is_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        FlashRNN(3, 4, **options)
