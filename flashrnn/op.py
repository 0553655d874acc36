"""The PyTorch operator: the only door to the backends. Checks its input, then autograd, autocast, torch.compile."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from flashrnn.cells import Cell, cell_of_key, get_cell
from flashrnn.dispatch import check_backend, choose
from flashrnn.problem import (
    Backend,
    Inputs,
    Kept,
    Problem,
    States,
    as_planes,
    as_rows,
    empty_aux,
    empty_gates,
    empty_states,
    rows_like,
    state_dtype,
    tf32_allowed,
)

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def flashrnn(
    Wx: Tensor,
    R: Tensor,
    b: Tensor | None,
    states: Tensor | None = None,
    function: str | Cell = "lstm",
    backend: str = "auto",
    dtype: torch.dtype | None = None,
    reset: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run a recurrent cell over time (arXiv 2412.07752, eq. 1-2).

    Differentiable once, in reverse mode, also by torch.func (grad, vjp, jacrev); its vmap runs call after call.

    Args:
        Wx: [B, T, Gi, N, D] input part of the gates, as an nn.Linear leaves it.
        R: [Gr, N, D, D] recurrent matrices; the last axis is the previous state.
        b: [G, N, D] biases; zeros if None.
        states: [S, B, 1, N, D] initial states; zeros if None.
        function: a registered cell's name or a `flashrnn.Cell`.
        backend: a backend's name, or "auto" for the fastest that serves the problem.
        dtype: of the computation's inputs and outputs; if None, that of autocast where it is on, else that of Wx. If
            it is a half type, states across time and sums are float32.
        reset: [B, T] bool; True returns the states to zero before that step (the first token of a document).
        cu_seqlens: [number of documents + 1] cumulative lengths of the documents packed into the one sequence of a
            batch of one: another way to give `reset`. All documents start at zero, so `states` must not be given.

    Returns:
        all states [S, B, T, N, D] in `dtype`, and last states [S, B, 1, N, D] in float32 for half types, so that a
        sequence can be continued without loss.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit; the message says which and what would.
        UnsupportedProblem: the named backend cannot serve the problem; the message says why.
    """
    _check_tensors(Wx=Wx)
    _check_tensors(optional=True, states=states, cu_seqlens=cu_seqlens)
    if reset is not None and cu_seqlens is not None:
        raise ValueError("give either reset or cu_seqlens, not both")
    if states is not None and cu_seqlens is not None:
        raise ValueError("give either states or cu_seqlens: every document that cu_seqlens names starts at zero")
    if cu_seqlens is not None:
        reset = reset_mask(cu_seqlens, Wx)
    if states is not None:
        if states.dim() != 5 or states.shape[2] != 1:
            raise ValueError(f"states must be [S, B, 1, N, D], got {list(states.shape)}")
        states = states.squeeze(2)
    h, aux, last = recurrence(Wx, R, b, states, function, backend, dtype, reset, all_states=True)
    every = torch.cat([h[None], aux.to(h.dtype)]) if len(aux) else h[None]
    return every, last.unsqueeze(2)


def recurrence(
    Wx: Tensor,
    R: Tensor,
    b: Tensor | None,
    states: Tensor | None,
    function: str | Cell,
    backend: str = "auto",
    dtype: torch.dtype | None = None,
    reset: Tensor | None = None,
    all_states: bool = False,
) -> States:
    """As `flashrnn`, with what layers need: states [S, B, N, D] in and out, h apart from the other states.

    The other states of every step are results only if `all_states`.
    """
    cell = get_cell(function)
    check_backend(backend)
    _check_tensors(Wx=Wx, R=R)
    _check_tensors(optional=True, b=b, states=states, reset=reset)
    _check(cell, Wx, R, b, states, reset)
    dtype = _io_dtype(Wx, dtype)
    if b is None:
        b = Wx.new_zeros(len(cell.gates), *Wx.shape[3:], dtype=state_dtype(dtype))
    Wx, R, b = Wx.to(dtype), R.to(dtype), b.to(state_dtype(dtype))
    if states is not None:
        states = torch.cat([states[:1].to(dtype).to(b.dtype), states[1:].to(b.dtype)])  # h is of dtype at every step
    differentiable = [x for x in (Wx, R, b, states) if x is not None]
    _check_no_tangents(differentiable)
    transformed = _transformed()  # then inputs do not tell whether a gradient is wanted
    needs_grad = transformed or (torch.is_grad_enabled() and any(x.requires_grad for x in differentiable))
    run = _Forward.apply if transformed else _forward
    h, aux, last, _ = run(Wx, R, b, states, reset, cell.key, backend, all_states, needs_grad)
    return States(h, aux if all_states else aux[:, :, :0], last)


