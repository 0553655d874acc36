"""The layers of a FlashRNN run by backend `cuda_fused`, each with one matrix product and one kernel launch, or a single
step with one launch.

For few time steps, as in a control loop, the general path through a layer doubles the host time of these.

Both directions of a layer run as the heads of one recurrence if this is faster according to `directions`. The second
half of the heads goes through time backwards.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from flashrnn._torch_private import apply_of, autograd_alone, backward_is_observed, graph_is_retained
from flashrnn.cells import Cell
from flashrnn.cuda.resident.backend import CudaFused
from flashrnn.cuda.resident.calls import Forward, each_state
from flashrnn.cuda.resident.layers import OverlappedLayers, overlapped_layers
from flashrnn.cuda.resident.single_step import SingleStep
from flashrnn.directions import is_faster
from flashrnn.dispatch import choose, no_autocast
from flashrnn.eager import apart, recurrence_gradients, residual_of, together
from flashrnn.eager_layer import by_heads, last_states, layer_gradients, of_last_states, product_gradients
from flashrnn.layer_weights import weights_of
from flashrnn.problem import PLAIN, KernelUnavailable, Problem, StateGradients, on_gpu, state_dtype, tf32_allowed
from flashrnn.residual import Residual

Found = tuple[CudaFused, Forward | SingleStep]


def run(network: nn.Module, x: Tensor, states, reset: Tensor | None) -> tuple | None:
    """Run a FlashRNN on sequences or on a single step.

    Args:
        network: a FlashRNN.
        x: [T, B, features], or [B, T, features] if the network is batch_first; [B, features] for a single step.
        states: the caller's initial states.
        reset: [B, T], or [B] for a single step, or None.

    Returns:
        The results of `FlashRNN.forward`, in the layout of x. None if the call is not supported, and if an argument is
        wrong, which the caller then reports.
    """
    if not (on_gpu(x) and x.is_contiguous() and x.numel() and autograd_alone()):
        return None
    bidirectional = network.bidirectional
    if torch.is_autocast_enabled("cuda") or network.proj_size or (bidirectional and reset is not None):
        return None
    time_major = x.dim() == 3 and not network.batch_first
    T, B = x.shape[:2] if time_major else (1, x.shape[0]) if x.dim() == 2 else x.shape[1::-1]
    if x.shape[-1] != network.input_size or not (reset is None or _is_mask(reset, x, B, T)):
        return None
    given = None if states is None else states if isinstance(states, tuple | list) else (states,)
    if given is not None and not _are_states(given, network, x, B):
        return None
    if (layers := _layers(network, x, given)) is None:
        return None
    sizes = B, T, time_major
    one_way = len(layers) > 1 and reset is None and not bidirectional
    if one_way and (done := _at_once(network, layers, sizes, x, given)) is not None:
        return done
    found_ones = [_found(*layer, sizes, x, reset is not None, bidirectional) for layer in layers]
    if None in found_ones:
        return None
    reset = reset.unsqueeze(1) if reset is not None and x.dim() == 2 else reset
    ends = []
    for k, ((recurrent, weights, training), found) in enumerate(zip(layers, found_ones, strict=True)):
        if k:
            x = dropout(x, network.dropout, network.training)
        joined = _joined(*weights) if bidirectional else weights[0]
        states = () if given is None else _of_layer(given, k, bidirectional)
        if training:
            x, *end = _run_layer((not time_major, bidirectional, recurrent, found, reset), x, *joined, *states)
        else:
            x, _, end, _ = _results(found[1], x, *joined, states, reset, training=False)
        ends.append([_by_direction(state) for state in end] if bidirectional else end)
    return x, last_states(ends)


Weights = tuple[Tensor, Tensor, Tensor | None]  # W, R and b


def _layers(network: nn.Module, x: Tensor, given: Sequence[Tensor] | None) -> list[tuple] | None:
    """Return for each layer its recurrence, the weights of its directions, and whether a backward pass follows.

    Return None if a layer's modules are not supported.
    """
    with_gradients = torch.is_grad_enabled()
    wanted = with_gradients and (x.requires_grad or (given is not None and any([s.requires_grad for s in given])))
    layers = []
    for k in range(network.num_layers):
        weights = []
        for suffix in network._directions:
            modules = network._modules[f"input_l{k}{suffix}"], network._modules[f"recurrent_l{k}{suffix}"]
            if (of_direction := weights_of(*modules, x.dtype, x.device)) is None:
                return None
            weights.append(of_direction)
        recurrent = modules[1]
        if len(weights) > 1 and recurrent.backend != network._modules[f"recurrent_l{k}"].backend:
            return None
        if with_gradients and not wanted:
            wanted = any([w is not None and w.requires_grad for of_direction in weights for w in of_direction])
        layers.append((recurrent, weights, wanted))
    return layers


def _at_once(
    network: nn.Module, layers: Sequence[tuple], sizes: tuple[int, int, bool], x: Tensor, given: Sequence | None
) -> tuple | None:
    """Run all layers concurrently.

    Args:
        network: the FlashRNN, whose layers have one direction.
        layers: what `_layers` returns.
        sizes: batch, steps and whether x is time-major.
        x: the input.
        given: the caller's states.

    Returns:
        The result of `run`. None if the layers are not supported, or if this is not faster.
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


