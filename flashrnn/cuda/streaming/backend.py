"""Backend `cuda`, for any head size: one kernel runs the whole time loop and streams R from L2 or memory at every step.

A call allocates memory for a copy of R, in the order in which the kernel reads it, besides inputs and results.
"""

from dataclasses import replace
from functools import cache, lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashrnn.cells import Cell
from flashrnn.cells.gates import recurrent_only
from flashrnn.cells.printers.cuda import exchanges
from flashrnn.cells.trace import trace, untraceable
from flashrnn.cuda.arguments import Argument
from flashrnn.cuda.available import unavailable
from flashrnn.cuda.buckets import bucket
from flashrnn.cuda.build import Binary, build
from flashrnn.cuda.launch import LoadedKernel, load
from flashrnn.cuda.spec import KernelSpec, specs_of, variant_of
from flashrnn.cuda.streaming.parameters import streaming
from flashrnn.cuda.streaming.tiling import (
    SOLVER,
    Tiling,
    best_tiling,
    infeasible,
    part_floats,
    prelude,
    shared_bytes,
)
from flashrnn.cuda.weight_gradient import WeightGradient, prepare_weight_gradient
from flashrnn.gpu import device_gpu
from flashrnn.memory_format import (
    aligned,
    batch_time_strides,
    contiguous,
    empty_in_format,
    in_format,
    is_time_major,
)
from flashrnn.problem import (
    Gradients,
    Inputs,
    KernelUnavailable,
    Problem,
    StateGradients,
    States,
    aux_gradient,
    empty_aux,
    initial_states,
)
from flashrnn.residual import GateFormat, Residual, empty_gates


class Cuda:
    """The backend for heads of any size."""

    name = "cuda"

    def gate_format(self, cell: Cell, heads: int, head_dim: int, dtype: torch.dtype) -> GateFormat:
        if untraceable(cell) or not trace(cell).reduces:
            return "NDG"
        return "NDV+" if trace(cell).statistics.names else "NDV"

    def unsupported_reason(self, problem: Problem) -> str | None:
        if reason := unavailable(problem, (torch.bfloat16, torch.float16, torch.float32)):
            return reason
        for spec in specs_of(problem):
            if reason := infeasible(spec):
                return f"{spec.direction} does not fit: {reason}"
        return None

    def forward(self, cell: Cell, inputs: Inputs, all_states: bool, training: bool) -> tuple[States, Tensor]:
        Wx, R, b, states, reset = inputs
        states = initial_states(cell, states, Wx)
        b = b.to(states.dtype)
        B, _, _, N, D = Wx.shape
        Wx = in_format(Wx, Wx)
        h, aux = empty_in_format(Wx, N, D), empty_aux(cell, Wx, all_states, training)
        gates = empty_gates(cell, Wx, training, self.gate_format(cell, N, D, Wx.dtype))
        variant = variant_of(reset, h, aux, training)
        spec = KernelSpec("forward", cell, N, D, B, h.dtype, device_gpu(h.device.index), variant)
        kernel, tiling = _kernel(spec, h.device.index)
        state = states.clone(memory_format=torch.contiguous_format)
        matrix, exchange, counters = in_order(R.transpose(0, 1), tiling), _exchange(tiling, h), _counters(tiling, h)
        exchange[0, :, :, :D] = states[0].transpose(0, 1)
        arguments = {
            "x": Wx,
            "R": matrix,
            "bias": b.contiguous(),
            "reset": contiguous(reset),
            "exchange": exchange,
            "counters": counters,
            "h": h,
            "aux": aux,
            "state": state,
            "gates": gates,
            **_sizes(h),
        }
        _launch(kernel, spec, tiling, arguments, h)
        return States(h, aux, state), gates

    def backward(self, cell: Cell, residual: Residual, grads: StateGradients) -> Gradients:
        R, states, reset, h, aux, *_ = residual
        states = initial_states(cell, states, h)
        B, T, N, D = h.shape
        variant = variant_of(reset, h, aux, training=True, d_aux=grads.of_aux)
        spec = KernelSpec("backward", cell, N, D, B, h.dtype, device_gpu(h.device.index), variant)
        kernel, tiling = _kernel(spec, h.device.index)
        d_Wx, d_u = (empty_in_format(h, len(names), N, D) for names in (cell.input_gates, recurrent_only(cell)))
        d_h = None if grads.h is None else in_format(grads.h, h)
        d_b = states.new_zeros(B, len(cell.gates), N, D)  # float32, because it sums over all steps
        d_aux = aux_gradient(grads, aux, states.dtype)
        d_state = torch.zeros_like(states, memory_format=torch.contiguous_format)
        if grads.last is not None:
            d_state.copy_(grads.last)
        matrix = in_order(R.permute(1, 3, 0, 2).flatten(2)[:, None], tiling)
        arguments = {
            "R": matrix,
            "reset": contiguous(reset),
            "exchange": _exchange(tiling, h),
            "counters": _counters(tiling, h),
            "initial": states,
            "h": h,
            "aux": aux,
            **({"bias": residual.b.to(states.dtype).contiguous()} if trace(cell).reduces else {}),
            "gates": aligned(residual.gates_in(self.gate_format(cell, N, D, h.dtype), cell)),
            "d_h": d_h,
            "d_aux": d_aux,
            "d_x": d_Wx,
            "d_u": d_u,
            "d_bias": d_b,
            "d_state": d_state,
            **_sizes(h),
        }
        _launch(kernel, spec, tiling, arguments, h)
        d_R = _weight_gradient(spec, T, is_time_major(h), h.device.index)(d_Wx, d_u, h, states, reset)
        return Gradients(d_Wx, d_R, d_b.sum(0), d_state)


