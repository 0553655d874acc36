"""Reductions over the units of a head, the only way for a cell's step to read other units.

On tensors they reduce the last axis. A trace has one unit, a 0-dimensional tensor: there they are operators of their
own, which the recorder writes down, and so are the reductions in their gradients.

The reductions of a `layer_norm` or `rms_norm` do not depend on each other, so kernels get them in one exchange. The
variance is a reduction of its own because the mean square minus the squared mean cancels in float32. Kernels read the
units twice where they hold them all; otherwise they sum deviations from one of the numbers, and their squares.
"""

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from flashrnn.cells.graph import REDUCTIONS


def _reduction(over_units: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a reduction by `over_units`, which leaves one element of the last axis; its result has the shape of x."""

    @wraps(over_units)
    def reduction(x: Tensor) -> Tensor:
        if not isinstance(x, Tensor):
            raise TypeError(f"flashrnn.{over_units.__name__} takes a tensor, not {type(x).__name__}")
        if has_torch_function((x,)):
            return handle_torch_function(reduction, (x,), x)
        if x.ndim == 0:
            return _OfOneUnit.apply(f"unit_{over_units.__name__}", x)
        return over_units(x).expand_as(x)

    CALLED.add(reduction)
    return reduction


CALLED: set[Callable[[Tensor], Tensor]] = set()
"""The reductions that a step may call, each a function of one tensor."""


@_reduction
def sum(x: Tensor) -> Tensor:
    """Return the sum of a gate or state over the units of the head, for every unit: [..., D] -> [..., D]."""
    return x.sum(-1, keepdim=True)


@_reduction
def mean(x: Tensor) -> Tensor:
    """Return the mean of a gate or state over the units of the head, for every unit: [..., D] -> [..., D]."""
    return x.mean(-1, keepdim=True)


@_reduction
def max(x: Tensor) -> Tensor:
    """Return the maximum of a gate or state over the units of the head, for every unit: [..., D] -> [..., D].

    Units that share the maximum share its gradient.
    """
    return x.amax(-1, keepdim=True)


@_reduction
def variance(x: Tensor) -> Tensor:
    """Return the mean squared deviation from the mean over the units of the head, for every unit."""
    return x.var(-1, correction=0, keepdim=True)


def layer_norm(*values: Tensor, eps: float = 1e-5) -> Tensor | tuple[Tensor, ...]:
    """Normalise gates or states to mean 0 and variance 1 over the units of the head (LayerNorm, arXiv 1607.06450).

    Several values are normalised jointly, as one LayerNorm over their concatenation. Weights and biases are gates of
    the cell with neither an input nor a recurrent part: `(1 + weight) * flashrnn.layer_norm(x) + bias`.

    Args:
        values: gates, states or tensors computed from them, each [..., D].
        eps: added to the variance.

    Returns:
        A tensor [..., D] for each of `values`, in a tuple if there are several.
    """
    return _one_or_all(_normalised(values, eps, centered=True))


def rms_norm(*values: Tensor, eps: float = 1e-5) -> Tensor | tuple[Tensor, ...]:
    """Normalise gates or states to mean square 1 over the units of the head (RMSNorm, arXiv 1910.07467).

    Arguments and results are those of `layer_norm`.
    """
    return _one_or_all(_normalised(values, eps, centered=False))


def _normalised(values: tuple[Tensor, ...], eps: float, centered: bool) -> tuple[Tensor, ...]:
    if isinstance(values[0], Tensor) and values[0].ndim == 0:
        return _NormOfOneUnit.apply(eps, centered, *values)
    average, scale = _average_and_scale(values, eps, centered)
    return tuple((x - average if centered else x) * scale for x in values)


def _average_and_scale(values: tuple[Tensor, ...], eps: float, centered: bool) -> tuple[Tensor | None, Tensor]:
    if not centered:
        return None, torch.rsqrt(mean(_average([x * x for x in values])) + eps)
    if len(values) == 1:
        average, squared = mean(values[0]), variance(values[0])
    else:
        center = _average(values)  # over each unit's values: their variance is that of the centers plus that within
        average = mean(center)
        deviations = [x - center.detach() for x in values]  # they sum to 0, so the gradient by the center is 0
        squared = variance(center) + mean(_average([x * x for x in deviations]))
    return average, torch.rsqrt(squared + eps)


def _average(values) -> Tensor:
    first, *others = values
    for x in others:
        first = first + x
    return first * (1 / (1 + len(others))) if others else first  # a kernel would take long to divide


def _one_or_all(values) -> Tensor | tuple[Tensor, ...]:
    values = tuple(values)
    return values if len(values) > 1 else values[0]


class _OfOneUnit(torch.autograd.Function):
    """A reduction in a trace. Its gradient is again a reduction over units."""

    @staticmethod
    def forward(ctx, name: str, x: Tensor) -> Tensor:
        result = _unit(name, x)
        ctx.name = name
        if name in ("unit_variance", "unit_max"):
            ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx, d: Tensor) -> tuple[None, Tensor]:
        if not ctx.saved_tensors:
            return None, _unit(ctx.name, d)
        x, result = ctx.saved_tensors
        if ctx.name == "unit_variance":
            return None, 2 * (x - _unit("unit_mean", x)) * _unit("unit_mean", d)
        is_largest = torch.where(x == result, 1.0, torch.zeros_like(x))
        return None, is_largest / _unit("unit_sum", is_largest) * _unit("unit_sum", d)


class _NormOfOneUnit(torch.autograd.Function):
    """A norm in a trace, with LayerNorm's gradient by the normalised values: fewer operations than a derived one."""

    @staticmethod
    def forward(ctx, eps: float, centered: bool, *values: Tensor) -> tuple[Tensor, ...]:
        average, scale = _average_and_scale(values, eps, centered)
        normalised = tuple((x - average if centered else x) * scale for x in values)
        torch.ops.flashrnn.unit_norm(values, normalised, eps, centered)  # for the trace
        ctx.save_for_backward(scale, *normalised)
        ctx.centered = centered
        return normalised

    @staticmethod
    def backward(ctx, *d: Tensor) -> tuple[Tensor | None, ...]:
        scale, *normalised = ctx.saved_tensors
        along = _unit("unit_mean", _average([one * x for one, x in zip(d, normalised, strict=True)]))
        across = _unit("unit_mean", _average(d)) if ctx.centered else 0.0
        return None, None, *(scale * (one - across - x * along) for one, x in zip(d, normalised, strict=True))


def _unit(name: str, x: Tensor) -> Tensor:
    return getattr(torch.ops.flashrnn, name)(x)


for _name in REDUCTIONS:  # their results for the single unit of a trace
    torch.library.define(f"flashrnn::{_name}", "(Tensor x) -> Tensor")
    _of_one = torch.zeros_like if _name == "unit_variance" else torch.clone
    torch.library.impl(f"flashrnn::{_name}", "CompositeExplicitAutograd", _of_one)

torch.library.define("flashrnn::unit_norm", "(Tensor[] values, Tensor[] normalised, float eps, bool centered) -> ()")
torch.library.impl("flashrnn::unit_norm", "CompositeExplicitAutograd", lambda *_: None)
