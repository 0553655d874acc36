"""All that PyTorch's own tests try with nn.LSTM, nn.GRU and nn.RNN, through `FlashRNN.from_torch`."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from flashrnn import FlashRNN
from tests.flashrnn.networks import results
from tests.tolerances import assert_close

with pytest.MonkeyPatch.context() as patch:  # or the import would keep other tests from setting PyTorch's flags
    patch.setattr(torch.backends, "disable_global_flags", lambda: None)
    from torch.testing._internal.common_modules import module_db

NETWORKS = [info for info in module_db if info.module_cls in (nn.LSTM, nn.GRU, nn.RNN)]
DTYPES = (torch.float32, torch.float64)


def samples(info, dtype, training=True):
    options = {"device": "cpu", "dtype": dtype, "requires_grad": True, "training": training}
    torch.manual_seed(0)
    return info.module_inputs_func(info, **options)


def double(x):
    if isinstance(x, tuple) and not isinstance(x, PackedSequence):
        return tuple(map(double, x))
    return x.to(torch.float64)


CASES = [
    pytest.param(info, dtype, training, number, id=f"{info.name}-{str(dtype)[6:]}-{mode}-{number}")
    for info in NETWORKS
    for dtype in DTYPES
    for mode, training in (("train", True), ("eval", False))
    for number in range(len(samples(info, dtype)))
]


def test_there_are_as_many_samples_as_when_this_was_written():
    assert len(NETWORKS) == 3
    assert len(CASES) >= 320


@pytest.mark.parametrize(("info", "dtype", "training", "number"), CASES)
def test_values_and_gradients_agree(info, dtype, training, number):
    sample = samples(info, dtype, training)[number]
    options, (x, *states) = sample.constructor_input.kwargs, sample.forward_input.args
    torch.manual_seed(1)
    module = info.module_cls(**options, dtype=dtype).train(training)
    ours = results(FlashRNN.from_torch(module), x, *states)
    peers = results(module, x, *states)
    references = results(module.to(torch.float64), double(x), *map(double, states))
    assert_close(ours, references, dtype, peers)
