"""The built-in cells."""

import torch
from torch.nn.functional import logsigmoid

from flashrnn.cells.definition import Cell
from flashrnn.cells.reductions import layer_norm
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
    larger = (n == 0) | (rise > 0)  # n is 0 only before the first step, where only i counts
    new_m = torch.where(larger, i, old_m)
    smaller = torch.exp(-torch.abs(rise))  # the smaller of exp(i - new_m) and exp(old_m - new_m); the larger is 1
    i, f = torch.where(larger, 1.0, smaller), torch.where(larger, smaller, 1.0)
    c = f * c + i * torch.tanh(z)
    n = torch.clamp(f * n + i, min=1)
    return torch.sigmoid(o) * c / n, c, n, new_m


def _layernorm_lstm(
    x_i, x_f, x_z, x_o, r_i, r_f, r_z, r_o, i, f, z, o,
    x_i_gain, x_f_gain, x_z_gain, x_o_gain, r_i_gain, r_f_gain, r_z_gain, r_o_gain, c_gain, c_bias, h, c,
):  # fmt: skip
    """Layer Normalization (arXiv 1607.06450, appendix), as in Haste's LayerNormLSTM.

    It has one norm over the input parts of all gates, one over their recurrent parts, and one over c. Gains are stored
    as differences from 1.
    """
    x_i, x_f, x_z, x_o = layer_norm(x_i, x_f, x_z, x_o)
    r_i, r_f, r_z, r_o = layer_norm(r_i, r_f, r_z, r_o)
    i = torch.sigmoid((1 + x_i_gain) * x_i + (1 + r_i_gain) * r_i + i)
    f = torch.sigmoid((1 + x_f_gain) * x_f + (1 + r_f_gain) * r_f + f)
    z = torch.tanh((1 + x_z_gain) * x_z + (1 + r_z_gain) * r_z + z)
    o = torch.sigmoid((1 + x_o_gain) * x_o + (1 + r_o_gain) * r_o + o)
    c = f * c + i * z
    return o * torch.tanh((1 + c_gain) * layer_norm(c) + c_bias), c


def _layernorm_gru(r, c, z, r_gain, c_gain, z_gain, r_bias, c_bias, z_bias, h):
    """The GRU of DreamerV2 (arXiv 2010.02193), with one norm over all gates.

    r is applied inside the tanh of the candidate c, and the update gate z starts closed. Gains are stored as
    differences from 1.
    """
    r, c, z = layer_norm(r, c, z, eps=1e-3)
    r = torch.sigmoid((1 + r_gain) * r + r_bias)
    c = torch.tanh(r * ((1 + c_gain) * c + c_bias))
    z = torch.sigmoid((1 + z_gain) * z + z_bias - 1)
    return z * c + (1 - z) * h


ELMAN = register_built_in(Cell("elman", _elman, states=("h",)))
ELMAN_RELU = register_built_in(Cell("elman_relu", _elman_relu, states=("h",)))
GRU = register_built_in(Cell("gru", _gru, states=("h",), input_gates=("r", "z", "n"), recurrent_gates=("g", "r", "z")))
LSTM = register_built_in(Cell("lstm", _lstm, states=("h", "c"), float16_states=True))
SLSTM = register_built_in(Cell("slstm", _slstm, states=("h", "c", "n", "m"), float16_states=True))

_LSTM_GATES = tuple("ifzo")
LAYERNORM_LSTM = register_built_in(
    Cell(
        "layernorm_lstm",
        _layernorm_lstm,
        states=("h", "c"),
        input_gates=tuple(f"x_{gate}" for gate in _LSTM_GATES),
        recurrent_gates=tuple(f"r_{gate}" for gate in _LSTM_GATES),
    )
)
LAYERNORM_GRU = register_built_in(
    Cell("layernorm_gru", _layernorm_gru, states=("h",), input_gates=tuple("rcz"), recurrent_gates=tuple("rcz"))
)
