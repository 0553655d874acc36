"""The samples in PyTorch's own tests of nn.LSTM, nn.GRU and nn.RNN, run by `FlashRNN.from_torch`."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from flashrnn import FlashRNN
from tests.flashrnn.networks import results
from tests.tolerances import assert_close

NETWORKS = {nn.LSTM: 32, nn.GRU: 16, nn.RNN: 32}  # smallest number of samples


@pytest.fixture(scope="module")
def samples():
    """Return a function that returns PyTorch's samples for a network, dtype and training mode."""
    with pytest.MonkeyPatch.context() as patch:  # otherwise, other tests could not set PyTorch's flags
        patch.setattr(torch.backends, "disable_global_flags", lambda: None)
        from torch.testing._internal.common_modules import module_db  # takes a second

    def of(network, dtype, training):
        (info,) = (info for info in module_db if info.module_cls is network)
        torch.manual_seed(0)
        return info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)

    return of


def double(x):
    if isinstance(x, tuple) and not isinstance(x, PackedSequence):
        return tuple(map(double, x))
    return x.to(torch.float64)


@pytest.mark.parametrize(("dtype", "training"), [(torch.float32, True), (torch.float64, False)], ids=str)
@pytest.mark.parametrize("network", NETWORKS)
def test_values_and_gradients_agree(samples, network, dtype, training):
    found = samples(network, dtype, training)
    assert len(found) >= NETWORKS[network]
    for sample in found:
        options, (x, *states) = sample.constructor_input.kwargs, sample.forward_input.args
        torch.manual_seed(1)
        module = network(**options, dtype=dtype).train(training)
        ours = results(FlashRNN.from_torch(module), x, *states)
        peers = results(module, x, *states)
        references = results(module.to(torch.float64), double(x), *map(double, states))
        try:
            assert_close(ours, references, dtype, peers)
        except AssertionError as error:
            raise AssertionError(f"{options}, x {type(x).__name__}, states {bool(states)}: {error}") from error
