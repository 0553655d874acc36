"""Layers on the CPU as one kernel call with as little overhead as possible.

For one step of one sequence the kernel takes 5 µs, and the general code for all backends 40 times as long.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from flashrnn import op
from flashrnn._torch_private import (
    apply_of,
    autograd_alone,
    backward_is_observed,
    graph_is_retained,
    onednn_computes,
)
from flashrnn.cells import Cell
from flashrnn.cpu.backend import CpuFused, InputProduct, gradients, weights
from flashrnn.cpu.call import Prepared, Sizes, prepare, with_product
from flashrnn.dispatch import choose
from flashrnn.eager import as_dtype
from flashrnn.layer_weights import weights_of
from flashrnn.memory_format import aux_in_format
from flashrnn.problem import PLAIN, KernelUnavailable, Problem, state_dtype
from flashrnn.recurrence import Recurrence
from flashrnn.residual import Residual

_CPU = torch.device("cpu")
_DTYPES = (torch.float32, torch.float64)  # in which the kernels compute


class Layer(NamedTuple):
    """The recurrence and the weights of a layer."""

    recurrent: Recurrence
    W: Tensor  # weight of the input product
    R: Tensor
    b: Tensor | None


def run(network: nn.Module, x: Tensor, states, reset: Tensor | None) -> tuple | None:
    """Run a FlashRNN, whose layers have one direction, on a single step.

    Args:
        network: the FlashRNN.
        x: [B, features], or [B, 1, features] or [1, B, features] as the output then is.
        states: the caller's initial states.
        reset: [B], or None.

    Returns:
        The results of `FlashRNN.step`. None if the call is not supported, and if an argument is wrong, which the caller
        then reports.
    """
    if not x.is_cpu or not _is_fast_in(x.dtype):
        return None  # before zeros for missing states are created, which would be a kernel on a GPU
    if states is None:
        shape = network.num_layers, math.prod(x.shape[:-1]), network.hidden_size
        states = (x.new_zeros(shape, dtype=state_dtype(x.dtype)),) * len(network.cell.states)
    states = states if isinstance(states, tuple | list) else (states,)
    modules = network._modules
    pairs = [(modules[f"input_l{k}"], modules[f"recurrent_l{k}"]) for k in range(network.num_layers)]
    if (found := layers(pairs, x, states, reset)) is None:
        return None
    new = []
    for k, layer in enumerate(found):
        if k:
            x = dropout(x, network.dropout, network.training)
        before = states if len(found) == 1 else [state[k : k + 1] for state in states]
        x, *after = step(layer, x, before, reset)
        new.append(after)
    last = tuple(new[0] if len(found) == 1 else map(torch.cat, zip(*new, strict=True)))
    return x, last if len(last) > 1 else last[0]


def _is_fast_in(dtype: torch.dtype) -> bool:
    """Return whether `step` is the fastest way in this dtype. In bfloat16 it is not if oneDNN supports it."""
    return dtype in _DTYPES or (dtype == torch.bfloat16 and not onednn_computes(dtype))


def layers(
    modules: Sequence[tuple[nn.Module, nn.Module]], x: Tensor, states: Sequence[Tensor], reset: Tensor | None
) -> list[Layer] | None:
    """Return the layers for `step`, or None if `step` does not support the call.

    This is the case if a module has hooks or parametrizations, if the backend is not `cpu_fused`, if something other
    than autograd observes the call (a compiler, torch.func, a dispatch mode), or if an argument is wrong.

    Args:
        modules: the input product and the recurrence of each layer.
        x: [B, features], in a dtype for which `_is_fast_in` is true; it may have an axis of one time step.
        states: a tensor [layers, B, H] for each state of the cell.
        reset: [B], or None.
    """
    if not autograd_alone() or torch.is_autocast_enabled("cpu"):
        return None
    dtype, B, features, (_, first) = x.dtype, math.prod(x.shape[:-1]), x.shape[-1], modules[0]
    if not (B and is_plain(x, dtype) and len(states) == len(first.cell.states)):
        return None
    if reset is not None and not is_plain(reset, torch.bool):
        return None
    size = len(modules), B, first.hidden_size
    for state in states:
        if not is_plain(state, state_dtype(dtype)) or state.shape != size or not state.is_contiguous():
            return None
    found = []
    for product, recurrent in modules:
        if (layer := _layer(product, recurrent, dtype)) is None or layer.W.shape[1] != features:
            return None
        found.append(layer)
        features = layer.recurrent.hidden_size
    return found


def is_plain(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether x is a plain tensor (no subclass) of this dtype on the CPU."""
    return type(x) in PLAIN and x.dtype == dtype and x.device == _CPU


