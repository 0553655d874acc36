"""The cells that every program has."""

import torch
from torch.nn.functional import logsigmoid

from flashrnn.cells.definition import Cell
from flashrnn.cells.registry import register_built_in


def _elman(g, h):
    return torch.tanh(g)


def _elman_relu(g, h):
    return torch.relu(g)


def _gru(g, r, z, n, h):
    r, z = torch.sigmoid(r), torch.sigmoid(z)
    return z * h + (1 - z) * torch.tanh(n + r * g)


def _lstm(i, f, z, o, h, c):
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(z)
    return torch.sigmoid(o) * torch.tanh(c), c


def _slstm(i, f, z, o, h, c, n, m):
    """xLSTM (arXiv 2405.04517), eq. 8-17 with exponential input gate; m keeps the exponentials in range."""
    old_m = logsigmoid(f) + m
    rise = i - old_m
    larger = (n == 0) | (rise > 0)  # n is 0 only before the first step, where i is all there is
    new_m = torch.where(larger, i, old_m)
    smaller = torch.exp(-torch.abs(rise))  # of exp(i - new_m) and exp(old_m - new_m), one is 1
    i, f = torch.where(larger, 1.0, smaller), torch.where(larger, smaller, 1.0)
    c = f * c + i * torch.tanh(z)
    n = torch.clamp(f * n + i, min=1)
    return torch.sigmoid(o) * c / n, c, n, new_m


ELMAN = register_built_in(Cell("elman", _elman, states=("h",)))
ELMAN_RELU = register_built_in(Cell("elman_relu", _elman_relu, states=("h",)))
GRU = register_built_in(Cell("gru", _gru, states=("h",), input_gates=("r", "z", "n"), recurrent_gates=("g", "r", "z")))
LSTM = register_built_in(Cell("lstm", _lstm, states=("h", "c"), float16_states=True))
SLSTM = register_built_in(Cell("slstm", _slstm, states=("h", "c", "n", "m"), float16_states=True))
