"""`flashrnn.flashrnn`: checks the arguments of a call, then runs it eagerly or as an operator."""

from functools import partial
from operator import index

import torch
from torch import Tensor

from flashrnn import eager, hoisting, loop, op, repeated
from flashrnn.cells import Cell, get_cell
from flashrnn.dispatch import check_backend, padding
from flashrnn.documents import Documents, of_cu_seqlens
from flashrnn.head_size import with_head_size
from flashrnn.problem import Inputs, state_dtype

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
    return_states: bool = False,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Run a recurrent cell over time (arXiv 2412.07752, eq. 1-2).

    The function has first derivatives in reverse mode, also by torch.func (grad, vjp, jacrev). With backend="vanilla"
    it has derivatives of all modes and orders. torch.func.vmap runs all elements in one call, as further heads or
    sequences.

    Args:
        Wx: [B, T, Gi, N, D], the projected inputs of the gates.
        R: [Gr, N, D, D], the recurrent matrices; the last axis is the previous h.
        b: [G, N, D], the biases; None means zeros.
        states: [S, B, N, D], the initial states; None means zeros.
        function: the name of a registered cell, or a `flashrnn.Cell`.
        backend: the name of a backend, or "auto" for the fastest that supports the call. If its kernels cannot be
            compiled on this machine, "auto" selects the next one and warns with the reason.
        dtype: dtype of the computation's inputs and outputs. None means that of autocast if it is enabled, otherwise
            that of Wx. For half types, sums and the states between steps are float32, but for h.
        reset: bool [B, T]. True sets the states to zero before that step, which is the first one of a document.
        cu_seqlens: [number of documents + 1], the cumulative lengths of documents that are concatenated in a batch of
            one. It replaces `reset` and excludes `states`, because all documents start at zero. Short documents run in
            parallel, in as many time steps as the longest one has, except in compiled code and CUDA graphs. If the
            tensor is on a GPU, its first call waits for the values; pass it on the CPU to avoid that.
        return_states: also return every state after every step.

    Returns:
        h [B, T, N, D] after every step, in `dtype`, and the last states [S, B, N, D], in float32 for half types, so
        that a sequence continues without loss. With `return_states` also a tuple of S tensors [B, T, N, D], one per
        state: h itself, and the others in the dtype of the last states.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not match; the message names the expected ones.
        UnsupportedProblem: the named backend does not support the call; the message gives the reason.
        RuntimeError: the kernels of the named backend cannot be compiled here; the message gives the reason.
    """
    cell, known, given = get_cell(function), None, Inputs(Wx, R, b, states, reset)
    if cu_seqlens is None and dtype is None and not return_states:
        known = repeated.key(cell, backend, given)
        if (done := repeated.run(known, given)) is not None:
            return done
    check_backend(backend)
    _check_tensors(Wx=Wx, R=R)
    _check_tensors(optional=True, b=b, states=states, reset=reset, cu_seqlens=cu_seqlens)
    if cu_seqlens is not None:
        if reset is not None:
            raise ValueError("give either reset or cu_seqlens, not both")
        if states is not None:
            raise ValueError("give either states or cu_seqlens: every document that cu_seqlens names starts at zero")
    _check(cell, Wx, R, b, states, reset)
    dtype = _io_dtype(Wx, dtype)
    if cu_seqlens is not None:
        documents = of_cu_seqlens(cu_seqlens, Wx)
        if isinstance(documents, Documents):
            return _side_by_side(documents, Wx, R, b, cell, backend, dtype, return_states)
        reset = documents.resets(backward=False)
    if b is None:
        b = Wx.new_zeros(len(cell.gates), *Wx.shape[3:], dtype=state_dtype(dtype))
    inputs = Inputs(Wx, R, b, states, reset)
    if Wx.shape[0] == 0:
        run = _nothing
    elif Wx.shape[-1] % 2 and (units := _padding(backend, cell, Wx, dtype)):
        run = partial(_padded, units)
    elif eager.serves(inputs):
        _, T, _, *sizes = Wx.shape
        run = hoisting.recurrence if hoisting.serves(cell, backend, dtype, Wx.device, T, *sizes) else eager.recurrence
    else:
        run = loop.recurrence if loop.serves(backend, inputs) else op.recurrence
    h, last, others = run(cell, backend, dtype, return_states, inputs)
    if run is eager.recurrence:
        repeated.remember(known, cell, backend, given)
    return (h, last, (h, *others)) if return_states else (h, last)


def _side_by_side(
    documents: Documents, Wx: Tensor, R: Tensor, b: Tensor | None, cell: Cell, backend: str, dtype, return_states: bool
) -> tuple:
    """Run `flashrnn` on one sequence of documents, each of which starts with states of zero."""
    rows, reset = documents.spread(Wx, backward=False), documents.resets(backward=False)
    h, last, *every = flashrnn(rows, R, b, None, cell, backend, dtype, reset, return_states=return_states)
    last = torch.stack(documents.ends(h, last, (), backward=False))
    every = [tuple(documents.gather(state, backward=False) for state in states) for states in every]
    h = every[0][0] if every else documents.gather(h, backward=False)
    return h, last, *every


def _padding(backend: str, cell: Cell, Wx: Tensor, dtype: torch.dtype) -> int:
    # `index` resolves the symbolic sizes of compilers, which `padding` cannot take; `int` does not.
    N, D = index(Wx.shape[3]), index(Wx.shape[4])
    return padding(backend, cell.key, N, D, dtype, Wx.device, torch.is_grad_enabled())


def _padded(
    units: int, cell: Cell, backend: str, dtype: torch.dtype, return_states: bool, inputs: Inputs
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Run heads of an odd size padded by `units` units, which are zero and do not affect the others."""
    Wx, R, b, states, reset = inputs
    D = Wx.shape[-1]
    rows, matrices, biases, states = with_head_size([Wx.to(dtype), R, b, states], D + units, matrices=1)
    h, last, *every = flashrnn(rows, matrices, biases, states, cell, backend, dtype, reset, return_states=return_states)
    h, last, *others = with_head_size([h, last, *(every[0][1:] if every else ())], D)
    return h, last, tuple(others)


