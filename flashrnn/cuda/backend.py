"""Backend `cuda_fused`: the whole time loop in one kernel, R on the chip."""

import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import count

import torch
from torch import Tensor

from flashrnn.cells import Cell
from flashrnn.cuda import concurrent_gradient, tiling
from flashrnn.cuda.available import unavailable
from flashrnn.cuda.build import Binary
from flashrnn.cuda.concurrent_gradient import SHORTEST, ConcurrentGradient
from flashrnn.cuda.kernel import compile_best
from flashrnn.cuda.launch import LoadedKernel, load, zeros
from flashrnn.cuda.source import Tiling, Variant, variant_of
from flashrnn.cuda.weight_gradient import weight_gradient
from flashrnn.gpu import Gpu, device_gpu
from flashrnn.problem import (
    Gradients,
    Inputs,
    Kept,
    Problem,
    States,
    aligned,
    as_aux,
    as_rows,
    contiguous,
    empty_aux,
    empty_gates,
    empty_states,
    kept_dtype,
    rows_like,
    saturated,
)
from flashrnn.products import recurrent_only, row_strides


class CudaFused:
    """`choose` gives the kernel and the tiling of a call, as compile_best does."""

    name = "cuda_fused"
    knows_zeros = True

    def __init__(self, choose: Callable[..., tuple[Binary, Tiling]] = compile_best) -> None:
        self._choose = choose

    def supports(self, problem: Problem) -> str | None:
        if reason := unavailable(problem, (torch.bfloat16, torch.float16, torch.float32)):
            return reason
        if problem.head_dim % 2:
            return f"head sizes must be even, got {problem.head_dim}"
        sizes = problem.cell, problem.heads, problem.head_dim, problem.dtype, problem.gpu, problem.tf32
        for direction in problem.directions:
            if reason := tiling.infeasible(direction, *sizes):
                return f"{direction} does not fit on the chip: {reason.summary}"
        return None

    def forward(self, cell: Cell, inputs: Inputs, all_states: bool, training: bool) -> tuple[States, Tensor]:
        Wx, R, b, states, reset = inputs
        B, T, _, N, D = Wx.shape
        Wx = aligned(as_rows(Wx, Wx))
        aux, gates = empty_aux(cell, Wx, all_states, training), empty_gates(cell, Wx, training)
        h, last = rows_like(Wx, N, D), empty_states(cell, Wx)
        variant = variant_of(reset, h, aux, training)
        kernel, layout = _kernel(self._choose, "forward", cell, D, N, B, Wx.dtype, variant, Wx.device.index)
        initial = _or_zeros(states, last)
        arguments = (Wx, R.contiguous(), b.contiguous(), initial, contiguous(reset), h, aux, last, gates)
        for first, groups in kernel.rounds(layout.batches(B) * N):
            rings = _rings(groups, layout, Wx, variant.tf32) if layout.grid else None
            sizes = B, T, *row_strides(Wx), first, *_step_bytes(cell, h, aux)
            kernel(groups, *arguments, rings, *sizes, next(_LAUNCHES))
        return States(h, aux, last), gates

    def backward(self, cell: Cell, kept: Kept, grads: States) -> Gradients:
        R, states, reset, h, aux, gates = kept
        B, T, N, D = h.shape
        variant = variant_of(reset, h, aux, training=True, d_aux=grads.aux is not None)
        kernel, layout, beside = _backward_kernel(self._choose, cell, h, variant)
        d_Wx, d_u = rows_like(h, len(cell.input_gates), N, D), rows_like(h, len(recurrent_only(cell)), N, D)
        d_h = rows_like(h, N, D).zero_() if grads.h is None else aligned(as_rows(grads.h, h))
        d_states = empty_states(cell, h)
        d_b = d_states.new_empty(layout.batches(B), len(cell.gates), N, D)
        known = (
            R.contiguous(),
            _or_zeros(states, d_states),
            contiguous(reset),
            aligned(h),
            aligned(aux),
            _or_zeros(None if states is None else aligned(saturated(states[1:], aux.dtype)), d_states),
            aligned(gates),
            d_h,
        )
        d_aux = as_aux(grads.aux, aux, d_states.dtype)
        more = (d_aux, contiguous(grads.last), d_Wx, d_u, d_b, d_states)
        concurrent = ConcurrentGradient(cell, beside, _producers(layout, N, B), h, states) if beside else None
        progress = concurrent.progress if concurrent else None
        for first, groups in kernel.rounds(layout.batches(B) * N):
            exchanged = _exchanged(groups, layout, h) if layout.grid else None
            sizes = B, T, *row_strides(h), first, *_step_bytes(cell, h, aux)
            kernel(groups, *known, *more, exchanged, progress, *sizes, next(_LAUNCHES))
        d_R = concurrent(d_Wx, d_u) if concurrent else weight_gradient(cell, d_Wx, d_u, h, states, reset)
        return Gradients(d_Wx, d_R, d_b.sum(0), d_states)