def _layer(product: nn.Module, recurrent: nn.Module, dtype: torch.dtype) -> Layer | None:
    if (weights := weights_of(product, recurrent, dtype, _CPU)) is None:
        return None
    if not _is_for_the_kernel(recurrent.cell, recurrent.backend, *weights[1].shape[1:3], weights[0].shape[1], dtype):
        return None
    return Layer(recurrent, *weights)


@lru_cache(maxsize=1024)
def _is_for_the_kernel(cell: Cell, backend: str, heads: int, head_dim: int, features: int, dtype: torch.dtype) -> bool:
    problem = Problem(cell, heads, head_dim, dtype, _CPU, training=True, reset=False)
    return _kernel_runs(backend, problem, _Rows(1, 1, False), features, threads=1)


def step(layer: Layer, x: Tensor, states: Sequence[Tensor], reset: Tensor | None) -> tuple[Tensor, ...]:
    """Return h, in the shape of x except for the last axis, and the new states, each in the shape of the old one.

    Args:
        layer: one of `layers`.
        x: as in `layers`.
        states: a tensor of B*H elements for each state of the cell, in the state dtype.
        reset: [B] bool, or None.
    """
    return _run(layer, _Rows(math.prod(x.shape[:-1]), 1, False), x, states, reset)


def sequences(
    recurrent: Recurrence, batch_first: bool, x: Tensor, W: Tensor, states: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, ...] | None:
    """Run a layer that `eager_layer` supports; return None if this function does not support the call.

    Args:
        recurrent: the recurrence.
        batch_first: x is [B, T, features], otherwise [T, B, features].
        x: the input.
        W: weight of the input product.
        states: [S, B, N, D], or None.
        reset: [B, T] bool, or None.
    """
    R, b = recurrent.R, recurrent.b
    if x.dtype not in _DTYPES or x.device != _CPU or not x.is_contiguous() or torch.is_autocast_enabled("cpu"):
        return None
    if any(t is not None and t.dtype != x.dtype for t in (W, R, b, states)):
        return None
    rows = _Rows(*(x.shape[:2] if batch_first else x.shape[1::-1]), not batch_first)
    training = torch.is_grad_enabled() and any(_requires_grad(t) for t in (x, W, R, b, states))
    sizes = recurrent.num_heads, recurrent.head_dim
    problem = Problem(recurrent.cell, *sizes, x.dtype, _CPU, training, reset is not None)
    if not _kernel_runs(recurrent.backend, problem, rows, W.shape[1], torch.get_num_threads()):
        return None
    if reset is not None:
        reset = reset.t() if rows.time_major else reset
    size = 1, rows.batch, recurrent.hidden_size
    if states is None:
        states = (x.new_zeros(size),) * len(recurrent.cell.states)
    else:
        states = [state.reshape(size) for state in states.unbind()]
    return _run(Layer(recurrent, W, R, b), rows, x, states, reset)


def _kernel_runs(backend: str, problem: Problem, rows: "_Rows", features: int, threads: int) -> bool:
    """Return whether `cpu_fused` is selected for a call with these rows, and its kernels can be compiled."""
    cell, N, D, dtype = problem[:4]
    try:
        if choose(backend, problem).name != CpuFused.name:
            return False
        for direction in problem.directions:
            _prepared(direction, cell, rows, N, D, dtype, features, threads)
    except (ValueError, KernelUnavailable):  # the general path reports it
        return False
    return True


