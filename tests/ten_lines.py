"""The README's cell, forward and backward on the CPU, in an environment with only the wheel."""

import importlib.util
import sys

import torch

import flashrnn


def step(i, f, z, o, h, c):
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(z)
    return torch.sigmoid(o) * torch.tanh(c), c


assert importlib.util.find_spec("flashrnn").origin.startswith(sys.prefix), "not the installed package"
flashrnn.register(flashrnn.Cell("my_lstm", step, states=("h", "c")))
torch.manual_seed(0)
rnn = flashrnn.FlashRNN(64, 64, num_heads=2, function="my_lstm", batch_first=True)
builtin = flashrnn.FlashRNN(64, 64, num_heads=2, function="lstm", batch_first=True)
builtin.load_state_dict(rnn.state_dict())
x = torch.randn(8, 100, 64)
out, states = rnn(x)
out.sum().backward()
torch.testing.assert_close(out, builtin(x)[0])
assert all(weight.grad.isfinite().all() for weight in rnn.parameters())
