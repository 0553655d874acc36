"""LSTMs and GRUs run by cuDNN, as in nn.LSTM and nn.GRU, for sizes where cuDNN is faster.

- In float32, cuDNN has a kernel for narrow layers, whose weights fit into one multiprocessor. Ours computes three
  products of 16 bits there for each one.
- In float16, cuDNN has a kernel that keeps the weights of 1024 units on the chip. Ours exchanges h through L2 there.
- Otherwise cuDNN runs one matrix product per time step, which takes at least 8 µs. Where the product is large enough to
  hide that, it reaches more of the tensor cores' speed than kernels that keep R on the chip.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flashrnn import flat_weights
from flashrnn._torch_private import CudnnRnn, autograd_alone, copy_each, graph_is_retained
from flashrnn.cells import GRU, LSTM, Cell
from flashrnn.eager import as_dtype
from flashrnn.forking import lock_that_forks_wait_for
from flashrnn.gpu import Gpu, nvidia_gpu
from flashrnn.layer_weights import weights_of
from flashrnn.problem import PLAIN, dtype_name, state_dtype, tf32_allowed
from flashrnn.torch_networks import initial_states

logger = logging.getLogger("flashrnn")

_MODES = {LSTM: 2, GRU: 3}  # cudnnRNNMode_t


class UpTo(NamedTuple):
    """The largest problem of a range of sizes for which a kernel of cuDNN with the weights on the chip is faster."""

    size: int  # units of a layer
    batch: int
    steps: int  # the fewest: cuDNN's calls have a longer start
    least_size: int = 1
    least_batch: int = 1


class From(NamedTuple):
    """The smallest problem of a range of sizes for which cuDNN's products are faster."""

    size: int
    work: int  # sequences times units², the multiplications by one gate's matrix in a step
    batch: int = 32  # with fewer sequences, reading R from memory takes most of the time, and `cuda` reads it faster


_ON_CHIP = {
    ("float16", LSTM, False): (UpTo(1024, 16, 64, least_size=1024, least_batch=16),),
    ("float32", LSTM, False): (UpTo(64, 64, 32),),
    ("tf32", LSTM, False): (UpTo(64, 128, 64),),
}
_WIDE = {
    ("half", LSTM, False): (From(1024, 2**28), From(512, 2**30)),
    ("half", LSTM, True): (From(1024, 2**28),),
    ("half", GRU, False): (From(1024, 2**29, 64),),
    ("half", GRU, True): (From(1024, 2**29, 64),),
    ("tf32", LSTM, False): (From(256, 2**27, 64),),
    ("tf32", LSTM, True): (From(512, 2**28),),
    ("tf32", GRU, False): (From(256, 2**28, 64),),
    ("tf32", GRU, True): (From(1024, 2**28, 64),),
    ("float32", LSTM, False): (From(512, 2**28), From(256, 2**29)),
    ("float32", LSTM, True): (From(512, 2**28),),
    ("float32", GRU, False): (From(512, 2**28),),
    ("float32", GRU, True): (From(512, 2**29),),
}
"""By precision, cell and whether there is a backward pass, measured on H100s with cuDNN 9.19 (docs/backends.md)."""


@lru_cache(maxsize=4096)
def _may_be_faster(size: int, batch: int) -> bool:
    """Return whether cuDNN is faster in any precision."""
    if any(batch * size**2 >= start.work for ranges in _WIDE.values() for start in ranges):
        return True
    return any(end.least_size <= size <= end.size for ranges in _ON_CHIP.values() for end in ranges)