def _backward_kernel(
    choose: Callable[..., tuple[Binary, Tiling]], cell: Cell, h: Tensor, variant: Variant
) -> tuple[LoadedKernel, Tiling, concurrent_gradient.Layout | None]:
    """The kernel, its tiling, and, where d_R can be made beside it, the layout of that."""
    B, _, N, D = h.shape
    device = h.device.index
    get = partial(_kernel, choose, "backward", cell, D, N, B, h.dtype, device=device)
    counting = with_parts(variant, cell, h.shape, h.dtype, device)
    if counting.parts:
        kernel, loop = get(counting)
        layout = concurrent_gradient.beside(cell, N, D, B, _producers(loop, N, B), device_gpu(device))
        if layout and loop.batches(B) * N <= kernel.at_once:
            return kernel, loop, layout
    return *get(variant), None


def with_parts(variant: Variant, cell: Cell, shape: tuple[int, ...], dtype: torch.dtype, device: int) -> Variant:
    """The variant of a backward for h of that shape, which counts parts if its likely tiling leaves room beside it."""
    B, T, N, D = shape
    if T < SHORTEST or dtype.itemsize != 2 or variant.reset:
        return variant
    gpu = device_gpu(device)
    producers = _producers(_likely(cell, N, D, B, dtype, gpu), N, B)
    return replace(variant, parts=concurrent_gradient.beside(cell, N, D, B, producers, gpu) is not None)


def _producers(layout: Tiling, heads: int, batch: int) -> int:
    """The loop's blocks."""
    return layout.batches(batch) * heads * layout.blocks


@cache
def _likely(cell: Cell, N: int, D: int, B: int, dtype: torch.dtype, gpu: Gpu) -> Tiling:
    """The backward's tiling, unless another is tuned or spills less."""
    return next(tiling.tilings("backward", cell, N, D, B, dtype, gpu))


@cache
def _kernel(
    choose: Callable[..., tuple[Binary, Tiling]],
    direction: str,
    cell: Cell,
    D: int,
    N: int,
    B: int,
    dtype: torch.dtype,
    variant: Variant,
    device: int,
) -> tuple[LoadedKernel, Tiling]:
    binary, layout = choose(direction, cell, N, D, B, dtype, variant, device_gpu(device))
    shared = tiling.shared_bytes(direction, cell, dtype, layout, variant.tf32)
    return load(binary, device, layout.threads, shared, layout.blocks, layout.grid), layout


def _or_zeros(states: Tensor | None, room: Tensor) -> Tensor | int:
    """`states`, or the address of as many zeros as are in `room`."""
    return zeros(room.device.index, room.nbytes) if states is None else states


def _step_bytes(cell: Cell, h: Tensor, aux: Tensor) -> tuple[int, int, int, int]:
    """From one step to the next in Wx, h, aux and gates."""
    N, D = h.shape[2:]
    units = row_strides(h)[1] * N * D
    gates = len(cell.gates) * kept_dtype(h.dtype).itemsize
    return tuple(units * size for size in (len(cell.input_gates) * h.itemsize, h.itemsize, aux.itemsize, gates))


_LAUNCHES = count(secrets.randbits(62))  # for a Meeting: no number that memory would hold by chance


def _rings(groups: int, layout: Tiling, Wx: Tensor, tf32: bool) -> Tensor:
    """`rings` of kernels/forward.cuh: three steps of h, in parts of 16 bits."""
    units, sequences = 16 * layout.unit_tiles * layout.blocks, 8 * layout.batch_tiles
    size = 3 * tiling.planes_of(Wx.dtype, tf32) * units * sequences * 2
    return _exchange_memory(groups, layout, size, Wx.device)


def _exchanged(groups: int, layout: Tiling, h: Tensor) -> Tensor:
    """`parts` of kernels/backward.cuh: two buffers of partial sums, from every block of a group to every block."""
    units, sequences = 16 * layout.unit_tiles, 8 * layout.batch_tiles
    return _exchange_memory(groups, layout, 2 * layout.blocks**2 * units * sequences * h.itemsize, h.device)


def _exchange_memory(groups: int, layout: Tiling, size: int, device: torch.device) -> Tensor:
    """`size` bytes for each group, and behind them a word for each block: Meeting in kernels/grid.cuh."""
    return torch.empty(groups * (size + 8 * layout.blocks), dtype=torch.uint8, device=device)
