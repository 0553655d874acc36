"""LSTMs and GRUs run by oneDNN on the CPU, as in nn.LSTM and nn.GRU, where oneDNN is at least as fast.

In float32, oneDNN and `cpu_fused` both come close to the peak of a processor with AVX-512. If R does not fit in the
caches and the batch is small, `cpu_fused` reads R faster, and for a single sequence it has less overhead. Without
AVX-512 it is also faster if the gradients of R and W stay in the caches. In bfloat16, oneDNN uses matrix instructions
that `cpu_fused` does not have. For a GRU, PyTorch calls oneDNN only for the products and runs the rest of a step as
several operators.
"""

from functools import cache

import torch
from torch import Tensor, nn

from flashrnn._torch_private import autograd_alone, onednn_computes
from flashrnn.cells import GRU, LSTM
from flashrnn.cpu.backend import CpuFused
from flashrnn.cpu.call import LARGEST_IN_LOOP
from flashrnn.cpu.registers import registers
from flashrnn.cpu_layer import is_plain
from flashrnn.dispatch import choose
from flashrnn.eager import as_dtype
from flashrnn.layer_weights import weights_of
from flashrnn.problem import Problem, state_dtype
from flashrnn.torch_networks import in_order, initial_states

_DTYPES = (torch.float32, torch.bfloat16)
_GRU_WORK = 2**21  # from this number of sequences times units², nn.GRU is faster in bfloat16
_FEW, _WIDE, _WIDE_EACH = 4, 512, 160  # sequences, units, units for each sequence: then `cpu_fused` is faster for LSTMs
_FEW_IN_AVX2 = 8  # sequences of at least _WIDE units, for which it is faster in AVX2


def run(network: nn.Module, x: Tensor, states) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor]] | None:
    """Run a FlashRNN on a batch of sequences with oneDNN.

    Args:
        network: a FlashRNN.
        x: [T, B, features], or [B, T, features] if the network is batch_first.
        states: the caller's initial states.

    Returns:
        The results of `FlashRNN.forward`. None if oneDNN does not support the call or is not faster, if another backend
        is named, and if an argument is wrong, which the caller then reports.
    """
    if not is_plain(x, x.dtype) or network.num_heads != 1 or network.proj_size or x.dtype not in _DTYPES:
        return None
    # `autograd_alone` first: torch.compile, where it falls back, would compile what `_is_faster` calls.
    if not (autograd_alone() and _is_faster(network, x) and x.numel()):
        return None
    if torch.is_autocast_enabled("cpu") or (layers := _layers(network, x)) is None:
        return None
    if (initial := initial_states(network, x, states)) is None:
        return None
    lstm = network.cell is LSTM
    out, *last = (torch.lstm if lstm else torch.gru)(
        x,
        initial if lstm else initial[0],
        [weight for layer in layers for weight in in_order(*layer, not lstm)],
        network.bias,
        network.num_layers,
        network.dropout,
        network.training,
        network.bidirectional,
        network.batch_first,
    )
    last = [as_dtype(state, state_dtype(x.dtype)) for state in last]
    return out, tuple(last) if lstm else last[0]


def _is_faster(network: nn.Module, x: Tensor) -> bool:
    """Return whether oneDNN is faster for a batch of sequences x, according to measurements (docs/backends.md)."""
    B, T = x.shape[:2] if network.batch_first else x.shape[1::-1]
    if not onednn_computes(x.dtype):
        return False
    if network.cell is LSTM:
        return x.dtype != torch.float32 or not _is_for_cpu_fused(B, network.hidden_size, network.bidirectional)
    if network.cell is not GRU or x.dtype != torch.bfloat16:
        return False
    return T == 1 or B * network.hidden_size**2 >= _GRU_WORK


def _is_for_cpu_fused(batch: int, size: int, bidirectional: bool) -> bool:
    """Return whether `cpu_fused` is faster for an LSTM in float32, and runs it."""
    if not _runs_by_cpu_fused(size):
        return False
    if batch <= _FEW and size >= max(_WIDE, _WIDE_EACH * batch):
        return True
    if bidirectional:
        return False
    in_avx2 = size <= LARGEST_IN_LOOP or (batch <= _FEW_IN_AVX2 and size >= _WIDE)
    return batch == 1 or (in_avx2 and not _has_avx512())  # with one sequence it has less overhead


@cache
def _runs_by_cpu_fused(size: int) -> bool:
    """Return whether "auto" selects `cpu_fused` for a float32 LSTM of this size; numba may be missing."""
    problem = Problem(LSTM, 1, size, torch.float32, torch.device("cpu"), training=True, reset=False)
    return choose("auto", problem).name == CpuFused.name


def _has_avx512() -> bool:
    return registers().bytes == 64


def _layers(network: nn.Module, x: Tensor) -> list[tuple[Tensor, Tensor, Tensor | None]] | None:
    """Return W, R and b of each layer and direction; None if they are not plain tensors or do not fit x."""
    found, modules = [], network._modules
    for name in network.directions():
        product, recurrent = modules[f"input_{name}"], modules[f"recurrent_{name}"]
        if recurrent.backend != "auto" or (weights := weights_of(product, recurrent, x.dtype, x.device)) is None:
            return None
        found.append(weights)
    return found if x.shape[-1] == network.input_size else None