class _Rows(NamedTuple):
    """The steps of sequences, in the order of memory."""

    batch: int
    steps: int
    time_major: bool

    def by_heads(self, x: Tensor, heads: int) -> Tensor:
        """Return rows of numbers as [B, T, N, numbers]."""
        if self.time_major:
            return x.view(self.steps, self.batch, heads, -1).transpose(0, 1)
        return x.view(self.batch, self.steps, heads, -1)


def _run(layer: Layer, rows: _Rows, x: Tensor, states: Sequence[Tensor], reset: Tensor | None) -> tuple[Tensor, ...]:
    recurrent, W, R, b = layer
    if torch.is_grad_enabled() and (W.requires_grad or any(_requires_grad(t) for t in (R, b, x, *states))):
        return _run_layer(recurrent.cell, rows, reset, x, W, R, b, *states)
    h, _, new = _forward(recurrent.cell, rows, reset, x, W, R, b, states, training=False)
    return h, *new


def _requires_grad(x: Tensor | None) -> bool:
    return x is not None and x.requires_grad


def _kernel(direction: str, cell: Cell, rows: _Rows, R: Tensor, W: Tensor, dtype: torch.dtype) -> Prepared:
    return _prepared(direction, cell, rows, *R.shape[1:3], dtype, W.shape[1], torch.get_num_threads())


@lru_cache(maxsize=1024)
def _prepared(
    direction: str, cell: Cell, rows: _Rows, heads: int, head_dim: int, dtype: torch.dtype, features: int, threads: int
) -> Prepared:
    """Return the kernel for a layer. `prepare` has it cached, too, but its sizes take longer to make than a look-up.

    Raises KernelUnavailable.
    """
    sizes = Sizes(direction, cell, *rows[:2], heads, head_dim, rows.time_major, dtype, threads)
    return prepare(with_product(sizes, features))


def _forward(cell: Cell, rows: _Rows, reset, x: Tensor, W: Tensor, R: Tensor, b: Tensor | None, states, training: bool):
    """Return h, the residuals (gates, and other states of every step) and the new states."""
    (B, T, _), (_, N, D, _), dtype = rows, R.shape, x.dtype
    kernel = _kernel("forward", cell, rows, R, W, dtype)
    x, W, R, b = _wide(x, W, R, b)
    h, new = x.new_empty(*x.shape[:-1], N * D), [torch.empty_like(state) for state in states]
    gates = x.new_empty(B * T, len(cell.gates) * N * D) if training else None
    aux = x.new_empty(len(states) - 1, B * T, N * D) if training and T > 1 and len(states) > 1 else None
    if kernel.sizes.features:
        inputs = {"source": x.contiguous(), "W": weights(kernel.sizes, W.view(-1, D, W.shape[1]))}
    else:
        inputs = {"x": as_dtype(as_dtype(linear(x, W), dtype), x.dtype)}  # rounded as in a sequence
    kernel.run(
        h=h,
        **inputs,
        weights=weights(kernel.sizes, R),
        b=x.new_zeros(len(cell.gates), N, D) if b is None else b.contiguous(),
        reset=None if reset is None else reset.contiguous(),
        initial=states,
        last=new,
        pre=gates,
        aux=aux,
    )
    return as_dtype(h, dtype), (gates, aux), new


def _wide(*tensors: Tensor | None) -> Sequence[Tensor | None]:
    """Return the tensors in the state dtype that belongs to the dtype of the first one."""
    dtype = tensors[0].dtype
    return tensors if dtype in _DTYPES else [as_dtype(t, state_dtype(dtype)) for t in tensors]


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, cell, rows, reset, x, W, R, b, *states):
        h, saved, new = _forward(cell, rows, reset, x, W, R, b, states, training=True)
        ctx.cell, ctx.rows, ctx.has_bias = cell, rows, b is not None
        ctx.save_for_backward(x, W, R, reset, None if rows.steps == 1 else h, *saved, *states)
        ctx.set_materialize_grads(False)
        return h, *new

    @staticmethod
    def backward(ctx, d_h, *d_new):
        x, W, R, *saved = ctx.saved_tensors
        x, W, R, d_h = _wide(x, W, R, d_h)
        of_x, of_W = ctx.needs_input_grad[3:5]
        given, observed = (ctx.rows, d_h, d_new, R, *saved), backward_is_observed()
        kernel = _kernel("backward", ctx.cell, ctx.rows, R, W, W.dtype)
        if kernel.sizes.features and not observed:
            x = x.contiguous()
            d_x = torch.empty_like(x) if of_x else None
            d_W, d_R, d_b, *d_states = _backward(kernel, *given, product=InputProduct(x, W.contiguous(), d_x))
        else:
            d_Wx, d_R, d_b, *d_states = _by_operator(ctx.cell, *given) if observed else _backward(kernel, *given)
            d_x = torch.mm(d_Wx, W).view(x.shape) if of_x else None
            d_W = torch.mm(d_Wx.t(), x if x.dim() == 2 else x.flatten(0, 1)) if of_W else None
        return None, None, None, d_x, d_W, d_R, d_b if ctx.has_bias else None, *d_states