def _nothing(
    cell: Cell, backend: str, dtype: torch.dtype, return_states: bool, inputs: Inputs
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return the results for an empty batch. They depend on all inputs, which therefore get gradients of zero."""
    Wx, R, b, states, _ = inputs
    nothing = R.sum() + b.sum()
    last = Wx.new_zeros(len(cell.states), *Wx[:, 0, 0].shape, dtype=state_dtype(dtype)) + nothing
    last = last.to(state_dtype(dtype)) if states is None else last.to(state_dtype(dtype)) + states
    h = (Wx.sum(2) + nothing).to(dtype)
    others = tuple(h.to(last.dtype) for _ in cell.states[1:])
    return h, last, others


def dtype_under_autocast(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products with x: its own, or that of autocast, which does not apply to float64."""
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
    if T < 1 or N < 1 or D < 1:
        raise ValueError(f"Wx must have at least one step, head and unit, got {list(Wx.shape)}")
    expected = (
        ("Wx", Wx, (B, T, Gi, N, D)),
        ("R", R, (len(cell.recurrent_gates), N, D, D)),
        ("b", b, (len(cell.gates), N, D)),
        ("states", states, (len(cell.states), B, N, D)),
    )
    for name, tensor, shape in expected:
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(f"{name} must be {list(shape)} for Wx {list(Wx.shape)}, got {list(tensor.shape)}")
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, got {tensor.dtype}")
    if reset is not None:
        check_reset(reset, B, T)
    for name, tensor in (("R", R), ("b", b), ("states", states), ("reset", reset)):
        if tensor is not None and tensor.device != Wx.device:
            raise ValueError(f"{name} is on {tensor.device}, but Wx is on {Wx.device}; move them to one device")


def check_reset(reset: Tensor, batch: int, *time: int) -> None:
    """Raise TypeError or ValueError unless `reset` is bool [batch, time] or, for a single step, [batch]."""
    if not isinstance(reset, Tensor) or reset.dtype != torch.bool:
        kind = getattr(reset, "dtype", type(reset).__name__)
        raise TypeError(f"reset must be a bool tensor, got {kind}; convert a mask of 0 and 1 by .bool()")
    if tuple(reset.shape) != (batch, *time):
        shape = "[B, T]" if time else "[B]"
        raise ValueError(f"reset must be {shape}, here {[batch, *time]}, got {list(reset.shape)}")