@cache
def fewest_steps(
    cell: Cell, size: int, batch: int, dtype: torch.dtype, tf32: bool, training: bool, gpu: Gpu | None
) -> int | None:
    """Return the number of time steps from which cuDNN is faster for a layer of `size` units in one head.

    Return None if it never is, and on GPUs other than Hopper, where this has not been measured. The first choice of
    cuDNN is logged.
    """
    if gpu is None or gpu.capability != (9, 0) or dtype == torch.float64:
        return None
    name = "tf32" if tf32 else dtype_name(dtype)
    found = []
    for end in _ON_CHIP.get((name, cell, training), ()):
        if end.least_size <= size <= end.size and end.least_batch <= batch <= end.batch:
            found.append(end.steps)
    for start in _WIDE.get(("half" if dtype.itemsize == 2 else name, cell, training), ()):
        if size >= start.size and batch >= start.batch and batch * size**2 >= start.work:
            found.append(1)
    if not found:
        return None
    precision = dtype_name(dtype) + (" with TF32" if tf32 else "")
    logger.info("%s, %d units, %d sequences, %s: by cuDNN, which is faster", cell.name, size, batch, precision)
    return min(found)


def run(network: nn.Module, x: Tensor, states) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor]] | None:
    """Run a FlashRNN on a batch of sequences with cuDNN.

    Args:
        network: a FlashRNN.
        x: [T, B, features], or [B, T, features] if the network is batch_first.
        states: the caller's initial states.

    Returns:
        The results of `FlashRNN.forward`. None if cuDNN does not support the call or is not faster, and if an argument
        is wrong, which the caller then reports.
    """
    if type(x) not in PLAIN:
        return None
    (batch, steps), training = x.shape[:2] if network.batch_first else x.shape[1::-1], torch.is_grad_enabled()
    fewest = _fewest_steps(network, batch, x.dtype, training)
    if fewest is None or steps < fewest or not x.numel() or not _may_run():
        return None
    if x.shape[-1] != network.input_size or not all(_serves(network, name, x) for name in network.directions()):
        return None
    if network.num_layers > 1 and network.training and network.dropout:
        return None
    if (initial := initial_states(network, x, states)) is None:
        return None
    cudnn = CudnnRnn(
        _MODES[network.cell], network.hidden_size, network.num_layers, network.batch_first, network.bidirectional
    )
    weights = [w for name in network.directions() for w in flat_weights.parameters(network, name) if w is not None]
    given = cudnn, flat_weights.of(network), x, initial[0], initial[1] if len(initial) > 1 else None
    out, *last = _Rnn.apply(*given, *weights) if training else _run(*given, weights, training=False)[:-1]
    last = _in_state_dtype(last[: len(network.cell.states)], training)
    return out, last if len(last) > 1 else last[0]


def _in_state_dtype(states: Sequence[Tensor], training: bool) -> tuple[Tensor, ...]:
    dtype = state_dtype(states[0].dtype)
    if training or states[0].dtype == dtype:
        return tuple(as_dtype(state, dtype) for state in states)
    found = tuple(torch.empty_like(state, dtype=dtype) for state in states)
    copy_each(found, states)
    return found


def _run(cudnn: CudnnRnn, flat: Tensor, x: Tensor, h: Tensor, c: Tensor | None, weights, training: bool):
    with _precision_of_products(x):
        return cudnn.forward(x, _in_shapes_of_pytorch(weights, c is None), flat, h, c, training)


class _Rnn(torch.autograd.Function):
    """A network run by cuDNN. Its weights are W, R and, with biases, b of each layer and direction."""

    @staticmethod
    def forward(ctx, cudnn, flat, x, h, c, *weights):
        out, *last, reserve = _run(cudnn, flat, x, h, c, weights, training=True)
        ctx.save_for_backward(x, h, c, out, reserve, flat, *weights)
        ctx.set_materialize_grads(False)
        ctx.cudnn = cudnn
        return out, *last

    @staticmethod
    def backward(ctx, *gradients):
        x, h, c, out, reserve, flat, *weights = ctx.saved_tensors
        if graph_is_retained():  # copy it, because cuDNN overwrites it
            reserve = reserve.clone()
        gru, wanted = c is None, ctx.needs_input_grad
        with _precision_of_products(x):
            d_x, d_h, d_c, found = ctx.cudnn.backward(
                (x, h, c, out, reserve),
                _in_shapes_of_pytorch(weights, gru),
                flat,
                gradients,
                [*wanted[2:5], any(wanted[5:])],
            )
        d_weights = _gradients(weights, found, gru) if any(wanted[5:]) else [None] * len(weights)
        return None, None, d_x, d_h, d_c, *d_weights


