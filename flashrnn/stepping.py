"""One time step of a network on the CPU: one call of the kernel per layer, with as little overhead as possible.

At a batch of one the kernel takes 5 µs. The preparations for a whole sequence take forty times as long.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from flashrnn import op
from flashrnn._torch_private import autograd_alone, backward_is_observed
from flashrnn.cells import Cell
from flashrnn.cpu.backend import CpuFused, gradients
from flashrnn.cpu.call import Sizes, prepare
from flashrnn.dispatch import choose
from flashrnn.problem import PLAIN, KernelUnavailable, Problem
from flashrnn.recurrence import Recurrence
from flashrnn.residual import Residual

_CPU = torch.device("cpu")
_DTYPES = (torch.float32, torch.float64)  # in which states have the dtype of x


class Layer(NamedTuple):
    """The weights of a layer, as `step` takes them."""

    recurrent: Recurrence
    W: Tensor  # of the input product
    R: Tensor
    b: Tensor | None


def layers(
    modules: Sequence[tuple[nn.Module, nn.Module]], x: Tensor, states: Sequence[Tensor], reset: Tensor | None
) -> list[Layer] | None:
    """Return the layers as `step` takes them, or None if `step` does not serve the call.

    It does not if a module has hooks or parametrizations, if the backend is not `cpu_fused`, if something other than
    autograd observes the call (a compiler, torch.func, a dispatch mode), or if an argument is wrong.

    Args:
        modules: the input product and the recurrence of each layer.
        x: [B, features].
        states: a tensor [layers, B, H] for each state of the cell.
        reset: [B], or None.
    """
    if not autograd_alone() or torch.is_autocast_enabled("cpu") or x.dim() != 2 or x.dtype not in _DTYPES:
        return None
    dtype, (B, features), (_, first) = x.dtype, x.shape, modules[0]
    if not (B and is_plain(x, dtype) and len(states) == len(first.cell.states)):
        return None
    if reset is not None and not is_plain(reset, torch.bool):
        return None
    size = len(modules), B, first.hidden_size
    for state in states:
        if not is_plain(state, dtype) or state.shape != size or not state.is_contiguous():
            return None
    found = []
    for product, recurrent in modules:
        if (layer := _layer(product, recurrent, dtype)) is None or layer.W.shape[1] != features:
            return None
        found.append(layer)
        features = layer.recurrent.hidden_size
    return found


def is_plain(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether x is a tensor of that dtype on the CPU and not of a subclass."""
    return type(x) in PLAIN and x.dtype == dtype and x.device == _CPU


def without_hooks(product: nn.Module, recurrent: nn.Module) -> bool:
    """Return whether a layer's modules have no hooks, no parametrizations and no bias of the input product, so that W,
    R and b say all."""
    if type(product) is not nn.Linear or type(recurrent) is not Recurrence:  # parametrizations change the class
        return False
    if product._parameters.get("bias") is not None:
        return False
    hooks = product._forward_pre_hooks or product._forward_hooks
    hooks = hooks or recurrent._forward_pre_hooks or recurrent._forward_hooks
    hooks = hooks or product._backward_pre_hooks or product._backward_hooks
    return not (hooks or recurrent._backward_pre_hooks or recurrent._backward_hooks)


