"""d_R after the time loop: of narrow heads by a kernel, because a library's products have too few results for a GPU."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from flashrnn import products
from flashrnn.cuda import parameters
from flashrnn.cuda.build import Binary, build
from flashrnn.cuda.launch import LoadedKernel, load
from flashrnn.cuda.parameters import declaration
from flashrnn.cuda.source import definitions
from flashrnn.cuda.spec import KernelSpec
from flashrnn.cuda.sum_of_parts import sum_of_parts
from flashrnn.memory_format import aligned, contiguous

WIDEST = 128  # of a head; wider ones were not tried
_ROWS = 32  # that are loaded at a time
_STAGES = 5  # loads on their way and in use, where they fit
_UNITS = 256  # of all gates and heads of a block, which its registers hold
_CLUSTER = 8  # blocks that add up what they have, where there are clusters


@dataclass(frozen=True)
class Layout:
    """How many gates and heads a block takes; names as in kernels/weight_gradient.cuh."""

    gates: int
    heads: int
    warps: int
    stages: int
    blocks: int  # of a cluster
    shared_bytes: int
    groups: int  # of gates and heads: clusters for the same rows

    @staticmethod
    def of(spec: KernelSpec) -> "Layout":
        heads, gpu = spec.heads, spec.gpu
        padded, all_gates = -(-spec.head_dim // 16) * 16, len(spec.cell.recurrent_gates)
        gate_groups = -(-all_gates * padded // _UNITS)
        gates = -(-all_gates // gate_groups)
        together = min(heads, max(1, _UNITS // (gates * padded)))
        tiles = gates * padded // 16
        warps = together * tiles // (1 if tiles % 2 else 2)
        stage = (gates + 1) * _ROWS * (together * padded * 2 + 16)
        stages = min(_STAGES, gpu.shared_per_block // stage)
        blocks = _CLUSTER if gpu.clusters else 1
        results = together * gates * padded * (padded + 8) * 4 if gpu.clusters else 0
        groups = -(-all_gates // gates) * -(-heads // together)
        return Layout(gates, together, warps, stages, blocks, max(stages * stage, results), groups)


def weight_gradient(
    spec: KernelSpec, d_Wx: Tensor, d_u: Tensor, h: Tensor, states: Tensor | None, reset: Tensor | None
) -> Tensor:
    """As `products.weight_gradient_of_states`, after the backward of that spec."""
    cell, (B, T, N, D) = spec.cell, h.shape
    other_gates = d_u.shape[2] > len(products.recurrent_only(cell))  # with a bias alone, as backend `cuda` has there
    if other_gates or not _has_kernel(spec):
        return products.weight_gradient_of_states(cell, d_Wx, d_u, h, states, reset)
    kernel, layout = _kernel(spec, h.device.index)
    parts = max(1, min(spec.gpu.multiprocessors // layout.groups, B * T // (_STAGES * _ROWS)) // layout.blocks)
    shape, in_parts = (len(cell.recurrent_gates), N, D, D), parts > 1 or layout.blocks == 1
    partial = torch.empty(parts, *shape, device=h.device) if in_parts else None
    d_R = None if in_parts else h.new_empty(shape)
    initial = None if states is None else states[0].to(h.dtype)
    arguments = {
        "d_x": d_Wx,
        "d_u": d_u,
        "h": aligned(h),
        "initial": contiguous(initial),
        "reset": contiguous(reset),
        "partial": partial,
        "d_R": d_R,
        "B": B,
        "T": T,
        "row_t": products.batch_time_strides(h)[1],
        "block_rows": -(-B * T // (parts * layout.blocks)),
    }
    kernel.launch(parts * layout.groups, arguments)
    return sum_of_parts(partial, h.dtype) if in_parts else d_R


def _has_kernel(spec: KernelSpec) -> bool:
    return spec.dtype.itemsize == 2 and spec.head_dim % 4 == 0 and spec.head_dim <= WIDEST


def prepare_weight_gradient(spec: KernelSpec, device: int) -> None:
    """Make what `weight_gradient` will need."""
    if _has_kernel(spec):
        _kernel(spec, device)


@cache
def _kernel(spec: KernelSpec, device: int) -> tuple[LoadedKernel, Layout]:
    binary, layout = compile_kernel(spec)
    shape = 32 * layout.warps, layout.shared_bytes, layout.blocks, False
    return load(binary, parameters.weight_gradient(spec), device, *shape), layout


def compile_kernel(spec: KernelSpec) -> tuple[Binary, Layout]:
    """The kernel for the products of parts and the layout; needs no GPU."""
    layout, entry = Layout.of(spec), "flashrnn_weight_gradient"
    return build(prelude(spec, layout), "kernels/weight_gradient.cuh", entry, spec.gpu.arch, str(spec)), layout


def prelude(spec: KernelSpec, layout: Layout) -> str:
    """The source before the header of the products."""
    sizes, places = sizes_and_places(spec)
    constants = {
        "GATES_AT_ONCE": layout.gates,
        "HEADS_AT_ONCE": layout.heads,
        "ROWS": _ROWS,
        "STAGES": layout.stages,
        "CLUSTER": layout.blocks,
        "SHARED_BYTES_EXPECTED": layout.shared_bytes,
    }
    source = definitions(spec.dtype, sizes | constants, places)
    return "\n".join((source, declaration(parameters.weight_gradient(spec))))


def sizes_and_places(spec: KernelSpec) -> tuple[dict[str, int], dict]:
    """What kernels for d_R are told of a cell: sizes, and where its recurrent gates stand among d_Wx and d_u."""
    cell = spec.cell
    sizes = {
        "HEADS": spec.heads,
        "D": spec.head_dim,
        "GR": len(cell.recurrent_gates),
        "GI": len(cell.input_gates),
        "GU": len(products.recurrent_only(cell)),
        "RESET": spec.variant.reset,
    }
    places = {
        "INPUT_OF": products.places(cell.recurrent_gates, cell.input_gates),
        "ONLY_OF": products.places(cell.recurrent_gates, products.recurrent_only(cell)),
    }
    return sizes, places
