"""A FlashRNN without gradients on a GPU, as in a control loop: for each layer a matrix product and a launch.

For few steps, or one, the general way through a layer takes the host as long again as these two.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from flashrnn._torch_private import autograd_alone
from flashrnn.cells import Cell
from flashrnn.cuda.resident.backend import CudaFused, Forward
from flashrnn.dispatch import choose
from flashrnn.eager import apart
from flashrnn.eager_layer import last_states
from flashrnn.problem import PLAIN, KernelUnavailable, Problem, state_dtype, tf32_allowed
from flashrnn.stepping import without_hooks


def run(network: nn.Module, x: Tensor, states, reset: Tensor | None) -> tuple | None:
    """Run a FlashRNN on sequences or on one step, without gradients.

    Args:
        network: a FlashRNN.
        x: [T, B, features], or [B, T, features] if the network is batch_first, or of one step [B, features].
        states: the caller's initial states.
        reset: [B, T], or of one step [B], or None.

    Returns:
        The results of `FlashRNN.forward`, in the layout of x. None if this does not serve the call, and if an argument
        is wrong: the caller finds the error.
    """
    if torch.is_grad_enabled() or type(x) is not Tensor or not (x.is_cuda and x.is_contiguous() and x.numel()):
        return None
    if not autograd_alone() or torch.is_autocast_enabled("cuda") or network.bidirectional or network.proj_size:
        return None
    time_major = x.dim() == 3 and not network.batch_first
    T, B = x.shape[:2] if time_major else (1, len(x)) if x.dim() == 2 else x.shape[1::-1]
    if x.shape[-1] != network.input_size or not (reset is None or _is_mask(reset, x, B, T)):
        return None
    given = None if states is None else states if isinstance(states, tuple | list) else (states,)
    if given is not None and not _are_states(given, network, x, B):
        return None
    layers = [_layer(network, k, (B, T, time_major), x, reset is not None) for k in range(network.num_layers)]
    if None in layers:
        return None
    ends = []
    for k, (W, R, b, forward) in enumerate(layers):
        if k:
            x = nn.functional.dropout(x, network.dropout, network.training)
        Wx = nn.functional.linear(x, W)
        h = x.new_empty((*x.shape[:-1], network.hidden_size))
        last = x.new_empty((len(network.cell.states), 1, B, network.hidden_size), dtype=state_dtype(x.dtype))
        forward.launch(Wx, R, b, None if given is None else _initial(given, k), reset, h, None, last, None)
        x = h
        ends.append(apart(last))
    return x, last_states(ends)


def _is_mask(reset: Tensor, x: Tensor, batch: int, steps: int) -> bool:
    shape = (batch,) if x.dim() == 2 else (batch, steps)
    return type(reset) is Tensor and reset.dtype == torch.bool and reset.shape == shape and reset.device == x.device


def _are_states(states: Sequence[Tensor], network: nn.Module, x: Tensor, batch: int) -> bool:
    """Return whether these are states as `forward` returns them."""
    shape, dtype, device = (network.num_layers, batch, network.hidden_size), state_dtype(x.dtype), x.device
    if len(states) != len(network.cell.states):
        return False
    for s in states:
        if type(s) not in PLAIN or s.dtype != dtype or s.shape != shape or s.device != device or not s.is_contiguous():
            return False
    return True


def _initial(states: Sequence[Tensor], layer: int) -> Tensor | int:
    """Return the states of a layer as one tensor, or, if they already follow each other in memory, their address."""
    if len(states[0]) == 1:
        first, size = states[0].data_ptr(), states[0].nbytes
        if all([state.data_ptr() == first + i * size for i, state in enumerate(states)]):
            return first
    return torch.stack([state[layer] for state in states])


def _layer(
    network: nn.Module, k: int, sizes: tuple[int, int, bool], x: Tensor, reset: bool
) -> tuple[Tensor, Tensor, Tensor | None, Forward] | None:
    """Return the weights W, R and b of layer k, and its forward pass; None if it is not served."""
    product, recurrent = network._modules[f"input_l{k}"], network._modules[f"recurrent_l{k}"]
    if not without_hooks(product, recurrent):
        return None
    W, R, b = product._parameters["weight"], recurrent._parameters["R"], recurrent._parameters["b"]
    dtype, device = x.dtype, x.device
    for weight in (W, R) if b is None else (W, R, b):
        if type(weight) not in PLAIN or weight.dtype != dtype or weight.device != device:
            return None
    found = _forward(
        recurrent.cell,
        recurrent.backend,
        recurrent.num_heads,
        recurrent.head_dim,
        sizes,
        dtype,
        device,
        reset,
        b is not None,
        tf32_allowed(dtype, device),
    )
    return None if found is None else (W, R, b, found)


@lru_cache(maxsize=4096)
def _forward(
    cell: Cell,
    backend: str,
    heads: int,
    head_dim: int,
    sizes: tuple[int, int, bool],
    dtype: torch.dtype,
    device: torch.device,
    reset: bool,
    bias: bool,
    tf32: bool,
) -> Forward | None:
    """Return the forward pass of `sizes`: batch, steps, whether time-major. None if `cuda_fused` does not run it."""
    problem = Problem(cell, heads, head_dim, dtype, device, training=False, reset=reset, tf32=tf32)
    try:
        chosen = choose(backend, problem)
        if not isinstance(chosen, CudaFused):
            return None
        B, T, time_major = sizes
        gates = len(cell.input_gates), heads, head_dim
        Wx = torch.empty(T, B, *gates, dtype=dtype, device="meta").transpose(0, 1)
        Wx = Wx if time_major else torch.empty(B, T, *gates, dtype=dtype, device="meta")
        return chosen.forward_of(cell, Wx, device, reset, half_bias=bias and dtype.itemsize == 2)
    except (ValueError, KernelUnavailable):  # the general way reports it, or takes the next backend
        return None
