"""Backend `cuda_fused`: the whole time loop in one kernel, R on the chip."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
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
from flashrnn.cuda.source import Tiling, Variant, finite_at_zero, gates_as_inputs, variant_of
from flashrnn.cuda.sum_of_parts import sum_of_parts
from flashrnn.cuda.tiling import planes_of
from flashrnn.cuda.weight_gradient import weight_gradient
from flashrnn.gpu import Gpu, device_gpu
from flashrnn.problem import (
    Gradients,
    Inputs,
    Kept,
    Problem,
    StateGradients,
    States,
    aligned,
    as_rows,
    contiguous,
    empty_aux,
    empty_gates,
    empty_states,
    is_time_major,
    kept_dtype,
    rows_like,
    saturated,
)
from flashrnn.products import recurrent_only


class CudaFused:
    """`choose` gives the kernel and the tiling of a call, as compile_best does."""

    name = "cuda_fused"

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

    def padding(self, problem: Problem) -> int:
        """Units to add to a head of an odd size, for rows that copies of 16 bytes can start from; 0 where that is not
        served, or would let units that are not finite meet the others."""
        units = -problem.head_dim % 8
        wider = problem._replace(head_dim=problem.head_dim + units)
        return units if self.supports(wider) is None and finite_at_zero(problem.cell) else 0

    def forward(self, cell: Cell, inputs: Inputs, all_states: bool, training: bool) -> tuple[States, Tensor]:
        Wx, R, b, states, reset = inputs
        Wx = aligned(as_rows(Wx, Wx))
        aux, gates = empty_aux(cell, Wx, all_states, training), empty_gates(cell, Wx, training)
        h, last = rows_like(Wx, *Wx.shape[3:]), empty_states(cell, Wx)
        variant = replace(variant_of(reset, h, aux, training), half_bias=b.dtype.itemsize == 2)
        plan = _forward_plan(self._choose, cell, h.shape, is_time_major(h), h.dtype, variant, h.device.index)
        initial = _or_zeros(contiguous(states), last)
        arguments = (Wx, R.contiguous(), b.contiguous(), initial, contiguous(reset), h, aux, last, gates)
        plan.launch(arguments, h)
        return States(h, aux, last), gates

    def backward(self, cell: Cell, kept: Kept, grads: StateGradients) -> Gradients:
        R, states, reset, h, aux, gates, donated, b_dtype = kept
        B, _, N, D = h.shape
        variant = variant_of(reset, h, aux, training=True, d_aux=grads.of_aux)
        plan = _backward_plan(self._choose, cell, h.shape, is_time_major(h), h.dtype, variant, h.device.index)
        if donated and not plan.tiling.grid and gates_as_inputs(cell, D, h.dtype):
            d_Wx = gates.view(h.dtype)
        else:
            d_Wx = rows_like(h, len(cell.input_gates), N, D)
        d_u = rows_like(h, len(recurrent_only(cell)), N, D)
        d_h = rows_like(h, N, D).zero_() if grads.h is None else aligned(as_rows(grads.h, h))
        d_states = empty_states(cell, h)
        d_b = d_states.new_empty(plan.tiling.batches(B), len(cell.gates), N, D)
        first_aux = None if states is None else aligned(saturated(states[1:], aux.dtype))
        known = (
            R.contiguous(),
            _or_zeros(contiguous(states), d_states),
            contiguous(reset),
            aligned(h),
            aligned(aux),
            _or_zeros(first_aux, d_states),
            aligned(gates),
            d_h,
        )
        d_aux = [None if d is None else _as_plane(d, aux, d_states.dtype) for d in grads.aux] if grads.of_aux else []
        results = (contiguous(grads.last), d_Wx, d_u, d_b, d_states)
        beside = plan.beside
        concurrent = (
            ConcurrentGradient(cell, beside, _producers(plan.tiling, N, B), h, states, reset) if beside else None
        )
        plan.launch((*known, *d_aux, *results), h, concurrent.progress if concurrent else None)
        d_R = concurrent(d_Wx, d_u) if concurrent else weight_gradient(cell, d_Wx, d_u, h, states, reset)
        return Gradients(d_Wx, d_R, sum_of_parts(d_b, b_dtype or d_b.dtype), d_states)


@dataclass(frozen=True, eq=False)
class _Plan:
    """The launches of a call: all that depends on its sizes alone."""

    kernel: LoadedKernel
    tiling: Tiling
    launches: tuple[tuple[int, int], ...]  # the first group and how many there are
    workspace: int  # bytes for a group's exchange through global memory
    sizes: tuple[int, ...]  # B, T and the rows between sequences and between steps
    steps: tuple[int, ...]  # bytes between steps of Wx, h, aux and gates
    beside: concurrent_gradient.Layout | None = None  # of d_R, where it is made beside the loop

    def launch(self, arguments: tuple[Tensor | int | None, ...], h: Tensor, *progress: Tensor | None) -> None:
        for first, groups in self.launches:
            exchange = None
            if self.workspace:
                exchange = torch.empty(groups * self.workspace, dtype=torch.uint8, device=h.device)
            self.kernel(groups, *arguments, exchange, *progress, *self.sizes, first, *self.steps, next(_LAUNCHES))


_LAUNCHES = count(secrets.randbits(62))  # for a Meeting: no number that memory would hold by chance


@lru_cache(maxsize=4096)
def _forward_plan(
    choose: Callable[..., tuple[Binary, Tiling]],
    cell: Cell,
    shape: torch.Size,
    time_major: bool,
    dtype: torch.dtype,
    variant: Variant,
    device: int,
) -> _Plan:
    """The plan of a forward with h of that shape."""
    kernel, tiling = _kernel(choose, "forward", cell, shape, dtype, variant, device)
    units, sequences = 16 * tiling.unit_tiles * tiling.blocks, 8 * tiling.batch_tiles
    ring = 3 * planes_of(dtype, variant.tf32) * units * sequences * 2  # three steps of h: kernels/forward.cuh
    return _plan(cell, shape, time_major, dtype, variant, kernel, tiling, ring)


@lru_cache(maxsize=4096)
def _backward_plan(
    choose: Callable[..., tuple[Binary, Tiling]],
    cell: Cell,
    shape: torch.Size,
    time_major: bool,
    dtype: torch.dtype,
    variant: Variant,
    device: int,
) -> _Plan:
    """The plan of a backward with h of that shape."""
    kernel, tiling, beside = _backward_kernel(choose, cell, shape, dtype, variant, device)
    units, sequences = 16 * tiling.unit_tiles, 8 * tiling.batch_tiles
    # two buffers of partial sums, from every block of a group to every block: kernels/backward.cuh
    parts = 2 * tiling.blocks**2 * units * sequences * dtype.itemsize
    return _plan(cell, shape, time_major, dtype, variant, kernel, tiling, parts, beside)


def _plan(
    cell: Cell,
    shape: torch.Size,
    time_major: bool,
    dtype: torch.dtype,
    variant: Variant,
    kernel: LoadedKernel,
    tiling: Tiling,
    exchanged: int,
    beside: concurrent_gradient.Layout | None = None,
) -> _Plan:
    B, T, N, D = shape
    row_b, row_t = (1, B) if time_major else (T, 1)
    input_bytes, gate_bytes = len(cell.input_gates) * dtype.itemsize, len(cell.gates) * kept_dtype(dtype).itemsize
    unit_bytes = input_bytes, dtype.itemsize, variant.aux.itemsize if variant.aux else 0, gate_bytes
    return _Plan(
        kernel,
        tiling,
        tuple(kernel.rounds(tiling.batches(B) * N)),
        exchanged + 8 * tiling.blocks if tiling.grid else 0,  # and a word for each block: Meeting in kernels/grid.cuh
        (B, T, row_b, row_t),
        tuple(row_t * N * D * size for size in unit_bytes),
        beside,
    )


def _backward_kernel(
    choose: Callable[..., tuple[Binary, Tiling]],
    cell: Cell,
    shape: torch.Size,
    dtype: torch.dtype,
    variant: Variant,
    device: int,
) -> tuple[LoadedKernel, Tiling, concurrent_gradient.Layout | None]:
    """The kernel, its tiling, and, where d_R can be made beside it, the layout of that."""
    B, _, N, D = shape
    counting = with_parts(variant, cell, shape, dtype, device)
    if counting.parts:
        kernel, loop = _kernel(choose, "backward", cell, shape, dtype, counting, device)
        layout = concurrent_gradient.beside(
            cell, N, D, B, dtype, _producers(loop, N, B), device_gpu(device), variant.tf32
        )
        if layout and loop.batches(B) * N <= kernel.at_once:
            return kernel, loop, layout
    return *_kernel(choose, "backward", cell, shape, dtype, variant, device), None


def with_parts(variant: Variant, cell: Cell, shape: tuple[int, ...], dtype: torch.dtype, device: int) -> Variant:
    """The variant of a backward for h of that shape, which counts parts if its likely tiling leaves room beside it."""
    B, T, N, D = shape
    if T < SHORTEST:
        return variant
    gpu = device_gpu(device)
    producers = _producers(_likely(cell, N, D, B, dtype, gpu, variant.tf32), N, B)
    layout = concurrent_gradient.beside(cell, N, D, B, dtype, producers, gpu, variant.tf32)
    return replace(variant, parts=layout is not None)


def _producers(layout: Tiling, heads: int, batch: int) -> int:
    """The loop's blocks."""
    return layout.batches(batch) * heads * layout.blocks


