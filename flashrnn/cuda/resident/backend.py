"""Backend `cuda_fused`: the whole time loop in one kernel, R on the chip."""

import secrets
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import count

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashrnn.cells import Cell
from flashrnn.cells.printers.cuda import exchanges
from flashrnn.cells.trace import trace
from flashrnn.cuda.ahead import meanwhile
from flashrnn.cuda.available import unavailable
from flashrnn.cuda.build import Binary
from flashrnn.cuda.launch import Launch, LoadedKernel, load, zeros
from flashrnn.cuda.parameters import Argument, fused
from flashrnn.cuda.resident import concurrent_gradient, solver, tiling
from flashrnn.cuda.resident.concurrent_gradient import FEWEST_STEPS, ConcurrentGradient
from flashrnn.cuda.resident.kernel import compile_best
from flashrnn.cuda.resident.source import gate_format
from flashrnn.cuda.resident.tiling import Tiling
from flashrnn.cuda.source import finite_at_zero
from flashrnn.cuda.spec import ALONE, Beside, KernelSpec, Variant, short_steps, specs_of, variant_of
from flashrnn.cuda.sum_of_partials import KERNEL, sum_of_partials
from flashrnn.cuda.weight_gradient import prepare_weight_gradient, weight_gradient
from flashrnn.gpu import device_gpu
from flashrnn.memory_format import aligned, contiguous, empty_in_format, in_format, is_time_major
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
from flashrnn.products import constant, recurrent_only
from flashrnn.residual import GateFormat, Residual, empty_gates, head_numbers, residual_dtype, saturated

Choose = Callable[[KernelSpec], tuple[Binary, Tiling]]


class CudaFused:
    """`choose` returns the kernel and the tiling for a spec, as compile_best does."""

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
        """Return how many units to add to a head of odd size, so that rows are aligned for copies of 16 bytes; 0 where
        that is not supported, or where the padding would not stay finite."""
        units = -problem.head_dim % 8
        wider = problem._replace(head_dim=problem.head_dim + units)
        if self.unsupported_reason(wider) or trace(problem.cell).reduces:  # which would see the added units
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
        both_ways: bool = False,
        beside: Beside = ALONE,
    ) -> "Forward":
        """Return the forward pass on `device` of calls with a Wx like this one, which is dense. `half_bias`: b is in
        its dtype, and that has 16 bits. `both_ways` as in `Residual`."""
        sizes = Wx.shape, Wx.stride(), Wx.dtype, device
        tf32 = tf32_allowed(Wx.dtype, device)
        return _forward(self._choose, cell, *sizes, reset, half_bias, tf32, all_states, training, both_ways, beside)

    def backward(self, cell: Cell, residual: Residual, grads: StateGradients) -> Gradients:
        backward = self.backward_of(cell, residual, grads)
        backward.launch()
        return backward.gradients()

    def prepare_backward(self, cell: Cell, h: Tensor, aux: Tensor, device: torch.device, beside: Beside) -> Tiling:
        """Compile and load what such a backward pass needs; return the tiling of its loop."""
        sizes = h.shape, is_time_major(h), h.dtype, variant_of(None, h, aux, training=True)
        return _plan(self._choose, "backward", cell, *sizes, device.index, beside).tiling

    def backward_of(self, cell: Cell, residual: Residual, grads: StateGradients, beside: Beside = ALONE) -> "Backward":
        """Return the backward pass of these."""
        gate_format = self.gate_format(cell, *residual.h.shape[2:], residual.h.dtype)
        return Backward(self._choose, gate_format, cell, residual, grads, beside)


