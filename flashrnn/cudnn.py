"""LSTMs and GRUs on a GPU by cuDNN, as nn.LSTM and nn.GRU run, for sizes where cuDNN is faster.

- In float32, the weights of a narrow layer fit into one multiprocessor as they are, and cuDNN has a kernel for that. Ours
  computes six products of bfloat16 splits for each product of these sizes, with TF32 three.
- Otherwise cuDNN runs one matrix product per time step, which takes at least 8 µs. Where the product is large enough to
  hide that, it reaches more of the tensor cores' speed than kernels that keep R on the chip.
"""

import logging
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flashrnn import flat_weights
from flashrnn._torch_private import autograd_alone, cudnn_rnn
from flashrnn.cells import GRU, LSTM, Cell
from flashrnn.eager import as_dtype
from flashrnn.gpu import Gpu, nvidia_gpu
from flashrnn.problem import PLAIN, dtype_name, state_dtype, tf32_allowed
from flashrnn.stepping import without_hooks
from flashrnn.torch_networks import initial_states

logger = logging.getLogger("flashrnn")

_MODES = {LSTM: 2, GRU: 3}  # cudnnRNNMode_t


class UpTo(NamedTuple):
    """The largest problem of a range of sizes for which cuDNN's kernel for narrow layers is faster."""

    size: int  # units of a layer
    batch: int
    steps: int  # the fewest: cuDNN's calls have a longer start


class From(NamedTuple):
    """The smallest problem of a range of sizes for which cuDNN's products are faster."""

    size: int
    work: int  # sequences times units², the multiplications by one gate's matrix in a step
    batch: int = 32  # with fewer sequences, reading R from memory takes most of the time, and `cuda` reads it faster


_NARROW = {
    ("float32", LSTM, False): UpTo(96, 256, 32),
    ("float32", LSTM, True): UpTo(64, 64, 128),
    ("float32", GRU, False): UpTo(128, 128, 32),
    ("float32", GRU, True): UpTo(64, 16, 128),
    ("tf32", LSTM, False): UpTo(64, 128, 64),
}
_WIDE = {
    ("half", LSTM, False): (From(1024, 2**28), From(512, 2**30)),
    ("half", LSTM, True): (From(1024, 2**28),),
    ("half", GRU, False): (From(1024, 2**29, 64),),
    ("half", GRU, True): (From(1024, 2**29, 64),),
    ("tf32", LSTM, False): (From(256, 2**27),),
    ("tf32", LSTM, True): (From(512, 2**28),),
    ("tf32", GRU, False): (From(256, 2**28, 64),),
    ("tf32", GRU, True): (From(1024, 2**28, 64),),
    ("float32", LSTM, False): (From(512, 2**28), From(256, 2**29)),
    ("float32", LSTM, True): (From(512, 2**28),),
    ("float32", GRU, False): (From(512, 2**28),),
    ("float32", GRU, True): (From(512, 2**29),),
}
"""By precision, cell and whether there is a backward pass, measured on H100s with cuDNN 9.19 (docs/backends.md)."""
_WIDEST = max(narrow.size for narrow in _NARROW.values())
_LEAST = min(start.work for ranges in _WIDE.values() for start in ranges)


@cache
def fewest_steps(
    cell: Cell, size: int, batch: int, dtype: torch.dtype, tf32: bool, training: bool, gpu: Gpu | None
) -> int | None:
    """Return from how many time steps on cuDNN is faster for layers of `size` units in one head; None if it never is.

    It logs the first time that cuDNN is faster. The answer is None on GPUs of other generations than Hopper, where it
    has not been measured.
    """
    if gpu is None or gpu.capability != (9, 0) or dtype == torch.float64:
        return None
    what = "tf32" if tf32 else "half" if dtype.itemsize == 2 else "float32", cell, training
    narrow = _NARROW.get(what)
    if narrow and size <= narrow.size and batch <= narrow.batch:
        steps = narrow.steps
    elif any(
        size >= wide.size and batch >= wide.batch and batch * size**2 >= wide.work for wide in _WIDE.get(what, ())
    ):
        steps = 1
    else:
        return None
    precision = dtype_name(dtype) + (" with TF32" if tf32 else "")
    logger.info("%s, %d units, %d sequences, %s: by cuDNN, which is faster", cell.name, size, batch, precision)
    return steps


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
    (batch, steps), training = x.shape[:2] if network.batch_first else x.shape[1::-1], torch.is_grad_enabled()
    fewest = _fewest_steps(network, batch, x.dtype, training)
    if fewest is None or steps < fewest or not x.numel() or not _may_run(x):
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
        [weight for name in network.directions() for weight in _weights(network, name, training)],
        flat_weights.of(network),
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


def _weights(network: nn.Module, name: str, training: bool) -> list[Tensor]:
    """Return what receives the gradients of PyTorch's weights of one layer and direction; cuDNN does not read it."""
    W, R, b = flat_weights.parameters(network, name)
    if network.cell is GRU and training:
        return [W, *(_OfGru.apply(R) if b is None else _OfGru.apply(R, b))]
    return [W, R.flatten(0, 2)] if b is None else [W, R.flatten(0, 2), b.flatten(), b.detach().flatten()]


class _OfGru(torch.autograd.Function):
    """R [3, 1, D, D] and b [4, 1, D] of a GRU in the shapes of PyTorch's weights, whose gradients are in its order."""

    @staticmethod
    def forward(ctx, R, b=None):
        matrix = R.flatten(0, 2)
        return (matrix,) if b is None else (matrix, b[1:].flatten(), b[:3].flatten())

    @staticmethod
    def backward(ctx, d_matrix, *d_biases):
        size = d_matrix.shape[1]
        d_R = d_matrix.view(3, 1, size, size).roll(1, 0)  # ours: g, r, z
        if not d_biases:
            return d_R
        of_input, of_h = d_biases
        return d_R, torch.cat([of_h[2 * size :], of_input]).view(4, 1, size)


def explain(network: nn.Module, batch: int, dtype: torch.dtype, training: bool) -> str:
    """Return the line that `FlashRNN.explain` adds where cuDNN runs the call."""
    if network.recurrent_l0.backend != "auto":
        return ""
    fewest = _fewest_steps(network, batch, dtype, training)
    if fewest is None:
        return ""
    length = f" of at least {fewest} steps" if fewest > 1 else ""
    return f"\ninstead, cuDNN runs batches of whole sequences{length}: it is faster at this size"


def _fewest_steps(network: nn.Module, batch: int, dtype: torch.dtype, training: bool) -> int | None:
    size = network.hidden_size
    if size > _WIDEST and batch * size**2 < _LEAST:  # the check that takes the least time
        return None
    cell, device = network.cell, network.recurrent_l0.R.device
    if cell not in _MODES or network.num_heads != 1 or network.proj_size or (gpu := nvidia_gpu(device)) is None:
        return None
    return fewest_steps(cell, size, batch, dtype, tf32_allowed(dtype, device), training, gpu)


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
    weights = flat_weights.parameters(network, name)
    return all(w is None or (type(w) in PLAIN and (w.dtype, w.device) == (x.dtype, x.device)) for w in weights)