def _in_shapes_of_pytorch(weights: Sequence[Tensor], gru: bool) -> list[Tensor]:
    """Return W, R and b as tensors with the shapes of PyTorch's weights; cuDNN does not read their values."""
    found = []
    for w in weights:
        if w.dim() == 3:  # b
            found += [w[1:].flatten(), w[:3].flatten()] if gru else [w.flatten()] * 2
        else:
            found.append(w.flatten(0, -2))
    return found


def _gradients(weights: Sequence[Tensor], found: Sequence[Tensor], gru: bool) -> Iterator[Tensor]:
    """Yield the gradients of W, R and b, given those of PyTorch's weights."""
    of_pytorch = iter(found)
    for w in weights:
        d = next(of_pytorch)
        if w.dim() == 3:
            d_of_h = next(of_pytorch)
            d = torch.cat([d_of_h[2 * w.shape[2] :], d]) if gru else d
        d = d.view(w.shape)
        yield d.roll(1, 0) if gru and w.dim() == 4 else d  # ours: g, r, z


_SETTING = torch.backends.cudnn.rnn  # cached, because the lookup takes as long as reading the setting
_CHANGING = lock_that_forks_wait_for()


@contextmanager
def _precision_of_products(x: Tensor) -> Iterator[None]:
    """A context in which cuDNN may use TF32 only if matrix products may; by default PyTorch allows it to cuDNN."""
    if x.dtype != torch.float32:
        yield
        return
    wanted = "tf32" if tf32_allowed(x.dtype, x.device) else "ieee"
    with _CHANGING:  # even if this call changes nothing, because another thread may just have changed the setting
        before = _SETTING.fp32_precision
        changes = (before == "tf32") != (wanted == "tf32")
        if changes:
            _SETTING.fp32_precision = wanted
        try:
            yield
        finally:
            if changes:
                _SETTING.fp32_precision = before


def explain(network: nn.Module, batch: int, dtype: torch.dtype, training: bool) -> str:
    """Return the line that `FlashRNN.explain` adds if cuDNN runs the call, otherwise an empty string."""
    if network.recurrent_l0.backend != "auto":
        return ""
    fewest = _fewest_steps(network, batch, dtype, training)
    if fewest is None:
        return ""
    length = f" of at least {fewest} steps" if fewest > 1 else ""
    return f"\ninstead, cuDNN runs batches of whole sequences{length}: it is faster at this size"


def _fewest_steps(network: nn.Module, batch: int, dtype: torch.dtype, training: bool) -> int | None:
    size = network.hidden_size
    if not _may_be_faster(size, batch):  # the check that takes the least time
        return None
    cell, device = network.cell, network.recurrent_l0.R.device
    if cell not in _MODES or network.num_heads != 1 or network.proj_size or (gpu := nvidia_gpu(device)) is None:
        return None
    return fewest_steps(cell, size, batch, dtype, tf32_allowed(dtype, device), training, gpu)


def _may_run() -> bool:
    """Return whether PyTorch's settings allow cuDNN."""
    if not (CudnnRnn.is_available() and torch.backends.cudnn.enabled and autograd_alone()):
        return False
    return not (torch.are_deterministic_algorithms_enabled() or torch.is_autocast_enabled("cuda"))


def _serves(network: nn.Module, name: str, x: Tensor) -> bool:
    product, recurrent = network._modules[f"input_{name}"], network._modules[f"recurrent_{name}"]
    return recurrent.backend == "auto" and weights_of(product, recurrent, x.dtype, x.device) is not None
