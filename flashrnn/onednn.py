"""LSTMs on the CPU by nn.LSTM's own kernel, that of oneDNN.

It and `cpu_fused` compute with nearly all that a processor can, but oneDNN also computes the input products faster, and
in bfloat16 by instructions for it. Other cells have no such kernel: PyTorch calls several operators per time step.
"""

import torch
from torch import Tensor, nn

from flashrnn._torch_private import autograd_alone, onednn_computes
from flashrnn.cells import LSTM
from flashrnn.problem import state_dtype
from flashrnn.stepping import as_made, is_plain

_DTYPES = (torch.float32, torch.bfloat16)


def lstm(network: nn.Module, x: Tensor, states) -> tuple[Tensor, tuple[Tensor, Tensor]] | None:
    """Return what a FlashRNN returns for x, a batch of sequences; None where oneDNN does not serve it or is not asked
    for, or where an argument is wrong.

    Args:
        network: a FlashRNN.
        x: [T, B, features], or [B, T, features] if it is batch_first.
        states: of the caller.
    """
    if network.cell is not LSTM or network.num_heads != 1 or network.proj_size or x.dtype not in _DTYPES:
        return None
    if not (autograd_alone() and is_plain(x, x.dtype) and x.numel() and onednn_computes(x.dtype)):
        return None
    if torch.is_autocast_enabled("cpu") or (weights := _weights(network, x)) is None:
        return None
    directions = 1 + network.bidirectional
    size = network.num_layers * directions, x.shape[0 if network.batch_first else 1], network.hidden_size
    if states is None:
        states = (x.new_zeros(size),) * 2
    elif not _are_states(states, size):
        return None
    given = [state.to(x.dtype) for state in states]
    out, h, c = torch.lstm(
        x,
        given,
        weights,
        network.bias,
        network.num_layers,
        network.dropout,
        network.training,
        network.bidirectional,
        network.batch_first,
    )
    return out, (h.to(state_dtype(x.dtype)), c.to(state_dtype(x.dtype)))


def _weights(network: nn.Module, x: Tensor) -> list[Tensor] | None:
    """Return the weights in PyTorch's order, with zeros for its second biases."""
    weights, modules = [], network._modules
    zeros = x.new_zeros(4 * network.hidden_size) if network.bias else None
    for name in network.directions():
        product, recurrent = modules[f"input_{name}"], modules[f"recurrent_{name}"]
        if not as_made(product, recurrent, x.dtype) or recurrent.backend != "auto":
            return None
        weights += [product.weight, recurrent.R.flatten(0, 2)]
        weights += [recurrent.b.flatten(), zeros] if network.bias else []
    return weights if x.shape[-1] == network.input_size else None


def _are_states(states, size: tuple[int, ...]) -> bool:
    if not isinstance(states, tuple | list) or len(states) != 2:
        return False
    return all(
        isinstance(s, Tensor) and s.dtype in _DTYPES and is_plain(s, s.dtype) and s.shape == size for s in states
    )