class Backward:
    """A backward pass: `launch`, and right after it `gradients`."""

    def __init__(
        self,
        choose: Choose,
        gate_format: GateFormat,
        cell: Cell,
        residual: Residual,
        grads: StateGradients,
        beside: Beside,
    ) -> None:
        R, states, reset, h, aux, *_ = residual
        gates = aligned(residual.gates_in(gate_format, cell))
        B, _, N, D = h.shape
        variant = variant_of(reset, h, aux, training=True, d_aux=grads.of_aux, both_ways=residual.both_ways)
        sizes = h.shape, is_time_major(h), h.dtype, variant, h.device.index
        self.plan, self._residual = _plan(choose, "backward", cell, *sizes, beside), residual
        if residual.donated and not self.plan.tiling.grid and gate_format == "PNDG":  # d_Wx takes their place
            self.d_Wx = gates.view(h.dtype).flatten(4)
        else:
            self.d_Wx = empty_in_format(h, len(cell.input_gates), N, D)
        self._d_u = empty_in_format(h, len(recurrent_only(cell)), N, D)
        self.d_h = empty_in_format(h, N, D).zero_() if grads.h is None else aligned(in_format(grads.h, h))
        self._d_states = d_states = empty_states(cell, h)
        self._d_b = d_states.new_empty(self.plan.tiling.batches(B), len(cell.gates), N, D)
        first_aux = None if states is None else aligned(saturated(states[1:], aux.dtype))
        self._concurrent = None
        if self.plan.overlapped:
            blocks = producers(self.plan.spec, self.plan.tiling)
            self._concurrent = ConcurrentGradient(self.plan.spec, self.plan.overlapped, blocks, h, states, reset)
        constants = {"bias": residual.b.to(d_states.dtype).contiguous()} if constant(cell) else {}
        self._arguments = {
            "R": R.contiguous(),
            **constants,
            "initial": _or_zeros(contiguous(states), d_states),
            "resets": _bits(reset),
            "h": aligned(h),
            "aux": aligned(aux),
            "first_aux": _or_zeros(first_aux, d_states),
            "gates": gates,
            "d_h": self.d_h,
            **(_d_aux(grads, aux, d_states.dtype) if grads.of_aux else {}),
            "d_last": contiguous(grads.last),
            "d_x": self.d_Wx,
            "d_u": self._d_u,
            "d_bias": self._d_b,
            "d_initial": d_states,
            "progress": self._concurrent.progress if self._concurrent else None,
        }

    def launch(self, **chunks: Argument) -> None:
        """`chunks` as in `Forward.launch`."""
        self.plan.launch({**self._arguments, **chunks}, self.d_Wx.device)

    def gradients(self) -> Gradients:
        _, states, reset, h, *_ = residual = self._residual
        if self._concurrent:
            d_R = self._concurrent(self.d_Wx, self._d_u)
        else:
            d_R = weight_gradient(self.plan.spec, self.d_Wx, self._d_u, h, states, reset)
        d_b = sum_of_partials(self._d_b, residual.b_dtype or self._d_b.dtype)
        return Gradients(self.d_Wx, d_R, d_b, self._d_states)


class Forward:
    """Forward passes of inputs that differ in nothing but their values. Biases and initial states of None are zeros."""

    def __init__(self, plan: "_Plan", cell: Cell, results: States, gates: Tensor) -> None:
        """`results` and `gates` are like those of the calls, on PyTorch's meta device."""
        self._plan, made = plan, (*results, gates)
        self._made = [(one.shape, one.stride(), one.dtype) for one in made]
        _, N, D = results.last.shape[1:]
        self.states, self.batch = results.last.shape[:2]
        self._biases = len(cell.gates) * N * D * results.last.element_size()  # bytes

    @property
    def tiling(self) -> Tiling:
        return self._plan.tiling

    def __call__(self, inputs: Inputs) -> tuple[States, Tensor]:
        """Return the states and the gates. Wx is dense, and its address a multiple of 16 bytes."""
        h, aux, last, gates = self._empty(inputs.Wx.device, self._made)
        Wx, R, b, states, reset = inputs
        self.launch(Wx, R, b, contiguous(states), reset, h, aux, last, gates)
        return States(h, aux, last), gates

    def inference(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return h and the last states, as `__call__` does."""
        Wx, R, b, states, reset = inputs
        h, last = self._empty(Wx.device, self._made[:3:2])
        self.launch(Wx, R, b, contiguous(states), reset, h, None, last, None)
        return h, last

    def empty_residual(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return aux and gates for `launch`."""
        return tuple(self._empty(device, self._made[1::2]))

    @staticmethod
    def _empty(device: torch.device, formats: list[tuple]) -> list[Tensor]:
        return [torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype in formats]

    def launch(
        self,
        Wx: Tensor,
        R: Tensor,
        b: Tensor | None,
        initial: Tensor | int | None,
        reset: Tensor | None,
        h: Tensor,
        aux: Tensor | None,
        last: Tensor,
        gates: Tensor | None,
        **chunks: Argument,
    ) -> None:
        """Launch a forward pass that writes into these four. Of these and Wx the memory counts, and not the shape.

        `initial` is contiguous, or an address of as many numbers as `last` has. aux and gates of None are not kept.
        `chunks` are what the kernels of layers at the same time take besides, see layers.py.
        """
        device = Wx.device
        arguments = {
            "x": Wx,
            "R": R.contiguous(),
            "bias": zeros(device.index, self._biases) if b is None else b.contiguous(),
            "initial": _or_zeros(initial, last),
            "resets": _bits(reset),
            "h": h,
            "aux": aux,
            "last": last,
            "gates": gates,
            **chunks,
        }
        self._plan.launch(arguments, device)


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
    both_ways: bool,
    beside: Beside,
) -> Forward:
    """Return the forward pass of Wx of that shape and stride."""
    Wx = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    h, last, aux = empty_in_format(Wx, *shape[3:]), empty_states(cell, Wx), empty_aux(cell, Wx, all_states, training)
    gates = empty_gates(cell, Wx, training, gate_format(cell, *shape[3:], dtype))
    kept = aux.dtype if aux.numel() else None
    variant = Variant(reset=reset, aux=kept, training=training, tf32=tf32, half_bias=half_bias, both_ways=both_ways)
    plan = _plan(choose, "forward", cell, h.shape, is_time_major(h), dtype, variant, device.index, beside)
    return Forward(plan, cell, States(h, aux, last), gates)