@cache
def _likely(cell: Cell, N: int, D: int, B: int, dtype: torch.dtype, gpu: Gpu, tf32: bool) -> Tiling:
    """The backward's tiling, unless another is tuned or spills less."""
    return next(tiling.tilings("backward", cell, N, D, B, dtype, gpu, tf32))


def _kernel(
    choose: Callable[..., tuple[Binary, Tiling]],
    direction: str,
    cell: Cell,
    shape: torch.Size,
    dtype: torch.dtype,
    variant: Variant,
    device: int,
) -> tuple[LoadedKernel, Tiling]:
    B, _, N, D = shape
    binary, layout = _chosen(choose, direction, cell, N, D, B, dtype, variant, device_gpu(device))
    shared = tiling.shared_bytes(direction, cell, dtype, layout, variant.tf32)
    return load(binary, device, layout.threads, shared, layout.blocks, layout.grid), layout


@cache
def _chosen(choose: Callable[..., tuple[Binary, Tiling]], *sizes) -> tuple[Binary, Tiling]:
    return choose(*sizes)


def _or_zeros(states: Tensor | None, room: Tensor) -> Tensor | int:
    """`states`, or the address of as many zeros as are in `room`."""
    return zeros(room.device.index, room.nbytes) if states is None else states


def _as_plane(d: Tensor, aux: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient [B, T, N, D] of one of the states in aux, in memory as that."""
    if d.dtype == dtype and d.stride() == aux.stride()[1:]:
        return aligned(d)
    return torch.empty_like(aux[0], dtype=dtype).copy_(d)