def _joined(forwards: Weights, backwards: Weights) -> Weights:
    """Return the weights of both directions as those of one layer with twice the heads, the backward direction last."""
    Ws, Rs, bs = zip(forwards, backwards, strict=True)
    rows = len(Rs[0][0]) * Rs[0].shape[2]  # rows of W per gate
    W = torch.stack([W.unflatten(0, (-1, rows)) for W in Ws], dim=1).flatten(0, 2)
    return W, torch.cat(Rs, dim=1), None if bs[0] is None else torch.cat(bs, dim=1)


def _by_direction(state: Tensor) -> Tensor:
    """Return a last state [1, B, H of both directions] as [2, B, H]."""
    return torch.stack(state[0].chunk(2, dim=1))


class _Layer(torch.autograd.Function):
    """The output and the last states of a layer; `states` are its initial states, if any."""

    @staticmethod
    def forward(ctx, call, x, W, R, b, *states):
        batch_first, bidirectional, recurrent, (taken, forward), reset = call  # one argument: each takes host time
        b_dtype = None if b is None else b.dtype
        if b is None:
            b = x.new_zeros(len(recurrent.cell.gates), *R.shape[1:3], dtype=state_dtype(x.dtype))
        out, aux, ends, gates = _results(forward, x, W, R, b, states, reset, training=True)
        ctx.save_for_backward(x, W, out, R, b, reset, aux, gates, *states)
        ctx.set_materialize_grads(False)
        ctx.leading = 1  # arguments before x, which have no gradients
        ctx.forward = forward
        ctx.call = batch_first, bidirectional, recurrent.cell, recurrent.backend, taken, x.dtype, b_dtype
        return out, *ends

    @staticmethod
    def backward(ctx, d_out, *d_ends):
        x, W, out, R, b, reset, aux, gates, *given = saved = ctx.saved_tensors
        _, bidirectional, *_, b_dtype = ctx.call
        x_wanted, W_wanted, _, b_wanted, *given_wanted = ctx.needs_input_grad[ctx.leading :]
        done = of_x = None
        if not (backward_is_observed() or torch.is_autocast_enabled("cuda")):
            forward = ctx.forward
            states = together(given).view(forward.states, forward.batch, *R.shape[1:3]) if given else None
            of_gates = forward.gate_format, not graph_is_retained(), b_dtype, b, bidirectional
            residual = Residual(R, states, reset, out.contiguous(), aux, gates, *of_gates)
            d_h = None if d_out is None else d_out.contiguous()
            grads = StateGradients(d_h, (), of_last_states(d_ends, R))
            done = forward.backward.gradients(residual, grads, x.contiguous() if W_wanted else None)
        if done is None:
            return layer_gradients(ctx, saved, d_out, d_ends)
        (found, of_W), width = done, W.shape[0]
        strides = (width, 1) if x.dim() == 2 else (x.shape[1] * width, width, 1)
        of_Wx = found.Wx.as_strided((*x.shape[:-1], width), strides)
        if x_wanted:
            of_x = torch.matmul(of_Wx, W)
        if W_wanted and of_W is None:
            of_W = torch.mm(of_Wx.view(-1, width).t(), x.reshape(-1, W.shape[1]))
        of_given = found.states.view(len(given), *given[0].shape).unbind() if any(given_wanted) else [None] * len(given)
        return *(None,) * ctx.leading, of_x, of_W, found.R, found.b if b_wanted else None, *of_given


_run_layer = apply_of(_Layer)