@dataclass(frozen=True, eq=False)
class _Plan:
    """The launches of a call: everything that depends on its sizes alone."""

    spec: KernelSpec
    tiling: Tiling
    launches: tuple[tuple[int, Launch], ...]  # with the number of groups
    workspace: int  # bytes in global memory that a group exchanges through
    overlapped: concurrent_gradient.Tiling | None = None  # of d_R, if its kernel overlaps with the loop

    def launch(self, arguments: dict[str, Argument], device: torch.device) -> None:
        for groups, launch in self.launches:
            workspace = None
            if self.workspace:
                workspace = torch.empty(groups * self.workspace, dtype=torch.uint8, device=device)
            arguments["workspace"], arguments["launch"] = workspace, next(_LAUNCHES)
            launch(groups, arguments)


_LAUNCHES = count(secrets.randbits(62))  # for GridBarrier: a number that is not in memory by chance


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
    beside: Beside = ALONE,
) -> _Plan:
    """Return the plan of that direction of a call with h of that shape."""
    B, T, N, D = shape
    spec = KernelSpec(direction, cell, N, D, B, dtype, device_gpu(device), variant, short_steps(T))
    spec = replace(spec, layers=beside.layers, product_blocks=beside.product_blocks)
    overlapped = None
    if direction == "forward":
        if variant.training and spec.layers == 1:  # others prepare both directions themselves
            sums = partial(KERNEL.compile, dtype if variant.half_bias else state_dtype(dtype), spec.gpu)
            with meanwhile(partial(_chosen, choose, spec), sums):
                without_bias = replace(variant, half_bias=False)
                _plan(choose, "backward", cell, shape, time_major, dtype, without_bias, device)
        kernel, tiling = _kernel(choose, spec, device, beside.dependent)
    else:
        kernel, tiling, overlapped = _backward_kernel(choose, spec, T, device, beside.dependent)
    row_b, row_t = (1, B) if time_major else (T, 1)
    sizes = {"B": B, "T": T, "row_b": row_b, "row_t": row_t, **_step_bytes(spec, row_t)}
    launches = [
        (groups, kernel.with_known(first_group=first, used_sequences=tiling.sequences, **sizes))
        for first, groups in kernel.waves(tiling.batches(B) * N)
    ]
    return _Plan(spec, tiling, tuple(launches), _workspace(spec, tiling), overlapped)


def _step_bytes(spec: KernelSpec, row_t: int) -> dict[str, int]:
    """Return the bytes between time steps of Wx, h, aux and gates."""
    cell, aux, unit = spec.cell, spec.variant.aux, row_t * spec.heads * spec.head_dim
    of_head = head_numbers(cell, spec.head_dim, spec.dtype)
    return {
        "x_step": unit * len(cell.input_gates) * spec.dtype.itemsize,
        "h_step": unit * spec.dtype.itemsize,
        "aux_step": unit * aux.itemsize if aux else 0,
        "gates_step": row_t * spec.heads * of_head * residual_dtype(spec.dtype).itemsize,
    }


