"""The recurrence under torch.func.vmap: one call, with the mapped dimension folded into the heads or the batch."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Results = tuple[Tensor, ...]
Dims = tuple[int | None, ...]


def folded_forward(run: Callable[..., Results], size: int, dims: Dims, *arguments) -> tuple[Results, Dims]:
    """Return the results of flashrnn::forward under vmap, and the mapped dimension of each.

    Args:
        run: the operator.
        size: size of the mapped dimension.
        dims: the mapped dimension of each argument, or None.
        arguments: the operator's arguments.
    """
    inputs, options = arguments[:5], arguments[5:]
    reset, N, B, gate_format = dims[4], _size(arguments[0], dims[0], 3), _size(arguments[0], dims[0], 0), options[-1]
    with_weights = dims[1] is not None or dims[2] is not None
    if with_weights and reset is not None:  # cannot become heads, because all heads of a call share its reset
        return _one_by_one(run, size, dims, *arguments)
    if with_weights:
        into = (3, 1, 1, 2, None)  # axes of Wx, R, b and states that are heads
        results = run(*_folded(size, dims, inputs, into), *options)
        return _apart(results, (2, 3, 2, _heads_axis(gate_format)), size, N)
    into = (0, None, None, 1, 0)
    results = run(*_folded(size, dims, inputs, into), *options)
    return _apart(results, (0, 1, 1, 0), size, B)


def folded_backward(run: Callable[..., Results], size: int, dims: Dims, *arguments) -> tuple[Results, Dims]:
    """Return the results of flashrnn::backward under vmap; see `folded_forward`.

    Each mapped call has its own gradients of the weights, even if all calls share the weights.
    """
    *tensors, gate_format, cell, backend, b = arguments
    if dims[5] is not None:
        return _one_by_one(run, size, dims, *arguments)
    into = (2, 3, 2, 1, 2, None, 2, 3, _heads_axis(gate_format), 1)
    *tensors, b = _folded(size, (*dims[:9], dims[12]), (*tensors, b), into)
    results = run(*tensors, gate_format, cell, backend, b)
    return _apart(results, (3, 1, 1, 2), size, _size(arguments[6], dims[6], 2))


def _heads_axis(gate_format: str) -> int:
    """Return the axis of the heads in gates [B, T, *the axes of the format]."""
    return 2 + gate_format.index("N")


def _size(x: Tensor, dim: int | None, axis: int) -> int:
    """Return the size of an axis of x; axes are counted without the mapped dimension."""
    return x.shape[axis + (dim is not None and dim <= axis)]


def _folded(size: int, dims: Dims, tensors: Sequence[Tensor | None], into: Dims) -> list[Tensor | None]:
    """Return the tensors with the mapped dimension folded into axis `into`, as its outer part; repeat unmapped ones."""
    return [
        x if x is None or axis is None else _with(x, dim, size, axis).flatten(axis, axis + 1)
        for x, dim, axis in zip(tensors, dims[: len(tensors)], into, strict=True)
    ]


def _with(x: Tensor, dim: int | None, size: int, axis: int) -> Tensor:
    if dim is not None:
        return x.movedim(dim, axis)
    return x.unsqueeze(axis).expand(*x.shape[:axis], size, *x.shape[axis:])


def _apart(results: Results, axes: Sequence[int], size: int, each: int) -> tuple[Results, Dims]:
    return tuple(x.unflatten(axis, (size, each)) for x, axis in zip(results, axes, strict=True)), tuple(axes)


def _one_by_one(run: Callable[..., Results], size: int, dims: Dims, *arguments) -> tuple[Results, Dims]:
    calls = [
        run(*(x if dim is None else x.select(dim, k) for x, dim in zip(arguments, dims, strict=True)))
        for k in range(size)
    ]
    return tuple(torch.stack(results) for results in zip(*calls, strict=True)), (0,) * len(calls[0])
