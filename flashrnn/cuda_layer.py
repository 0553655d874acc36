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
from torch.nn.functional import dropout

from flashrnn import concurrent_layers
from flashrnn._torch_private import apply_of, autograd_alone, backward_is_observed, graph_is_retained
from flashrnn.cells import Cell
from flashrnn.cuda.resident.backend import CudaFused
from flashrnn.cuda.resident.calls import Forward
from flashrnn.cuda.resident.single_step import SingleStep
from flashrnn.directions import is_faster
from flashrnn.dispatch import choose
from flashrnn.eager import together
from flashrnn.eager_layer import last_states, layer_gradients, of_last_states
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
    if one_way and (done := concurrent_layers.run(network, layers, sizes, x, given)) is not None:
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
            x, _, end, _ = found[1].of_layer(x, *joined, states, reset, training=False)
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
        out, aux, ends, gates = forward.of_layer(x, W, R, b, states, reset, training=True)
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