def _workspace(spec: KernelSpec, tiling: Tiling) -> int:
    """Return the bytes in global memory that a group exchanges through."""
    if not tiling.grid:
        return 0
    tile = tiling.padded * 8 * tiling.batch_tiles
    if spec.direction == "forward":  # three steps of h: Ring in kernels/all_gather.cuh
        exchanged = 3 * spec.splits * tile * 2
    else:  # two buffers of partial sums, from every block of a group to every block: kernels/reduce_scatter.cuh
        exchanged = 2 * tiling.blocks * tile * spec.dtype.itemsize
    found = exchanges(spec.cell, spec.direction)  # kernels/unit_reductions.cuh
    pairs = max(len(found), 2) * 8 * tiling.batch_tiles * tiling.blocks * max((one.pairs for one in found), default=0)
    return exchanged + 8 * tiling.blocks + 8 * pairs  # and a word for each block: GridBarrier in kernels/grid.cuh


def _backward_kernel(
    choose: Choose, spec: KernelSpec, steps: int, device: int, dependent: bool = False
) -> tuple[LoadedKernel, Tiling, concurrent_gradient.Tiling | None]:
    """Return the kernel, its tiling and, if a kernel for d_R can overlap with it, the tiling of that one."""
    overlaps = steps >= FEWEST_STEPS and spec.layers == 1
    likely = overlaps and concurrent_gradient.overlapped(spec, producers(spec, solver.likely(spec)))
    with meanwhile(partial(concurrent_gradient.compile_kernel, spec, likely)) if likely else nullcontext():
        kernel, loop = _kernel(choose, spec, device, dependent)
    one_wave = loop.batches(spec.batch) * spec.heads <= kernel.at_once
    if overlaps and one_wave and (overlapped := concurrent_gradient.overlapped(spec, producers(spec, loop))):
        return kernel, loop, overlapped
    prepare_weight_gradient(spec, device)
    return kernel, loop, None


def producers(spec: KernelSpec, tiling: Tiling) -> int:
    """Return the number of blocks of the loop."""
    return tiling.batches(spec.batch) * spec.heads * tiling.blocks


def _kernel(choose: Choose, spec: KernelSpec, device: int, dependent: bool = False) -> tuple[LoadedKernel, Tiling]:
    binary, chosen = _chosen(choose, spec)
    shared = tiling.shared_bytes(spec, chosen)
    return load(binary, fused(spec), device, chosen.threads, shared, chosen.blocks, chosen.grid, dependent), chosen


@cache
def _chosen(choose: Choose, spec: KernelSpec) -> tuple[Binary, Tiling]:
    return choose(spec)


_WORD = 32  # steps
_EIGHT_BITS = sum(1 << (56 - 7 * i) for i in range(8))
"""Eight bytes of 0 or 1, read as a number and multiplied by it, have their bits in the number's highest byte."""


def _bits(reset: Tensor | None) -> Tensor | None:
    """Return `reset` [B, T] as the bits of int32 [B, ceil(T / 32)]."""
    if reset is None:
        return None
    whole = pad(reset, (0, -reset.shape[1] % _WORD)).flatten().view(torch.int64)  # one sequence may have any stride
    return (whole * _EIGHT_BITS >> 56).to(torch.uint8).view(torch.int32).view(reset.shape[0], -1)


def _or_zeros(states: Tensor | int | None, like: Tensor) -> Tensor | int:
    """Return `states`; for None at least as many zero bytes as `like` has."""
    return zeros(like.device.index, like.nbytes) if states is None else states


def _d_aux(grads: StateGradients, aux: Tensor, dtype: torch.dtype) -> dict[str, Tensor | None]:
    return {f"d_aux_{i}": None if d is None else _in_memory_as(aux, d, dtype) for i, d in enumerate(grads.aux)}


def _in_memory_as(aux: Tensor, d: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient d [B, T, N, D] of one of the states in `aux`, in the memory format of that state."""
    if d.dtype == dtype and d.stride() == aux.stride()[1:]:
        return aligned(d)
    return torch.empty_like(aux[0], dtype=dtype).copy_(d)
