"""The layers of a FlashRNN run by backend `cuda_fused` at the same time, as one autograd function."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from flashrnn._torch_private import backward_is_observed
from flashrnn.cells import Cell
from flashrnn.cuda.resident.backend import CudaFused
from flashrnn.cuda.resident.calls import joined_states
from flashrnn.cuda.resident.layers import OverlappedLayers, overlapped_layers
from flashrnn.dispatch import choose, no_autocast
from flashrnn.eager import apart, recurrence_gradients, residual_of
from flashrnn.eager_layer import by_heads, product_gradients
from flashrnn.problem import KernelUnavailable, Problem, StateGradients, state_dtype


def run(
    network: nn.Module, layers: Sequence[tuple], sizes: tuple[int, int, bool], x: Tensor, given: Sequence | None
) -> tuple | None:
    """Run all layers of a FlashRNN.

    Args:
        network: the FlashRNN, whose layers have one direction.
        layers: for each layer its recurrence, the weights of its directions, and whether a backward pass follows.
        sizes: batch, steps and whether x is time-major.
        x: the input.
        given: the caller's states.

    Returns:
        The output and the last states. None if the layers are not supported, or if this is not faster.
    """
    recurrent, ((_, _, b),), training = layers[0]
    if x.dim() != 3 or (network.dropout and network.training):
        return None
    if {(one.backend, wanted) for one, _, wanted in layers} != {(recurrent.backend, training)}:
        return None
    shape = recurrent.cell, recurrent.backend, recurrent.num_heads, recurrent.head_dim, len(layers)
    found = _overlapped(*shape, sizes, x.dtype, x.device, b is not None and x.dtype.itemsize == 2, training)
    if found is None or _captured(x):
        return None
    weights = [of_layer for _, (of_layer,), _ in layers]
    if training:
        flat = [weight for of_layer in weights for weight in of_layer]
        x, *last = _Layers.apply(network.batch_first, recurrent, *found, len(given or ()), x, *(given or ()), *flat)
    else:
        results = found[1](x, weights, _initial_of_all(given or (), len(layers)), False)
        x, last = results[-1].h, apart(torch.cat([one.last for one in results], dim=1))
    return x, last[0] if len(last) == 1 else tuple(last)


@lru_cache(maxsize=4096)
def _overlapped(
    cell: Cell,
    backend: str,
    heads: int,
    head_dim: int,
    layers: int,
    sizes: tuple[int, int, bool],
    dtype: torch.dtype,
    device: torch.device,
    half_bias: bool,
    training: bool,
) -> tuple[CudaFused, OverlappedLayers] | None:
    """Return the backend and the concurrent layers; None if they are not supported, or not faster."""
    try:
        chosen = choose(backend, Problem(cell, heads, head_dim, dtype, device, training, reset=False))
        if not isinstance(chosen, CudaFused):
            return None
        found = overlapped_layers(chosen, cell, layers, heads, head_dim, sizes, dtype, device, half_bias, training)
    except (ValueError, KernelUnavailable):  # layers may still run one after the other
        return None
    return found and (chosen, found)


class _Layers(torch.autograd.Function):
    """The output and the last states [layers, B, H] of concurrent layers.

    `others` are `count` initial states, followed by W, R and b of each layer.
    """

    @staticmethod
    def forward(ctx, batch_first, recurrent, taken, overlapped, count, x, *others):
        given, flat = others[:count], others[count:]
        weights = [flat[i : i + 3] for i in range(0, len(flat), 3)]
        results = overlapped(x, weights, _initial_of_all(given, len(weights)), True)
        b_dtype = None if flat[2] is None else flat[2].dtype
        saved = []
        for (W, R, b), one in zip(weights, results, strict=True):
            if b is None:
                b = x.new_zeros(len(recurrent.cell.gates), *R.shape[1:3], dtype=state_dtype(x.dtype))
            saved += W, R, b, one.h, one.aux, one.gates
        ctx.save_for_backward(x, *given, *saved)
        ctx.set_materialize_grads(False)
        ctx.leading = 5  # arguments before x, which have no gradients
        ctx.call = batch_first, recurrent.cell, recurrent.backend, taken, overlapped, count, x.dtype, b_dtype
        return results[-1].h, *apart(torch.cat([one.last for one in results], dim=1))

    @staticmethod
    def backward(ctx, d_out, *d_ends):
        batch_first, cell, backend, taken, overlapped, count, dtype, b_dtype = ctx.call
        x, *saved = ctx.saved_tensors
        given, saved = saved[:count], saved[count:]
        layers = [saved[i : i + 6] for i in range(0, len(saved), 6)]
        R = layers[0][1]
        initial, d_last = _by_layer(given, len(layers), R), _by_layer(d_ends, len(layers), R)
        d_h = by_heads(d_out, R, batch_first)
        calls = []
        for (_, R, b, h, aux, gates), states, d_end in zip(layers, initial, d_last, strict=True):
            of_residual = R, states, None, by_heads(h, R, batch_first), aux, gates
            calls.append((of_residual, b, b_dtype, StateGradients(None, (None,) * len(aux), d_end)))
        x_wanted, *wanted = ctx.needs_input_grad[ctx.leading :]
        at_once = None
        if not (backward_is_observed() or _captured(x)):
            with no_autocast(x):
                of_calls = [(residual_of(cell, taken, *call[:3]), call[3]) for call in calls]
                at_once = overlapped.backward(d_h, of_calls, [W for W, *_ in layers], x if x_wanted else None)
        found, d_x = at_once or (None, None)
        inputs = [x, *(h for _, _, _, h, _, _ in layers[:-1])]
        of_states, of_weights = [], []
        for k in reversed(range(len(layers))):
            if found is None:
                *of_call, grads = calls[k]
                gradients = recurrence_gradients(cell, backend, taken, *of_call, grads._replace(h=d_h))
            else:
                gradients = found[k]
            W_wanted, _, b_wanted = wanted[count + 3 * k : count + 3 * k + 3]
            of_x_wanted = (x_wanted and d_x is None) if k == 0 else found is None
            of_product = gradients.Wx, inputs[k], layers[k][0], of_x_wanted, W_wanted
            of_x, of_W = product_gradients(batch_first, dtype, *of_product)
            d_h = by_heads(of_x, R, batch_first) if k else None
            of_weights = [of_W, gradients.R, gradients.b if b_wanted else None, *of_weights]
            of_states = [gradients.states, *of_states]
        of_given = [None] * count
        if any(wanted[:count]):
            of_given = torch.stack(of_states, dim=1).flatten(3).unbind()
        return *(None,) * ctx.leading, of_x if d_x is None else d_x, *of_given, *of_weights


def _initial_of_all(given: Sequence[Tensor], layers: int) -> list[Tensor | int | None]:
    """Return the caller's states for each layer, like `joined_states`; None without states."""
    return [joined_states([state[k : k + 1] for state in given]) if given else None for k in range(layers)]


def _by_layer(states: Sequence[Tensor | None], layers: int, R: Tensor) -> list[Tensor | None]:
    """Return states or their gradients [layers, B, H] as [S, B, N, D] for each layer; None if there are none."""
    known = [state for state in states if state is not None]
    if not known:
        return [None] * layers
    whole = torch.stack([torch.zeros_like(known[0]) if state is None else state for state in states], dim=1)
    return [one.unflatten(-1, R.shape[1:3]) for one in whole.unbind()]


def _captured(x: Tensor) -> bool:
    """Return whether a CUDA graph captures the call; kernels of layers do not run concurrently in a graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