def reset_mask(cu_seqlens: Tensor, Wx: Tensor) -> Tensor:
    """[B=1, T] mask of the first tokens of documents with cumulative lengths 0 = c_0 <= c_1 <= ... <= T."""
    if Wx.shape[0] != 1 or cu_seqlens.dim() != 1:
        raise ValueError(
            f"cu_seqlens must be one-dimensional, for one packed sequence: batch size is {Wx.shape[0]}, "
            f"cu_seqlens has shape {list(cu_seqlens.shape)}; for several sequences give reset [B, T]"
        )
    if cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool:
        raise TypeError(f"cu_seqlens must be an integer tensor, got {cu_seqlens.dtype}")
    # Looking at values would wait for a GPU, and cannot be compiled.
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        ends = cu_seqlens.tolist()
        if not ends or ends[0] != 0 or ends[-1] != Wx.shape[1] or ends != sorted(ends):
            raise ValueError(f"cu_seqlens must rise from 0 to the time steps, {Wx.shape[1]}, got {ends}")
    position = torch.arange(Wx.shape[1], device=Wx.device)
    return torch.isin(position, cu_seqlens.to(Wx.device))[None]


def dtype_under_autocast(x: Tensor) -> torch.dtype:
    """The dtype in which a matrix product sees x: its own, or that of autocast, which leaves float64 alone."""
    device = x.device.type
    if x.dtype != torch.float64 and device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def _io_dtype(Wx: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    dtype = dtype or dtype_under_autocast(Wx)
    if dtype not in _DTYPES:
        raise TypeError(f"dtype must be one of {', '.join(map(str, _DTYPES))}, got {dtype!r}")
    return dtype


def _check_tensors(optional: bool = False, **inputs: Tensor | None) -> None:
    for name, x in inputs.items():
        if not isinstance(x, Tensor) and not (optional and x is None):
            raise TypeError(f"{name} must be a tensor{' or None' if optional else ''}, got {type(x).__name__}")


def _check(cell: Cell, Wx: Tensor, R: Tensor, b: Tensor | None, states: Tensor | None, reset: Tensor | None) -> None:
    if Wx.dim() != 5:
        raise ValueError(f"Wx must be [B, T, gates with input, heads, head size], got {list(Wx.shape)}")
    B, T, Gi, N, D = Wx.shape
    if Gi != len(cell.input_gates):
        raise ValueError(
            f"Wx has {Gi} gates, but cell {cell.name!r} has input for {len(cell.input_gates)}: {cell.input_gates}"
        )
    if any(size < 1 for size in (B, T, N, D)):
        raise ValueError(f"Wx must have at least one sequence, step, head and unit, got {list(Wx.shape)}")
    expected = {
        "Wx": (Wx, (B, T, Gi, N, D)),
        "R": (R, (len(cell.recurrent_gates), N, D, D)),
        "b": (b, (len(cell.gates), N, D)),
        "states": (states, (len(cell.states), B, N, D)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {list(shape)} for Wx {list(Wx.shape)}, got {list(tensor.shape)}")
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, got {tensor.dtype}")
    if reset is not None:
        check_reset(reset, B, T)
    for name, tensor in (("R", R), ("b", b), ("states", states), ("reset", reset)):
        if tensor is not None and tensor.device != Wx.device:
            raise ValueError(f"{name} is on {tensor.device}, but Wx is on {Wx.device}; move them to one device")


def check_reset(reset: Tensor, batch: int, time: int) -> None:
    """Raise unless it is bool [batch, time]."""
    if not isinstance(reset, Tensor) or reset.dtype != torch.bool:
        raise TypeError(f"reset must be a bool tensor, got {getattr(reset, 'dtype', type(reset).__name__)}")
    if tuple(reset.shape) != (batch, time):
        raise ValueError(f"reset must be [B, T], here {[batch, time]}, got {list(reset.shape)}")


def _check_no_tangents(inputs: list[Tensor]) -> None:
    """Without this, forward-mode differentiation would give zeros."""
    if torch.compiler.is_compiling():
        return
    if any(torch.autograd.forward_ad.unpack_dual(x).tangent is not None for x in inputs):
        raise NotImplementedError(
            "flashrnn has no forward-mode derivative (jvp, jacfwd, hessian); use grad, vjp or jacrev"
        )


def _transformed() -> bool:
    """Whether torch.func is at work: it does not see the gradients that are registered with operators."""
    return torch._C._are_functorch_transforms_active()


def _backend(name: str, cell: Cell, rows: Tensor, reset: Tensor | None, training: bool) -> Backend:
    """That of a problem with such `rows` [B, T, ..., N, D].

    For the backward the same as for the forward before it, or, where PyTorch's setting for TF32 has changed since, one
    that reads what the other has kept.
    """
    tf32 = tf32_allowed(rows.dtype, rows.device)
    problem = Problem(cell, *rows.shape[-2:], rows.dtype, rows.device, training, reset=reset is not None, tf32=tf32)
    return choose(name, problem)


def _initial(backend: Backend, cell: Cell, states: Tensor | None, rows: Tensor) -> Tensor | None:
    """The initial states as a backend takes them, of a problem with such `rows`."""
    if states is not None:
        return states.contiguous()
    return None if backend.knows_zeros else empty_states(cell, rows).zero_()


def _no_autocast(Wx: Tensor) -> torch.autocast:
    """Inputs come in the dtypes that they are to be computed in: what autocast asks for is in `_io_dtype`."""
    return torch.autocast(Wx.device.type, enabled=False)


def _operator(run: Callable) -> torch._ops.OpOverload:
    """The operator flashrnn::<name of run>.

    torch.library.custom_op would do, but imports TorchDynamo when it is first called, which takes seconds.
    """
    name = run.__name__.removeprefix("_run_")
    schema = torch.library.infer_schema(run, mutates_args=())
    torch.library.define(f"flashrnn::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(f"flashrnn::{name}", "CompositeExplicitAutograd", _not_compiled(run))
    return getattr(torch.ops.flashrnn, name).default


def _not_compiled(run: Callable) -> Callable:
    """`run`, into which TorchDynamo does not look: where it cannot compile what calls an operator, as with torch.func's
    grad, it would compile the backends."""

    def call(*args):
        if get_eval_frame_callback() in (None, False):  # it is not at work, and need not be imported
            return run(*args)
        return torch.compiler.disable(run)(*args)

    return call


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    definition = cell_of_key(cell)
    with _no_autocast(Wx):
        chosen = _backend(backend, definition, Wx, reset, training)
        inputs = Inputs(Wx, R, b, _initial(chosen, definition, states, Wx), reset)
        results, gates = chosen.forward(definition, inputs, all_states, training)
    return *results, gates


_forward = _operator(_run_forward)


@torch.library.register_fake("flashrnn::forward")
def _(Wx, R, b, states, reset, cell, backend, all_states, training):
    definition = cell_of_key(cell)
    h, last = rows_like(Wx, *Wx.shape[3:]), empty_states(definition, Wx)
    return h, empty_aux(definition, Wx, all_states, training), last, empty_gates(definition, Wx, training)


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
    cell: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    definition, grads = cell_of_key(cell), States(d_h, d_aux, d_last)
    with _no_autocast(h):
        chosen = _backend(backend, definition, h, reset, True)
        states = _initial(chosen, definition, states, h)
        # what keeps saved tensors (vmap, hooks) may change their layout
        kept = Kept(R, states, reset, as_rows(h, h), as_planes(aux, h), as_rows(gates, h))
        return tuple(chosen.backward(definition, kept, grads))


_backward = _operator(_run_backward)


@torch.library.register_fake("flashrnn::backward")
def _(d_h, d_aux, d_last, R, states, reset, h, aux, gates, cell, backend):
    definition, (N, D) = cell_of_key(cell), h.shape[2:]
    d_Wx, d_states = rows_like(h, len(definition.input_gates), N, D), empty_states(definition, h)
    return d_Wx, R.new_empty(R.shape), d_states.new_empty(len(definition.gates), N, D), d_states


def _setup_context(ctx, inputs, output):
    _, R, _, states, reset, ctx.cell, ctx.backend, _, ctx.training = inputs
    h, aux, _, gates = output
    ctx.save_for_backward(*((R, states, reset, h, aux, gates) if ctx.training else ()))
    ctx.set_materialize_grads(False)


def _autograd(ctx, d_h, d_aux, d_last, _):
    if not ctx.training:
        raise RuntimeError(
            "flashrnn kept nothing for a gradient: its call was traced or exported without gradients (under no_grad, "
            "or without a parameter or an input that asks for them); trace it with gradients to train it"
        )
    run, kept = _Backward.apply if _transformed() else _backward, Kept(*ctx.saved_tensors)
    d_Wx, d_R, d_b, d_states = run(d_h, d_aux, d_last, *kept, ctx.cell, ctx.backend)
    return (d_Wx, d_R, d_b, None if kept.states is None else d_states, None, None, None, None, None)


torch.library.register_autograd("flashrnn::forward", _autograd, setup_context=_setup_context)


def _no_double_backward(ctx, *_):
    raise RuntimeError(
        "flashrnn has no second derivative; use create_graph=False, or write the time loop in plain PyTorch operations"
    )


torch.library.register_autograd("flashrnn::backward", _no_double_backward)


class _Forward(torch.autograd.Function):
    """flashrnn::forward for torch.func."""

    generate_vmap_rule = True
    forward = staticmethod(_forward)
    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_autograd)


class _Backward(torch.autograd.Function):
    """flashrnn::backward for torch.func."""

    generate_vmap_rule = True
    forward = staticmethod(_backward)
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(_no_double_backward)