_weight_gradient = lru_cache(maxsize=4096)(WeightGradient)


@cache
def _kernel(spec: KernelSpec, device: int) -> tuple[LoadedKernel, Tiling]:
    if spec.direction == "backward":
        prepare_weight_gradient(spec, device)
    elif spec.variant.training:
        _kernel(replace(spec, direction="backward"), device)
    binary, tiling = compile_kernel(spec)
    return load(binary, streaming(spec), device, tiling.threads, shared_bytes(spec, tiling), 1, True), tiling


def compile_kernel(spec: KernelSpec) -> tuple[Binary, Tiling]:
    """Return the compiled kernel and its tiling. This needs no GPU."""
    tiling = best_tiling(bucket(spec, SOLVER))
    return build(
        prelude(spec, tiling), header(spec), f"flashrnn_stream_{spec.direction}", spec.gpu.arch, str(spec)
    ), tiling


def header(spec: KernelSpec) -> str:
    """Return the file of the kernel."""
    return f"streaming/kernels/{spec.direction}{'_reducing' if trace(spec.cell).reduces else ''}.cuh"


def in_order(rows: Tensor, tiling: Tiling) -> Tensor:
    """Return [N, rows per unit, D, K] as [N, unit blocks, vectors, rows of a block, numbers], padded with zeros.

    A warp then reads consecutive memory when it multiplies one vector of every row.
    """
    N, _, D, K = rows.shape
    blocks, length = tiling.unit_blocks(D), tiling.padded(rows.dtype)
    padded = pad(rows, (0, length - K, 0, blocks * tiling.units - D))
    tiles = padded.view(N, -1, blocks, tiling.units, tiling.vectors, length // tiling.vectors)
    return tiles.permute(0, 2, 4, 1, 3, 5).contiguous()


def _exchange(tiling: Tiling, h: Tensor) -> Tensor:
    """Return two zeroed buffers [2, N, B, length] for the vectors that a step multiplies."""
    return h.new_zeros(2, h.shape[2], h.shape[0], tiling.padded(h.dtype))


def _counters(tiling: Tiling, h: Tensor) -> Tensor:
    """Return a zeroed counter for every group, each at the beginning of a cache line."""
    return h.new_zeros(tiling.groups(h.shape[2], h.shape[0]), 32, dtype=torch.int32)


def _sizes(h: Tensor) -> dict[str, int]:
    (B, T), (row_b, row_t) = h.shape[:2], batch_time_strides(h)
    return {"B": B, "T": T, "row_b": row_b, "row_t": row_t}


def _launch(kernel: LoadedKernel, spec: KernelSpec, tiling: Tiling, arguments: dict[str, Argument], h: Tensor) -> None:
    """Launch one block per item, but at most as many as are co-resident, because blocks wait for each other.

    With fewer blocks than items, blocks process several items in turn. If steps reduce over units, a block has one
    item, and there are as many launches as waves of groups.
    """
    B, _, N, D = h.shape
    blocks, groups = tiling.unit_blocks(D), tiling.groups(N, B)
    if not trace(spec.cell).reduces:
        return kernel.launch(min(groups * blocks, kernel.at_once), arguments)
    size = len(exchanges(spec.cell, spec.direction)) * 16 * tiling.seq_tiles * blocks * part_floats(spec)
    arguments["parts"] = h.new_empty(groups * size, dtype=torch.float32)
    at_once = kernel.at_once // blocks  # groups
    if not at_once:
        raise KernelUnavailable(
            f"only {kernel.at_once} of {blocks} blocks can run at the same time: another process may hold the GPU"
        )
    for first in range(0, groups, at_once):
        kernel.launch(min(at_once, groups - first) * blocks, {**arguments, "first_item": first * blocks})
