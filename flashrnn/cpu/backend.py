"""Backend `cpu_fused`: the compiled time loop of a head on the CPU, with weights and gates in the caches."""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashrnn.cells import Cell
from flashrnn.cells.gates import recurrent_only
from flashrnn.cells.trace import untraceable
from flashrnn.cpu import build
from flashrnn.cpu.call import LARGEST_IN_LOOP, Prepared, Sizes, prepare
from flashrnn.memory_format import empty_in_format, in_format, is_time_major
from flashrnn.problem import (
    Gradients,
    Inputs,
    Problem,
    StateGradients,
    States,
    aux_dtype,
    aux_gradient,
    empty_aux,
    initial_states,
)
from flashrnn.products import weight_gradient_of_states
from flashrnn.residual import GateFormat, Residual, empty_gates, residual_dtype, saturated

NUMBA_IS_MISSING = "numba is not installed: pip install numba"
_LARGEST_IN_BFLOAT16 = 768  # head size; with larger heads and many sequences, PyTorch's bfloat16 products are faster


class CpuFused:
    """Computes in the state dtype. In bfloat16, h is rounded after every step."""

    name = "cpu_fused"

    def gate_format(self, cell: Cell, heads: int, head_dim: int, dtype: torch.dtype) -> GateFormat:
        return "NGD"

    def unsupported_reason(self, problem: Problem) -> str | None:
        if problem.device.type != "cpu":
            return f"it runs on CPUs, not on {problem.device.type}"
        if reason := problem.dtype_reason((torch.bfloat16, torch.float32, torch.float64)):
            return reason
        if problem.dtype == torch.bfloat16 and problem.head_dim > _LARGEST_IN_BFLOAT16:
            return f"in bfloat16 it supports heads of up to {_LARGEST_IN_BFLOAT16} units; vanilla is faster beyond that"
        if not _installed():
            return untraceable(problem.cell) or NUMBA_IS_MISSING
        return untraceable(problem.cell)

    def forward(self, cell: Cell, inputs: Inputs, all_states: bool, training: bool) -> tuple[States, Tensor]:
        Wx, R, b, states, reset = inputs
        kernel = prepared("forward", cell, Wx)
        if training:
            prepared("backward", cell, Wx)
        dtype, states = Wx.dtype, initial_states(cell, states, Wx)
        x = in_format(Wx.to(states.dtype), Wx)
        h, last = empty_in_format(x, *x.shape[3:]), torch.empty_like(states)
        aux, gates = empty_aux(cell, x, all_states, training), empty_gates(cell, x, training, "NGD")
        kernel.run(
            h=h,
            x=x,
            weights=weights(kernel.sizes, R.to(states.dtype)),
            b=b.to(states.dtype).contiguous(),
            reset=None if reset is None else in_format(reset, h),
            initial=states.unbind(),
            last=last.unbind(),
            aux=aux if aux.numel() else None,
            pre=gates if gates.numel() else None,
        )
        aux = saturated(aux, aux_dtype(cell, dtype, all_states))
        return States(h.to(dtype), aux, last), saturated(gates, residual_dtype(dtype))

    def backward(self, cell: Cell, residual: Residual, grads: StateGradients) -> Gradients:
        R, states, reset, h, aux, *_ = residual
        dtype, initial = h.dtype, initial_states(cell, states, h)
        h, aux, gates = (tensor.to(initial.dtype) for tensor in (h, aux, residual.gates_in("NGD", cell)))
        d_initial = torch.empty_like(initial)
        in_place = residual.donated and h.shape[2] == 1 and cell.input_gates == cell.gates
        d_x, d_R, d_b = gradients(
            prepared("backward", cell, h),
            R.to(h.dtype),
            initial=initial.unbind(),
            reset=None if reset is None else in_format(reset, h),
            h=h,
            gates=gates,
            aux=aux,
            d_h=None if grads.h is None else in_format(grads.h.to(h.dtype), h),
            d_aux=aux_gradient(grads, aux, h.dtype),
            d_last=[None] * len(cell.states) if grads.last is None else grads.last.to(h.dtype).contiguous().unbind(),
            d_initial=d_initial.unbind(),
            d_x=gates.transpose(2, 3) if in_place else None,  # new memory would cost page faults
        )
        return Gradients(d_x.to(dtype), d_R.to(R.dtype), d_b, d_initial)


class InputProduct(NamedTuple):
    """The input product of a layer of one head whose gradients the kernel computes; see `call.with_product`."""

    x: Tensor  # [rows, features], with rows in the same order in memory as those of h
    W: Tensor  # [Gi * D, features]
    d_x: Tensor | None  # memory for the gradient of x, if it is needed


