"""Backend `cuda_fused`: the whole time loop in one kernel, with R on the chip."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, lru_cache, partial

import torch
from torch import Tensor

from flashrnn.cells import Cell
from flashrnn.cells.trace import trace
from flashrnn.cuda import short_gradients
from flashrnn.cuda.ahead import meanwhile
from flashrnn.cuda.available import unavailable
from flashrnn.cuda.build import Binary
from flashrnn.cuda.launch import LoadedKernel, load
from flashrnn.cuda.resident import concurrent_gradient, single_step, solver
from flashrnn.cuda.resident.calls import Backward, BackwardCall, Forward, Plan, producers
from flashrnn.cuda.resident.kernel import compile_best
from flashrnn.cuda.resident.parameters import fused
from flashrnn.cuda.resident.resources import published_words, shared_bytes
from flashrnn.cuda.resident.single_step import SingleStep
from flashrnn.cuda.resident.source import gate_format
from flashrnn.cuda.resident.tiling import Tiling, splits
from flashrnn.cuda.short_gradients import ShortGradients
from flashrnn.cuda.source import finite_at_zero
from flashrnn.cuda.spec import ALONE, Concurrency, KernelSpec, Variant, short_steps, specs_of, variant_of
from flashrnn.cuda.sum_of_partials import KERNEL
from flashrnn.cuda.weight_gradient import WeightGradient
from flashrnn.gpu import device_gpu
from flashrnn.memory_format import aligned, empty_in_format, in_format, is_time_major
from flashrnn.problem import (
    Gradients,
    Inputs,
    Problem,
    StateGradients,
    States,
    empty_aux,
    empty_states,
    state_dtype,
    tf32_allowed,
)
from flashrnn.residual import GateFormat, Residual, empty_gates, head_numbers, residual_dtype

Choose = Callable[[KernelSpec], tuple[Binary, Tiling]]


class CudaFused:
    """The backend. `choose` returns the kernel and the tiling for a spec, as compile_best does."""

    name = "cuda_fused"

    def __init__(self, choose: Choose = compile_best) -> None:
        self._choose = choose

    def unsupported_reason(self, problem: Problem) -> str | None:
        if reason := unavailable(problem, (torch.bfloat16, torch.float16, torch.float32)):
            return reason
        if problem.head_dim % 2:
            return f"head sizes must be even, got {problem.head_dim}"
        for spec in specs_of(problem):
            if reason := solver.infeasible(spec):
                return f"{spec.direction} does not fit on the chip: {reason.summary}"
        return None

    def padding(self, problem: Problem) -> int:
        """Return how many units to add to a head of odd size, so that rows are aligned for 16-byte copies.

        Return 0 if that is not supported, or if the padding would not stay finite.
        """
        units = -problem.head_dim % 8
        wider = problem._replace(head_dim=problem.head_dim + units)
        if self.unsupported_reason(wider) or trace(problem.cell).reduces:  # which would include the added units
            return 0
        return units if finite_at_zero(problem.cell) else 0

    def gate_format(self, cell: Cell, heads: int, head_dim: int, dtype: torch.dtype) -> GateFormat:
        return gate_format(cell, heads, head_dim, dtype)

    def forward(self, cell: Cell, inputs: Inputs, all_states: bool, training: bool) -> tuple[States, Tensor]:
        _, _, b, _, reset = inputs
        Wx = aligned(in_format(inputs.Wx, inputs.Wx))
        half_bias = b is not None and b.dtype.itemsize == 2
        found = self.forward_of(cell, Wx, Wx.device, reset is not None, half_bias, all_states, training)
        return found(inputs._replace(Wx=Wx))

    def forward_of(
        self,
        cell: Cell,
        Wx: Tensor,
        device: torch.device,
        reset: bool,
        half_bias: bool,
        all_states: bool = False,
        training: bool = False,
        bidirectional: bool = False,
        concurrency: Concurrency = ALONE,
    ) -> Forward:
        """Return the forward pass on `device` of calls whose Wx is dense, with this shape, stride and dtype.

        `half_bias`: b has the dtype of Wx, which has 16 bits. `bidirectional`: see `Residual`.
        """
        sizes = Wx.shape, Wx.stride(), Wx.dtype, device
        tf32 = tf32_allowed(Wx.dtype, device)
        return _forward(
            self._choose, cell, *sizes, reset, half_bias, tf32, all_states, training, bidirectional, concurrency
        )

    def single_step(
        self,
        cell: Cell,
        heads: int,
        head_dim: int,
        batch: int,
        dtype: torch.dtype,
        device: torch.device,
        reset: bool,
        training: bool,
    ) -> SingleStep | None:
        """Return a function for single steps of layers of one direction; None if kernels for sequences are faster."""
        if not single_step.serves(cell, heads * head_dim, batch, dtype):
            return None
        spec = single_step.spec_of(cell, heads, head_dim, batch, dtype, device_gpu(device.index))
        if not training:
            return SingleStep(spec, device)
        shape, tf32 = torch.Size((batch, 1, heads, head_dim)), tf32_allowed(dtype, device)
        gradients = replace(spec, direction="backward", variant=Variant(reset=reset))
        with meanwhile(partial(single_step.compile_kernel, spec), partial(short_gradients.compile_kernel, gradients)):
            sizes = shape, False, dtype, device, reset, spec.variant.aux, tf32
            backward = _backward(self._choose, cell, *sizes, False, False, ALONE)
        return SingleStep(spec, device, backward)

    def backward(self, cell: Cell, residual: Residual, grads: StateGradients) -> Gradients:
        call = self.backward_of(cell, residual, grads)
        call.launch()
        return call.gradients()

    def prepare_backward(
        self, cell: Cell, h: Tensor, aux: Tensor, device: torch.device, concurrency: Concurrency
    ) -> Tiling:
        """Compile and load what such a backward pass needs. Return the tiling of its time loop."""
        sizes = h.shape, is_time_major(h), h.dtype, variant_of(None, h, aux, training=True)
        return _plan(self._choose, "backward", cell, *sizes, device.index, concurrency).tiling

    def backward_of(
        self, cell: Cell, residual: Residual, grads: StateGradients, concurrency: Concurrency = ALONE
    ) -> BackwardCall:
        """Return the backward pass for a residual and the gradients of the results."""
        h, aux, reset = residual.h, residual.aux, residual.reset is not None
        aux_dtype = aux.dtype if aux.numel() else None
        sizes = h.shape, is_time_major(h), h.dtype, h.device, reset, aux_dtype, tf32_allowed(h.dtype, h.device)
        backward = _backward(self._choose, cell, *sizes, grads.of_aux, residual.bidirectional, concurrency)
        if (gates := residual.gates_in(backward.gate_format, cell)) is not residual.gates:
            residual = residual._replace(gates=gates)
        if grads.h is not None and (d_h := in_format(grads.h, h)) is not grads.h:
            grads = grads._replace(h=d_h)
        return BackwardCall(backward, residual, grads)


@lru_cache(maxsize=4096)
def _forward(
    choose: Choose,
    cell: Cell,
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    reset: bool,
    half_bias: bool,
    tf32: bool,
    all_states: bool,
    training: bool,
    bidirectional: bool,
    concurrency: Concurrency,
) -> Forward:
    """Return the forward pass of calls whose Wx has this shape and stride."""
    Wx = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    h, last, aux = empty_in_format(Wx, *shape[3:]), empty_states(cell, Wx), empty_aux(cell, Wx, all_states, training)
    gates = empty_gates(cell, Wx, training, gate_format(cell, *shape[3:], dtype))
    aux_dtype = aux.dtype if aux.numel() else None
    variant = Variant(
        reset=reset, aux=aux_dtype, training=training, tf32=tf32, half_bias=half_bias, bidirectional=bidirectional
    )
    plan = _plan(choose, "forward", cell, h.shape, is_time_major(h), dtype, variant, device.index, concurrency)
    call = choose, cell, h.shape, is_time_major(h), dtype, device, reset, aux_dtype, tf32
    backward = partial(_backward, *call, False, bidirectional, ALONE)
    return Forward(plan, cell, States(h, aux, last), gates, backward)


@lru_cache(maxsize=4096)
def _backward(
    choose: Choose,
    cell: Cell,
    shape: torch.Size,
    time_major: bool,
    dtype: torch.dtype,
    device: torch.device,
    reset: bool,
    aux: torch.dtype | None,
    tf32: bool,
    of_aux: bool,
    bidirectional: bool,
    concurrency: Concurrency,
) -> Backward:
    """Return what all backward passes with h of this shape share. `aux` is the dtype of the stored states except h."""
    variant = Variant(reset, aux, training=True, d_aux=of_aux, tf32=tf32, bidirectional=bidirectional)
    plan = _plan(choose, "backward", cell, shape, time_major, dtype, variant, device.index, concurrency)
    B, T, *inner = shape
    h = torch.empty(T, B, *inner, dtype=dtype, device="meta").transpose(0, 1)
    return Backward(plan, cell, h if time_major else torch.empty(shape, dtype=dtype, device="meta"), device)


@lru_cache(maxsize=4096)
def _plan(
    choose: Choose,
    direction: str,
    cell: Cell,
    shape: torch.Size,
    time_major: bool,
    dtype: torch.dtype,
    variant: Variant,
    device: int,
    concurrency: Concurrency = ALONE,
) -> Plan:
    """Return the plan of one direction of calls with h of this shape."""
    B, T, N, D = shape
    spec = KernelSpec(direction, cell, N, D, B, dtype, device_gpu(device), variant, short_steps(T))
    spec = replace(spec, layers=concurrency.layers, product_blocks=concurrency.product_blocks)
    overlapped = None
    if direction == "forward":
        if variant.training and spec.layers == 1:  # callers with several layers prepare both directions themselves
            without_bias = replace(variant, half_bias=False)
            after = partial(KERNEL.compile, dtype if variant.half_bias else state_dtype(dtype), spec.gpu)
            if short_gradients.serves(spec, T):
                of_backward = replace(spec, direction="backward", variant=without_bias)
                after = partial(short_gradients.compile_kernel, of_backward)
            with meanwhile(partial(_chosen, choose, spec), after):
                _plan(choose, "backward", cell, shape, time_major, dtype, without_bias, device)
        kernel, tiling = _kernel(choose, spec, device, concurrency.dependent)
    else:
        kernel, tiling, overlapped = _backward_kernel(choose, spec, T, device, concurrency.dependent)
    row_b, row_t = (1, B) if time_major else (T, 1)
    sizes = {"B": B, "T": T, "row_b": row_b, "row_t": row_t, **_step_bytes(spec, row_t)}
    launches = [
        (groups, kernel.bind(first_group=first, used_sequences=tiling.sequences, **sizes))
        for first, groups in kernel.waves(tiling.batches(B) * N)
    ]
    short = after = None
    if direction == "backward" and not overlapped:
        if short_gradients.serves(spec, T):
            short = ShortGradients(spec, T, time_major, tiling.batches(B), device)
        else:
            after = WeightGradient(spec, T, time_major, device)
    return Plan(spec, tiling, tuple(launches), _workspace(spec, tiling), overlapped, short, after)


def _step_bytes(spec: KernelSpec, row_t: int) -> dict[str, int]:
    """Return the strides in bytes between time steps of Wx, h, aux and gates."""
    cell, aux, unit = spec.cell, spec.variant.aux, row_t * spec.heads * spec.head_dim
    of_head = head_numbers(cell, spec.heads, spec.head_dim, spec.dtype)
    return {
        "x_step": unit * len(cell.input_gates) * spec.dtype.itemsize,
        "h_step": unit * spec.dtype.itemsize,
        "aux_step": unit * aux.itemsize if aux else 0,
        "gates_step": row_t * spec.heads * of_head * residual_dtype(spec.dtype).itemsize,
    }


def _workspace(spec: KernelSpec, tiling: Tiling) -> int:
    """Return the bytes of global memory through which a group exchanges."""
    if not tiling.grid:
        return 0
    tile = tiling.padded * 8 * tiling.batch_tiles
    if spec.direction == "forward":  # three steps of h: Ring in kernels/all_gather.cuh
        exchanged = 3 * splits(spec) * tile * 2
    else:  # two buffers of partial sums from every block of a group to every block: kernels/reduce_scatter.cuh
        exchanged = 2 * tiling.blocks * tile * spec.dtype.itemsize
    barrier = tiling.blocks + 16  # words, rounded up to a cache line: GridBarrier in kernels/grid.cuh
    return exchanged + 8 * (barrier + published_words(spec, tiling))


def _backward_kernel(
    choose: Choose, spec: KernelSpec, steps: int, device: int, dependent: bool = False
) -> tuple[LoadedKernel, Tiling, concurrent_gradient.Tiling | None]:
    """Return the kernel, its tiling and, if a kernel for d_R can overlap with it, that kernel's tiling."""
    overlaps = steps >= concurrent_gradient.fewest_steps(spec) and spec.layers == 1
    likely = overlaps and concurrent_gradient.overlapped(spec, producers(spec, solver.likely_tiling(spec)))
    with meanwhile(partial(concurrent_gradient.compile_kernels, spec, likely)) if likely else nullcontext():
        kernel, loop = _kernel(choose, spec, device, dependent)
    one_wave = loop.batches(spec.batch) * spec.heads <= kernel.at_once
    if overlaps and one_wave and (overlapped := concurrent_gradient.overlapped(spec, producers(spec, loop))):
        return kernel, loop, overlapped
    return kernel, loop, None


def _kernel(choose: Choose, spec: KernelSpec, device: int, dependent: bool = False) -> tuple[LoadedKernel, Tiling]:
    binary, chosen = _chosen(choose, spec)
    shared = shared_bytes(spec, chosen)
    return load(binary, fused(spec), device, chosen.threads, shared, chosen.blocks, chosen.grid, dependent), chosen


@cache
def _chosen(choose: Choose, spec: KernelSpec) -> tuple[Binary, Tiling]:
    return choose(spec)