def _results(
    forward: Forward | SingleStep,
    x: Tensor,
    W: Tensor,
    R: Tensor,
    b: Tensor | None,
    states: Sequence[Tensor],
    reset: Tensor | None,
    training: bool,
) -> tuple[Tensor, Tensor | None, Sequence[Tensor], Tensor | None]:
    """Launch the kernels of a layer; `states` are its initial states, if any.

    Return h in the layout of x, aux, the last states [1, B, H], and gates. aux and gates are None without `training`.
    """
    if isinstance(forward, SingleStep):
        return forward(x, W, R, b, states, reset, training)
    Wx = linear(x, W)
    h = x.new_empty(*x.shape[:-1], forward.size)
    last = x.new_empty(forward.states, forward.batch, forward.size, dtype=state_dtype(x.dtype))
    aux, gates = forward.empty_residual(x) if training else (None, None)
    forward.launch(Wx, R, b, _initial(states) if states else None, reset, h, aux, last, gates)
    return h, aux, each_state(last), gates


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
            of_x_wanted = x_wanted and d_x is None if k == 0 else found is None
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
    """Return the caller's states for each layer, like `_initial`; None without states."""
    return [_initial(_of_layer(given, k, False)) if given else None for k in range(layers)]


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


def _is_mask(reset: Tensor, x: Tensor, batch: int, steps: int) -> bool:
    shape = (batch,) if x.dim() == 2 else (batch, steps)
    return type(reset) is Tensor and reset.dtype == torch.bool and reset.shape == shape and reset.device == x.device


def _are_states(states: Sequence[Tensor], network: nn.Module, x: Tensor, batch: int) -> bool:
    """Return whether these are valid states, as `forward` returns them."""
    count, dtype, device = network.num_layers * len(network._directions), state_dtype(x.dtype), x.device
    shape = count, batch, network.hidden_size
    if len(states) != len(network.cell.states):
        return False
    for s in states:
        if type(s) not in PLAIN or s.dtype != dtype or s.shape != shape or s.device != device or not s.is_contiguous():
            return False
    return True


def _of_layer(states: Sequence[Tensor], layer: int, bidirectional: bool) -> Sequence[Tensor]:
    """Return the states of a layer [1, B, H of all directions]."""
    if bidirectional:
        return [torch.cat([*state[2 * layer : 2 * layer + 2]], dim=1).unsqueeze(0) for state in states]
    return states if states[0].shape[0] == 1 else [state[layer : layer + 1] for state in states]


def _initial(states: Sequence[Tensor]) -> Tensor | int:
    """Return the states [1, B, H] of a layer as one tensor, or only their address if they are contiguous in memory."""
    first, size = states[0].data_ptr(), states[0].nbytes
    if all([state.data_ptr() == first + i * size for i, state in enumerate(states)]):
        return first
    return torch.cat(list(states))


def _found(
    recurrent: nn.Module,
    weights: Sequence[Weights],
    training: bool,
    sizes: tuple[int, int, bool],
    x: Tensor,
    reset: bool,
    bidirectional: bool,
) -> Found | None:
    cell, backend, N, D = recurrent.cell, recurrent.backend, recurrent.num_heads, recurrent.head_dim
    half_bias, tf32 = weights[0][2] is not None and x.dtype.itemsize == 2, tf32_allowed(x.dtype, x.device)
    return _forward(cell, backend, N, D, sizes, x.dtype, x.device, reset, half_bias, training, tf32, bidirectional)


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
    half_bias: bool,
    training: bool,
    tf32: bool,
    bidirectional: bool,
) -> Found | None:
    """Return the backend and the forward pass for `sizes` (batch, steps, whether time-major).

    `heads` is the number of one direction. Return None if another backend is selected, or if running both directions at
    once is not faster.
    """
    problem = Problem(cell, heads, head_dim, dtype, device, training=training, reset=reset, tf32=tf32)
    B, T, time_major = sizes
    if bidirectional:
        if not is_faster(problem, B, backend):
            return None
        heads *= 2
    try:
        chosen = choose(backend, problem._replace(heads=heads))
        if not isinstance(chosen, CudaFused):
            return None
        if T == 1 and not bidirectional:
            step = chosen.single_step(cell, heads, head_dim, B, dtype, device, reset, training)
            if step is not None:
                return chosen, step
        rows, gates = (T, B) if time_major else (B, T), (len(cell.input_gates), heads, head_dim)
        Wx = torch.empty(*rows, *gates, dtype=dtype, device="meta")
        Wx = Wx.transpose(0, 1) if time_major else Wx
        return chosen, chosen.forward_of(
            cell, Wx, device, reset, half_bias, training=training, bidirectional=bidirectional
        )
    except (ValueError, KernelUnavailable):  # the general path reports it, or takes the next backend
        return None