def gradients(
    kernel: Prepared,
    R: Tensor,
    *,
    initial: Sequence[Tensor],
    reset: Tensor | None,
    h: Tensor | None,
    gates: Tensor,
    d_h: Tensor | None,
    d_last: Sequence[Tensor | None],
    d_initial: Sequence[Tensor],
    d_x: Tensor | None = None,
    product: InputProduct | None = None,
    aux: Tensor | None = None,
    d_aux: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of Wx, R and b, and write those of the initial states.

    All tensors have the state dtype. With `product`, the kernel only needs their addresses, so axes of size one may be
    missing.

    Args:
        kernel: the kernel for these sizes.
        R: [Gr, N, D, D].
        initial: the initial states, each [B, N, D], contiguous.
        reset: [B, T] in the memory format of h, or None.
        h: [B, T, N, D]; None for a single step with `product`.
        gates: [B, T, N, G, D], from the forward.
        d_h: [B, T, N, D] in the memory format of h, or None.
        d_last: the gradients of the last states, each like `initial` or None.
        d_initial: memory for the gradients of the initial states.
        d_x: memory for the gradient of Wx, [B, T, Gi, N, D] in the memory format of h; None allocates it.
        product: the input product, if the kernel computes its gradients. The gradient of W is then returned instead of
            that of Wx.
        aux: the other states of every step; None for a single step.
        d_aux: the gradients of aux, or None.
    """
    cell, N, D = kernel.sizes.cell, *R.shape[1:3]
    by_rows, afterwards = kernel.by_rows, D > LARGEST_IN_LOOP
    if d_x is None and product is None:
        d_x = empty_in_format(h, len(cell.input_gates), N, D)
    d_u = empty_in_format(h, len(recurrent_only(cell)), N, D) if afterwards else None
    d_R = None if afterwards else _sums(kernel, R, (len(cell.recurrent_gates), N, D), kernel.width)
    d_b = _sums(kernel, R, (len(cell.gates), N), kernel.width)
    of_product = {} if product is None else _of_product(kernel, product)
    kernel.run(
        h=h,
        R=_transposed(R) if by_rows else columns(R),
        reset=reset,
        initial=initial,
        pre=gates,
        aux=aux,
        d_aux=d_aux,
        d_h=d_h,
        d_x=d_x,
        d_u=d_u,
        d_R=d_R,
        d_b=d_b,
        one=None if by_rows else _one(R.dtype),
        d_last=d_last,
        d_initial=d_initial,
        **of_product,
    )
    if product is not None:
        d_x = _sum_of_parts(kernel, of_product["d_W"], kernel.sizes.features)
    d_b = _sum_of_parts(kernel, d_b, D)
    if not afterwards:
        d_R = _sum_of_parts(kernel, d_R, D)
    else:
        d_R = weight_gradient_of_states(cell, d_x, d_u, h, initial, reset)
    return d_x, d_R, d_b


def _of_product(kernel: Prepared, product: InputProduct) -> dict[str, Tensor | None]:
    """Return the arguments of the kernel for the input product."""
    W = padded(product.W, build.whole_vectors(kernel.sizes.features))
    return {"source": product.x, "W": W, "d_source": product.d_x, "d_W": _sums(kernel, W, W.shape[:1], W.shape[1])}


@cache
def _one(dtype: torch.dtype) -> Tensor:
    return torch.ones(1, dtype=dtype, device="cpu")


@cache
def _installed() -> bool:
    return find_spec("numba") is not None


def prepared(direction: str, cell: Cell, rows: Tensor) -> Prepared:
    """Return the kernel for `rows` [B, T, ..., N, D]; raises KernelUnavailable."""
    B, T, *_, N, D = rows.shape
    return prepare(Sizes(direction, cell, B, T, N, D, is_time_major(rows), rows.dtype, torch.get_num_threads()))


def weights(sizes: Sizes, matrices: Tensor) -> Tensor:
    """Return [..., D, inputs], which R is, in the memory format of the forward kernel for these sizes."""
    return matrices.contiguous() if sizes.by_rows else columns(matrices.transpose(-2, -1))


def columns(x: Tensor) -> Tensor:
    """Return x [..., D] padded with zeros to the row length of the kernel's matrices."""
    return padded(x, build.tile(x.shape[-1]).row)


def padded(x: Tensor, width: int) -> Tensor:
    """Return x with rows padded with zeros to `width` elements."""
    missing = width - x.shape[-1]
    return (pad(x, (0, missing)) if missing else x).contiguous()


def _transposed(R: Tensor) -> Tensor:
    """Return R [Gr, N, D, D] with each matrix transposed.

    Each matrix is copied by itself, because PyTorch transposes only single matrices block by block.
    """
    out = torch.empty_like(R, memory_format=torch.contiguous_format)
    for to, matrix in zip(out.flatten(0, 1), R.flatten(0, 1), strict=True):
        to.copy_(matrix.t())
    return out


def _sums(kernel: Prepared, like: Tensor, shape: tuple[int, ...], width: int) -> Tensor:
    """Return zeros [*shape, width], to which the kernel adds; with several parts of the batch, such zeros for each."""
    return like.new_zeros(*shape, width) if kernel.parts == 1 else like.new_zeros(kernel.parts, *shape, width)


def _sum_of_parts(kernel: Prepared, d: Tensor, size: int) -> Tensor:
    """Return the sum over the parts of `_sums`, without padding: [*shape, size]."""
    d = d if kernel.parts == 1 else d.sum(0)
    return d if d.shape[-1] == size else d[..., :size].contiguous()
