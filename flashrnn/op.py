"""The recurrence as a torch.library operator, for torch.compile, torch.export and torch.func."""

from collections.abc import Callable
from operator import index

import torch
from torch import Tensor

from flashrnn._torch_private import constant_when_compiled, dynamo_at_work, traced_by_jit, transforms_active
from flashrnn.batching import folded_backward, folded_forward
from flashrnn.cells import Cell, cell_of_key
from flashrnn.dispatch import no_autocast, operator_gate_format, run_backward, run_forward
from flashrnn.memory_format import aux_in_format, empty_in_format, in_format
from flashrnn.problem import Inputs, StateGradients, empty_aux, empty_states, state_dtype
from flashrnn.residual import GateFormat, Residual, empty_gates


def recurrence(
    cell: Cell, backend: str, dtype: torch.dtype, return_states: bool, inputs: Inputs
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return h, the last states and, if `return_states`, the other states of every step. Inputs may be of any dtype."""
    Wx, R, b, states, reset = inputs
    states = None if states is None else states.to(state_dtype(dtype))
    Wx, R, b = Wx.to(dtype), R.to(dtype), b.to(state_dtype(dtype))
    differentiable = [x for x in (Wx, R, b, states) if x is not None]
    _check_no_tangents(differentiable, backend)
    within = transforms_active()  # inputs do not show then whether a gradient is needed
    recorded = traced_by_jit()  # with the same graph in torch.no_grad(), where torch.jit.trace repeats it as a check
    if recorded and torch.onnx.is_in_onnx_export():
        raise NotImplementedError("torch.onnx.export of a FlashRNN needs dynamo=True; or export its to_torch()")
    asked = recorded or torch.is_grad_enabled()
    needs_grad = within or (asked and any(x.requires_grad for x in differentiable))
    run = _Forward.apply if within else _forward
    gate_format = _gate_format(backend, cell.key, *map(index, Wx.shape[3:]), dtype, Wx.device)
    h, aux, last, _ = run(Wx, R, b, states, reset, cell.key, backend, return_states, needs_grad, gate_format)
    return h, last, aux.unbind() if return_states else ()


def backward(
    cell: Cell,
    backend: str,
    residual: Residual,
    d_h: Tensor | None,
    d_others: tuple[Tensor | None, ...],
    d_last: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of Wx, R, b and the initial states, given those of the results of `recurrence` or None."""
    d_aux = None
    if any(d is not None for d in d_others):
        zeros = torch.zeros((), dtype=state_dtype(residual.h.dtype), device=residual.h.device).expand(residual.h.shape)
        d_aux = torch.stack([zeros if d is None else d for d in d_others])
    return _gradients(d_h, d_aux, d_last, residual, cell.key, backend)


def _check_no_tangents(inputs: list[Tensor], backend: str) -> None:
    """Raise NotImplementedError for inputs with tangents, for which forward-mode differentiation would give zeros."""
    if torch.compiler.is_compiling():
        return
    if any(torch.autograd.forward_ad.unpack_dual(x).tangent is not None for x in inputs):
        raise NotImplementedError(
            f"backend {backend!r} has no forward-mode derivative (jvp, jacfwd, hessian): use grad, vjp or jacrev, or "
            "backend='vanilla', which has one"
        )


def _operator(run: Callable) -> Callable[..., tuple[Tensor, ...]]:
    """Define and return the operator flashrnn::<name of run>.

    torch.library.custom_op would do the same, but imports TorchDynamo on its first call, which takes seconds.
    """
    name = run.__name__.removeprefix("_run_")
    schema = torch.library.infer_schema(run, mutates_args=())
    torch.library.define(f"flashrnn::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(f"flashrnn::{name}", "CompositeExplicitAutograd", _not_compiled(run))
    return getattr(torch.ops.flashrnn, name).default


def _not_compiled(run: Callable) -> Callable:
    """Return `run`, wrapped so that TorchDynamo does not compile it.

    If TorchDynamo cannot compile the caller of an operator, as with torch.func.grad, it would compile the backends.
    """

    def call(*args):
        return torch.compiler.disable(run)(*args) if dynamo_at_work() else run(*args)

    return call


@constant_when_compiled
def _gate_format(*arguments) -> GateFormat:
    return _not_compiled(operator_gate_format)(*arguments)


def _run_forward(
    Wx: Tensor,
    R: Tensor,
    b: Tensor,
    states: Tensor | None,
    reset: Tensor | None,
    cell: str,
    backend: str,
    all_states: bool,
    training: bool,
    gate_format: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with no_autocast(Wx):
        definition = cell_of_key(cell)
        taken, results, gates = run_forward(backend, definition, Inputs(Wx, R, b, states, reset), all_states, training)
    given = taken.gate_format(definition, *Wx.shape[3:], Wx.dtype)
    if given != gate_format:
        if not training:
            return *results, empty_gates(definition, Wx, training, gate_format)
        residual = Residual(R, states, reset, results.h, results.aux, gates, given, b=b)
        gates = residual.gates_in(gate_format, definition)
    return *results, gates


_forward = _operator(_run_forward)


@torch.library.register_fake("flashrnn::forward")
def _(Wx, R, b, states, reset, cell, backend, all_states, training, gate_format):
    definition = cell_of_key(cell)
    h, last = empty_in_format(Wx, *Wx.shape[3:]), empty_states(definition, Wx)
    return h, empty_aux(definition, Wx, all_states, training), last, empty_gates(definition, Wx, training, gate_format)


def _run_backward(
    d_h: Tensor | None,
    d_aux: Tensor | None,
    d_last: Tensor | None,
    R: Tensor,
    states: Tensor | None,
    reset: Tensor | None,
    h: Tensor,
    aux: Tensor,
    gates: Tensor,
    gate_format: str,
    cell: str,
    backend: str,
    b: Tensor | None = None,  # last, because PyTorch's cache of compiled graphs may contain calls without it
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # vmap and hooks of saved tensors may change the memory format
    residual = Residual(R, states, reset, in_format(h, h), aux_in_format(aux, h), gates, gate_format, b=b)
    grads = StateGradients(d_h, (None,) * aux.shape[0] if d_aux is None else d_aux.unbind(), d_last)
    definition = cell_of_key(cell)
    with no_autocast(h):
        return tuple(run_backward(backend, definition, residual, grads))


_backward = _operator(_run_backward)


@torch.library.register_fake("flashrnn::backward")
def _(d_h, d_aux, d_last, R, states, reset, h, aux, gates, gate_format, cell, backend, b=None):
    definition, (N, D) = cell_of_key(cell), h.shape[2:]
    d_Wx, d_states = empty_in_format(h, len(definition.input_gates), N, D), empty_states(definition, h)
    return d_Wx, R.new_empty(R.shape), d_states.new_empty(len(definition.gates), N, D), d_states


def _setup_context(ctx, inputs, output):
    _, R, b, states, reset, ctx.cell, ctx.backend, _, ctx.training, ctx.gate_format = inputs
    h, aux, _, gates = output
    ctx.save_for_backward(*((b, R, states, reset, h, aux, gates) if ctx.training else ()))
    ctx.set_materialize_grads(False)


def _autograd(ctx, d_h, d_aux, d_last, _):
    if not ctx.training:
        raise RuntimeError(
            "flashrnn cannot compute gradients, because its call was traced or exported without gradients (in no_grad, "
            "or without an input or parameter that requires them); trace it with gradients to train it"
        )
    b, *saved = ctx.saved_tensors
    residual = Residual(*saved, ctx.gate_format, b=b)
    d_Wx, d_R, d_b, d_states = _gradients(d_h, d_aux, d_last, residual, ctx.cell, ctx.backend)
    return (d_Wx, d_R, d_b, None if residual.states is None else d_states, *(None,) * 6)


def _gradients(
    d_h: Tensor | None, d_aux: Tensor | None, d_last: Tensor | None, residual: Residual, cell: str, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    run = _Backward.apply if transforms_active() else _backward
    R, states, reset, h, aux, gates, gate_format, *_ = residual
    return run(d_h, d_aux, d_last, R, states, reset, h, aux, gates, gate_format, cell, backend, residual.b)


torch.library.register_autograd("flashrnn::forward", _autograd, setup_context=_setup_context)


def _note_backend(ctx, inputs, output):
    ctx.backend = inputs[11]


def _no_double_backward(ctx, *_):
    raise RuntimeError(
        f"backend {ctx.backend!r} has no second derivative: use create_graph=False or, outside of compilers, "
        "backend='vanilla', which has one"
    )


torch.library.register_autograd("flashrnn::backward", _no_double_backward, setup_context=_note_backend)


class _Forward(torch.autograd.Function):
    """flashrnn::forward for torch.func."""

    forward = staticmethod(_forward)
    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_autograd)

    @staticmethod
    def vmap(info, dims, *arguments):
        run = _Forward.apply if transforms_active() else _forward
        return folded_forward(run, info.batch_size, dims, *arguments)


class _Backward(torch.autograd.Function):
    """flashrnn::backward for torch.func."""

    forward = staticmethod(_backward)
    setup_context = staticmethod(_note_backend)
    backward = staticmethod(_no_double_backward)

    @staticmethod
    def vmap(info, dims, *arguments):
        run = _Backward.apply if transforms_active() else _backward
        return folded_backward(run, info.batch_size, dims, *arguments)
