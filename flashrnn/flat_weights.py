"""The weights of an LSTM or GRU in one contiguous buffer, as cuDNN reads them.

cuDNN needs the matrices of all layers and directions, followed by all biases, two for each. An LSTM's parameters can be
views of such a buffer, like those of nn.LSTM. Otherwise, every call makes a copy.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flashrnn.cells import GRU, LSTM
from flashrnn.cuda.zeros import read_only_zeros

_DEVICE = "cuda"


def parameters(network: nn.Module, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return W, R and b of one layer and direction of a FlashRNN."""
    recurrent = network._modules[f"recurrent_{name}"]
    return network._modules[f"input_{name}"].weight, recurrent.R, recurrent.b


@torch.no_grad()
def of(network: nn.Module) -> Tensor:
    """Return the weights in one buffer: the memory of the parameters themselves after `flatten`, or a copy."""
    if network.cell is LSTM and _are_flat(network):
        W, *_ = parameters(network, "l0")
        return W.as_strided((_layout_of(network).size,), (1,))
    return _copy(network)


@torch.no_grad()
def flatten(network: nn.Module) -> None:
    """Make the parameters of an LSTM with one head on a GPU views of one buffer, if they are not yet.

    Other networks stay as they are, and so do parameters that are shared or not plain tensors of one dtype.
    """
    if network.cell is not LSTM or network.num_heads != 1 or network.proj_size:
        return
    found = _all(network)
    if any(type(w) is not nn.Parameter or w.device.type != _DEVICE or w.dtype != found[0].dtype for w in found):
        return
    if len(set(map(id, found))) < len(found) or _are_flat(network):
        return
    flat = _copy(network)
    for w, place in zip(found, _layout_of(network).places, strict=True):
        w.data = flat[place : place + w.numel()].view(w.shape)


def _all(network: nn.Module) -> list[Tensor]:
    return [w for name in network.directions() for w in parameters(network, name) if w is not None]


def _copy(network: nn.Module) -> Tensor:
    matrices, biases = [], []
    for name in network.directions():
        W, R, b = parameters(network, name)
        size = R.shape[2]
        if network.cell is GRU:  # ours: g, r, z
            matrices += [W, R[1:], R[:1]]
            biases += [read_only_zeros(R, 6 * size)] if b is None else [b[1:], read_only_zeros(b, 2 * size), b[:1]]
        else:
            matrices += [W, R]
            biases += [read_only_zeros(R, 8 * size)] if b is None else [b, read_only_zeros(b, 4 * size)]
    return torch.cat([part.flatten() for part in (*matrices, *biases)])


def _are_flat(network: nn.Module) -> bool:
    """Return whether the parameters are views of one buffer. Only `flatten` creates buffers of this size."""
    found, layout = _all(network), _layout_of(network)
    start, itemsize = found[0].data_ptr(), found[0].itemsize
    storage = found[0].untyped_storage()
    if (storage.data_ptr(), storage.nbytes()) != (start, layout.size * itemsize):
        return False
    return all(w.data_ptr() == start + place * itemsize for w, place in zip(found, layout.places, strict=True))


class _Layout(NamedTuple):
    places: tuple[int, ...]  # of W, R and b of each layer and direction
    size: int


def _layout_of(network: nn.Module) -> _Layout:
    ways = 1 + network.bidirectional
    return _layout(network.input_size, network.hidden_size, network.num_layers, ways, network.bias)


@lru_cache(maxsize=256)
def _layout(features: int, size: int, layers: int, ways: int, bias: bool) -> _Layout:
    inputs = [features] * ways + [size * ways] * (layers - 1) * ways
    biases = 4 * size * sum(of_input + size for of_input in inputs)
    places, start = [], 0
    for number, of_input in enumerate(inputs):
        places += [start, start + 4 * size * of_input] + [biases + 8 * size * number] * bias
        start += 4 * size * (of_input + size)
    return _Layout(tuple(places), biases + 8 * size * len(inputs))