def weights_of(
    product: nn.Module, recurrent: nn.Module, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return W, R and b of a layer; None unless its modules are `without_hooks` and all are parameters of that dtype on
    that device which fit. Attributes of modules are not read by name, which takes ten times as long."""
    if not without_hooks(product, recurrent):
        return None
    of_recurrent = recurrent._parameters
    W, R, b = product._parameters.get("weight"), of_recurrent.get("R"), of_recurrent.get("b", _MISSING)
    for weight in (W, R) if b is None else (W, R, b):
        if type(weight) not in PLAIN or weight.dtype != dtype or weight.device != device:
            return None
    return (W, R, b) if fit(recurrent, W, R, b) else None


def fit(recurrent: Recurrence, W: Tensor, R: Tensor, b: Tensor | None) -> bool:
    """Return whether the weights of a layer, which others may have replaced, have the sizes of its cell and heads.

    Kernels do not check that: they would read beyond the end of a smaller tensor.
    """
    cell, N, D = recurrent.cell, recurrent.num_heads, recurrent.head_dim
    if W.shape[0] != len(cell.input_gates) * N * D or R.shape != (len(cell.recurrent_gates), N, D, D):
        return False
    return b is None or b.shape == (len(cell.gates), N, D)


_MISSING = object()  # a tensor that is no parameter has taken its place


def _layer(product: nn.Module, recurrent: nn.Module, dtype: torch.dtype) -> Layer | None:
    if (weights := weights_of(product, recurrent, dtype, _CPU)) is None:
        return None
    if not _is_for_the_kernel(recurrent.cell, recurrent.backend, *weights[1].shape[1:3], dtype):
        return None
    return Layer(recurrent, *weights)


@lru_cache(maxsize=1024)
def _is_for_the_kernel(cell: Cell, backend: str, heads: int, head_dim: int, dtype: torch.dtype) -> bool:
    problem = Problem(cell, heads, head_dim, dtype, _CPU, training=True, reset=False)
    try:
        if choose(backend, problem).name != CpuFused.name:
            return False
        for direction in problem.directions:
            prepare(Sizes(direction, cell, 1, 1, heads, head_dim, False, dtype, 1))
    except (ValueError, KernelUnavailable):  # the call of a whole sequence reports it
        return False
    return True


def step(layer: Layer, x: Tensor, states: Sequence[Tensor], reset: Tensor | None) -> tuple[Tensor, ...]:
    """Return h [B, H] and the new states, each of the shape of the old one.

    Args:
        layer: one of `layers`.
        x: [B, features].
        states: a tensor of B*H elements for each state of the cell.
        reset: [B] bool, or None.
    """
    recurrent, W, R, b = layer
    if torch.is_grad_enabled() and (W.requires_grad or any(_requires_grad(t) for t in (R, b, x, *states))):
        return _Step.apply(recurrent.cell, reset, x, W, R, b, *states)
    return _forward(recurrent.cell, reset, linear(x, W), R, b, states, None)


def _requires_grad(x: Tensor | None) -> bool:
    return x is not None and x.requires_grad


def _forward(cell: Cell, reset, Wx: Tensor, R: Tensor, b: Tensor | None, states, gates: Tensor | None):
    B, (_, N, D, _) = Wx.shape[0], R.shape
    kernel = prepare(Sizes("forward", cell, B, 1, N, D, False, Wx.dtype, torch.get_num_threads()))
    h, new = Wx.new_empty(B, N * D), [torch.empty_like(state) for state in states]
    kernel.run(
        h=h,
        x=Wx,
        weights=R.contiguous(),
        b=Wx.new_zeros(len(cell.gates), N, D) if b is None else b.contiguous(),
        reset=None if reset is None else reset.contiguous(),
        initial=states,
        last=new,
        pre=gates,
    )
    return h, *new


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx, cell, reset, x, W, R, b, *states):
        gates = x.new_empty(x.shape[0], len(cell.gates) * R.shape[1] * R.shape[2])
        ctx.cell, ctx.has_bias = cell, b is not None
        ctx.save_for_backward(x, W, R, reset, gates, *states)
        ctx.set_materialize_grads(False)
        return _forward(cell, reset, linear(x, W), R, b, states, gates)

    @staticmethod
    def backward(ctx, d_h, *d_new):
        x, W, *saved = ctx.saved_tensors
        run = _by_operator if backward_is_observed() else _backward
        d_Wx, d_R, d_b, *d_states = run(ctx.cell, d_h, d_new, *saved)
        _, _, of_x, of_W, *_ = ctx.needs_input_grad
        d_x, d_W = d_Wx @ W if of_x else None, d_Wx.t() @ x if of_W else None
        return None, None, d_x, d_W, d_R, d_b if ctx.has_bias else None, *d_states


def _backward(cell: Cell, d_h: Tensor | None, d_new, R: Tensor, reset, gates: Tensor, *states):
    B, (_, N, D, _) = gates.shape[0], R.shape
    d_states = [
        torch.zeros_like(state) if d is None else d.clone(memory_format=torch.contiguous_format)
        for state, d in zip(states, d_new, strict=True)
    ]
    before = [state.view(B, N, D) for state in states]
    d_h = None if d_h is None else d_h.contiguous()
    d_x, d_R, d_b = gradients(cell, R, before, _column(reset), before[0].unsqueeze(1), gates, d_h, d_states)
    return d_x.view(B, -1), d_R, d_b, *d_states


def _by_operator(cell: Cell, d_h: Tensor | None, d_new, R: Tensor, reset, gates: Tensor, *states):
    """Return what `_backward` does, by the operator, which torch.func and autograd with `create_graph` can see."""
    B, (_, N, D, _) = gates.shape[0], R.shape
    before = torch.stack([state.view(B, N, D) for state in states])
    h, aux, gates = before[0].unsqueeze(1), before[1:].unsqueeze(2), gates.view(B, 1, N, -1, D)
    residual = Residual(R, before, _column(reset), h, aux, gates, "NGD")
    d_last = None
    if any(d is not None for d in d_new):
        d_last = torch.stack([torch.zeros_like(s) if d is None else d for s, d in zip(states, d_new, strict=True)])
        d_last = d_last.view(before.shape)
    d_h = None if d_h is None else d_h.view(B, 1, N, D)
    d_x, d_R, d_b, d_before = op.backward(cell, CpuFused.name, residual, d_h, (None,) * (len(states) - 1), d_last)
    return d_x.flatten(1), d_R, d_b, *(d.reshape(state.shape) for d, state in zip(d_before, states, strict=True))


def _column(reset: Tensor | None) -> Tensor | None:
    return None if reset is None else reset[:, None]
