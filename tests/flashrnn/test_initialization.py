import pytest
import torch

from flashrnn import FlashRNN, Recurrence


def recurrence(function="slstm", **options) -> Recurrence:
    torch.manual_seed(0)
    return Recurrence(256, num_heads=4, function=function, **options)


def test_standard_is_uniform_in_one_over_the_root_of_the_head_size():
    module = recurrence(recurrent_init="standard", bias_init="standard")
    for parameter in (module.R, module.b):
        assert 0.12 < parameter.abs().max() <= 1 / 8
        assert abs(parameter.mean()) < 0.01


def test_zeros():
    module = recurrence(recurrent_init="zeros", bias_init="zeros")
    assert not module.R.any()
    assert not module.b.any()


@pytest.mark.parametrize(
    ("block_index", "num_blocks", "exponent"), [(0, 1, 0.3), (0, 3, 0.3), (1, 3, 0.95), (2, 3, 1.6)]
)
def test_powerlaw_of_the_forget_gate(block_index, num_blocks, exponent):
    """xLSTM: -(-5 + 12 (k / (D - 1))^(0.3 + 1.3 l / (L - 1))) for unit k of a head in block l of L."""
    module = recurrence(bias_init="powerlaw", block_index=block_index, num_blocks=num_blocks)
    i, f, z, o = module.b.detach()
    expected = torch.tensor([5 - 12 * (k / 63) ** exponent for k in range(64)])
    torch.testing.assert_close(f, expected.expand(4, 64))
    assert not torch.stack([i, z, o]).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recurrent_init": "xavier"}, "recurrent_init must be one of standard, zeros, got 'xavier'"),
        ({"bias_init": "ones"}, "bias_init must be one of standard, zeros, powerlaw, got 'ones'"),
        ({"bias_init": "powerlaw", "function": "gru"}, "for cells with a forget gate f; 'gru' has "),
    ],
)
def test_unknown_or_unfit_initialisation(options, message):
    with pytest.raises(ValueError, match=message):
        FlashRNN(3, 4, **options)
