"""The recurrence outside of compilers and transformations, as one autograd function around the backends.

It needs a third of the host time of a call as a torch.library operator.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from flashrnn import loop, op
from flashrnn._torch_private import autograd_alone, backward_is_observed, graph_is_retained, transforms_active
from flashrnn.cells import Cell
from flashrnn.dispatch import by_one_way, no_autocast, run_backward, run_forward
from flashrnn.memory_format import aux_in_format, in_format
from flashrnn.problem import PLAIN, Backend, Gradients, Inputs, StateGradients, state_dtype
from flashrnn.reference import Reference
from flashrnn.residual import Residual

_DEVICES = ("cpu", "cuda")


def serves(inputs: Inputs) -> bool:
    """Return whether only autograd observes a call: no compiler, transformation, dispatch mode or tensor subclass."""
    return autograd_alone() and inputs.Wx.device.type in _DEVICES and all(x is None or type(x) in PLAIN for x in inputs)


def recurrence(
    cell: Cell, backend: str, dtype: torch.dtype, return_states: bool, inputs: Inputs
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return h, the last states and, if `return_states`, the other states of every step. Inputs may be of any dtype."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        h, last, *others = _Recurrence.apply(*inputs, cell, backend, dtype, return_states)
        return h, last, tuple(others)
    inputs = cast(dtype, *inputs)
    with no_autocast(inputs.Wx):
        _, (h, aux, last), _ = run_forward(backend, cell, inputs, return_states, training=False)
    return h, last, aux.unbind() if return_states else ()


def cast(dtype: torch.dtype, Wx: Tensor, R: Tensor, b: Tensor, states: Tensor | None, reset: Tensor | None) -> Inputs:
    """Return the inputs in the dtypes of a computation in `dtype`; b may keep that dtype."""
    of_states = state_dtype(dtype)
    b = b if b.dtype == dtype else as_dtype(b, of_states)
    return Inputs(as_dtype(Wx, dtype), as_dtype(R, dtype), b, as_dtype(states, of_states), reset)


def as_dtype(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return x in `dtype`. It avoids calls of `to` without effect, which take as long as an allocation."""
    return x if x is None or x.dtype == dtype else x.to(dtype)


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, Wx, R, b, states, reset, cell, backend, dtype, return_states):
        inputs = cast(dtype, Wx, R, b, states, reset)
        with no_autocast(Wx):
            taken, (h, aux, last), gates = run_forward(backend, cell, inputs, return_states, training=True)
        others = apart(aux) if return_states else ()
        again = (Wx, R, b, states) if backend == Reference.name else ()
        ctx.save_for_backward(inputs.R, inputs.b, inputs.states, reset, h, gates, *(others or (aux,)), *again)
        ctx.set_materialize_grads(False)
        ctx.call = cell, backend, taken, return_states, [None if x is None else x.dtype for x in (Wx, R, b, states)]
        return h, last, *others

    @staticmethod
    def backward(ctx, d_h, d_last, *d_others):
        cell, backend, taken, return_states, dtypes = ctx.call
        R, b, states, reset, h, gates, *saved = ctx.saved_tensors
        if backend == Reference.name:
            saved, again = saved[:-4], saved[-4:]
            if torch.is_grad_enabled() and not transforms_active():  # the gradients will be differentiated
                arguments = cell, backend, h.dtype, return_states, Inputs(*again, reset)
                return *loop.gradients(*arguments, [d_h, d_last, *d_others]), *(None,) * 5
        aux = together(saved) if return_states and len(cell.states) > 1 else saved[0]
        grads = StateGradients(d_h, d_others or (None,) * (len(cell.states) - 1), d_last)
        of_residual = R, states, reset, h, aux, gates
        gradients = recurrence_gradients(cell, backend, taken, of_residual, b, dtypes[2], grads)
        d_inputs = [None if dtype is None else as_dtype(d, dtype) for d, dtype in zip(gradients, dtypes, strict=True)]
        return *d_inputs, *(None,) * 5


def recurrence_gradients(
    cell: Cell,
    backend: str,
    taken: Backend,
    saved: tuple[Tensor | None, ...],
    b: Tensor,
    b_dtype: torch.dtype | None,
    grads: StateGradients,
    bidirectional: bool = False,
) -> Gradients:
    """Return the gradients of Wx, R, b and initial states of a call of `backend`, whose forward was run by `taken`.

    `saved` are the first six fields of the call's `Residual`, and `bidirectional` is another one. The gradients have
    the dtypes of the call; that of b may have `b_dtype`.
    """
    residual = residual_of(cell, taken, saved, b, b_dtype, bidirectional)
    if backward_is_observed():
        run = partial(_by_operator, taken.name)
        return by_one_way(run, cell, residual, grads) if bidirectional else run(cell, residual, grads)
    with no_autocast(residual.h):
        return run_backward(backend, cell, residual, grads, taken)


def residual_of(
    cell: Cell,
    taken: Backend,
    saved: tuple[Tensor | None, ...],
    b: Tensor,
    b_dtype: torch.dtype | None,
    bidirectional: bool = False,
) -> Residual:
    """Return the residual of a call, given the arguments of `recurrence_gradients`."""
    R, states, reset, h, aux, gates = saved
    h = in_format(h, h)  # hooks of saved tensors may change the memory format
    gate_format, donated = taken.gate_format(cell, *h.shape[2:], h.dtype), not graph_is_retained()
    return Residual(R, states, reset, h, aux_in_format(aux, h), gates, gate_format, donated, b_dtype, b, bidirectional)


def _by_operator(backend: str, cell: Cell, residual: Residual, grads: StateGradients) -> Gradients:
    return Gradients(*op.backward(cell, backend, residual, *grads))


def apart(states: Tensor) -> tuple[Tensor, ...]:
    """Return the states in a tensor [S, ...] as separate tensors that share its memory.

    They are not views, because autograd does not always allow changing views in place.
    """
    return tuple([state.data for state in states.unbind()])


def together(others: Sequence[Tensor]) -> Tensor:
    """Undo `apart`, without a copy if the states still share their memory."""
    first = others[0]
    memory, size = first.untyped_storage().data_ptr(), first.numel()
    for i, state in enumerate(others):
        offset = first.storage_offset() + i * size
        if (state.untyped_storage().data_ptr(), state.storage_offset()) != (memory, offset):
            return torch.stack(others)
    return first.as_strided((len(others), *first.shape), (size, *first.stride()))
