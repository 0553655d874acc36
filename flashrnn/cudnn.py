"""LSTMs and GRUs on a GPU by cuDNN, as nn.LSTM and nn.GRU run, for sizes where cuDNN is faster.

cuDNN runs one matrix product per time step, which takes at least 8 µs. Where the product is large enough to hide that,
it reaches more of the tensor cores' speed than kernels that keep R on the chip.
"""

import logging
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flashrnn._torch_private import autograd_alone, cudnn_rnn
from flashrnn.cells import GRU, LSTM, Cell
from flashrnn.eager import as_dtype
from flashrnn.gpu import Gpu, nvidia_gpu
from flashrnn.problem import PLAIN, dtype_name, state_dtype, tf32_allowed
from flashrnn.stepping import without_hooks
from flashrnn.torch_networks import initial_states, weights_of

logger = logging.getLogger("flashrnn")

_MODES = {LSTM: 2, GRU: 3}  # cudnnRNNMode_t


class From(NamedTuple):
    """The smallest problem of a range of sizes for which cuDNN is faster."""

    size: int  # units of a layer
    work: int  # sequences times units², the multiplications by one gate's matrix in a step


_FASTER = {
    ("half", LSTM, False): (From(1024, 2**28), From(512, 2**30)),
    ("half", LSTM, True): (From(1024, 2**28),),
    ("half", GRU, False): (From(1024, 2**29),),
    ("half", GRU, True): (From(1024, 2**29),),
    ("tf32", LSTM, False): (From(512, 2**28), From(256, 2**29)),
    ("tf32", LSTM, True): (From(512, 2**28),),
    ("tf32", GRU, False): (From(512, 2**28),),
    ("tf32", GRU, True): (From(1024, 2**28),),
}
"""By precision, cell and whether there is a backward pass, measured on an H100 with cuDNN 9.19 (docs/backends.md).
cuDNN is never faster in float32 without TF32."""
_LEAST = min(start.work for ranges in _FASTER.values() for start in ranges)


@cache
def is_faster(
    cell: Cell, size: int, batch: int, dtype: torch.dtype, tf32: bool, training: bool, gpu: Gpu | None
) -> bool:
    """Return whether cuDNN is faster for layers of `size` units in one head, and log the first time that it is.

    The answer is no on GPUs of other generations than Hopper, where it has not been measured.
    """
    precision = "tf32" if tf32 else "half" if dtype in (torch.float16, torch.bfloat16) else None
    if gpu is None or gpu.capability != (9, 0):
        return False
    ranges = _FASTER.get((precision, cell, training), ())
    if not any(size >= start.size and batch * size**2 >= start.work for start in ranges):
        return False
    what = dtype_name(dtype) + (" with TF32" if tf32 else "")
    logger.info("%s, %d units, %d sequences, %s: by cuDNN, which is faster", cell.name, size, batch, what)
    return True


def run(network: nn.Module, x: Tensor, states) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor]] | None:
    """Run a FlashRNN on a batch of sequences by cuDNN.

    Args:
        network: a FlashRNN.
        x: [T, B, features], or [B, T, features] if the network is batch_first.
        states: the caller's initial states.

    Returns:
        The results of `FlashRNN.forward`. None if cuDNN does not serve the call or is not faster, and if an argument
        is wrong: the caller finds the error.
    """
    if type(x) not in PLAIN or torch.compiler.is_compiling():  # sizes may be symbols
        return None
    batch, training = x.shape[0 if network.batch_first else 1], torch.is_grad_enabled()
    if not _is_faster(network, batch, x.dtype, training) or not x.numel() or not _may_run(x):
        return None
    if x.shape[-1] != network.input_size or not all(_serves(network, name, x) for name in network.directions()):
        return None
    if network.num_layers > 1 and network.training and network.dropout:
        return None
    if (initial := initial_states(network, x, states)) is None:
        return None
    done = cudnn_rnn(
        _MODES[network.cell],
        x,
        [weight for name in network.directions() for weight, _ in weights_of(network, name).values()],
        initial,
        hidden_size=network.hidden_size,
        num_layers=network.num_layers,
        batch_first=network.batch_first,
        bidirectional=network.bidirectional,
        training=training,
    )
    if done is None:
        return None
    out, *last = done
    last = tuple(as_dtype(state, state_dtype(x.dtype)) for state in last[: len(network.cell.states)])
    return out, last if len(last) > 1 else last[0]


def explain(network: nn.Module, batch: int, dtype: torch.dtype, training: bool) -> str:
    """Return the line that `FlashRNN.explain` adds where cuDNN runs the call."""
    if network.recurrent_l0.backend != "auto" or not _is_faster(network, batch, dtype, training):
        return ""
    return "\ninstead, cuDNN runs batches of whole sequences: it is faster at this size"


def _is_faster(network: nn.Module, batch: int, dtype: torch.dtype, training: bool) -> bool:
    if batch * network.hidden_size**2 < _LEAST:  # the check that takes the least time
        return False
    cell, device = network.cell, network.recurrent_l0.R.device
    if cell not in _MODES or network.num_heads != 1 or network.proj_size or (gpu := nvidia_gpu(device)) is None:
        return False
    return is_faster(cell, network.hidden_size, batch, dtype, tf32_allowed(dtype, device), training, gpu)


def _may_run(x: Tensor) -> bool:
    """Return whether PyTorch may use cuDNN, in the precision that the settings for matrix products allow."""
    backend = torch.backends.cudnn
    if not (backend.enabled and backend.is_available()):
        return False
    if not autograd_alone() or torch.are_deterministic_algorithms_enabled() or torch.is_autocast_enabled("cuda"):
        return False
    return x.dtype != torch.float32 or (backend.rnn.fp32_precision == "tf32") == tf32_allowed(x.dtype, x.device)


def _serves(network: nn.Module, name: str, x: Tensor) -> bool:
    product, recurrent = network._modules[f"input_{name}"], network._modules[f"recurrent_{name}"]
    if not without_hooks(product, recurrent) or recurrent.backend != "auto":
        return False
    weights = product.weight, recurrent.R, recurrent.b
    return all(w is None or (type(w) in PLAIN and (w.dtype, w.device) == (x.dtype, x.device)) for w in weights)