_run_layer = apply_of(_Layer)


def _backward(kernel: Prepared, rows: _Rows, d_h, d_new, R, reset, h, gates: Tensor, aux, *states, product=None):
    """Return the gradients of Wx, or of W if the input product is given, of R, of b and of the states."""
    d_h = None if d_h is None else d_h.contiguous()
    reset = None if reset is None else _of_rows(reset.contiguous(), rows)
    d_x, d_states = None, [torch.empty_like(state) for state in states]
    if product is None:
        cell, N, D = kernel.sizes.cell, *R.shape[1:3]
        states = [state.view(rows.batch, N, D) for state in states]
        h = states[0].unsqueeze(1) if h is None else rows.by_heads(h, N)
        if N == 1 and cell.input_gates == cell.gates and not graph_is_retained():
            d_x = rows.by_heads(gates, len(cell.gates)).unsqueeze(3)  # in place of the gates
    d_input, d_R, d_b = gradients(
        kernel,
        R,
        initial=states,
        reset=reset,
        h=h,
        gates=gates,
        aux=aux,
        d_h=d_h,
        d_last=[None if d is None else d.contiguous() for d in d_new],
        d_initial=d_states,
        d_x=d_x,
        product=product,
    )
    if product is None:
        d_input = (d_input.transpose(0, 1) if rows.time_major else d_input).reshape(rows.batch * rows.steps, -1)
    return d_input, d_R, d_b, *d_states


def _by_operator(cell: Cell, rows: _Rows, d_h, d_new, R: Tensor, reset, h, gates: Tensor, aux, *states):
    """Return the result of `_backward`, computed by an operator that torch.func and `create_graph` can observe."""
    (B, _, time_major), (_, N, D, _) = rows, R.shape
    before = torch.stack([state.view(B, N, D) for state in states])
    h = before[0].unsqueeze(1) if h is None else rows.by_heads(h, N)
    aux = before[1:].unsqueeze(2) if aux is None else torch.stack([rows.by_heads(state, N) for state in aux.unbind()])
    gates = rows.by_heads(gates, N).unflatten(3, (-1, D))
    residual = Residual(R, before, _of_rows(reset, rows), h, aux_in_format(aux, h), gates, "NGD")
    d_last = None
    if any(d is not None for d in d_new):
        d_last = torch.stack([torch.zeros_like(s) if d is None else d for s, d in zip(states, d_new, strict=True)])
        d_last = d_last.view(before.shape)
    d_h = None if d_h is None else rows.by_heads(d_h, N)
    d_x, d_R, d_b, d_before = op.backward(cell, CpuFused.name, residual, d_h, (None,) * (len(states) - 1), d_last)
    d_Wx = (d_x.transpose(0, 1) if time_major else d_x).flatten(0, 1).flatten(1)
    return d_Wx, d_R, d_b, *(d.reshape(state.shape) for d, state in zip(d_before, states, strict=True))


def _of_rows(reset: Tensor | None, rows: _Rows) -> Tensor | None:
    """Return the reset mask of `rows` as [B, T]."""
    if reset is None or rows.steps == 1:
        return None if reset is None else reset.reshape(rows.batch, 1)
    return reset.t() if rows.time_major else reset
