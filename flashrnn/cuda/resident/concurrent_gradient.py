"""d_R beside the backward's time loop, by multiprocessors that the loop leaves idle: then it takes hardly any time.

The kernel is launched as a programmatic dependent of the loop's: it begins when all blocks of the loop run, and these
count the parts of their steps that are done. Hopper alone has what it multiplies with, products of a warpgroup.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from flashrnn.cuda import parameters
from flashrnn.cuda.build import Binary, build
from flashrnn.cuda.launch import LoadedKernel, load
from flashrnn.cuda.parameters import declaration
from flashrnn.cuda.resident.source import PART_UNIT
from flashrnn.cuda.source import definitions
from flashrnn.cuda.spec import KernelSpec
from flashrnn.cuda.weight_gradient import sizes_and_places
from flashrnn.memory_format import aligned, batch_time_strides, contiguous

_UNITS = 128  # of a tile
_BLOCK = 64  # columns in shared memory; fewer take as long
THREADS = 256
SHORTEST = 128  # fewer steps leave nothing to do beside them
_LEAST = 1_000_000  # products per step; fewer take less time behind the loop than it takes the loop to count its parts
# Nanoseconds on an H200, fitted to measured times, and a fifth of the loop's added, which pays still:
_STEP, _UNIT, _GATE_UNIT, _GATE_SEQUENCE = 190, 0.84, 0.42, 0.48  # of the loop: a step, and what sizes add to it
# What a product of the step adds in float32: six of parts in the loop, by the estimates of tiling.py, and one by a
# library that would make d_R after it, at 52 TFLOP/s for one head of 768, 7 for 12 of 100 and 3 for 12 of 64.
_FLOAT_PRODUCT, _LIBRARY_PRODUCT = 3e-5, 4e-5
_LIBRARY_WIDTH = 512  # head size from which a library's products are that fast


class _Way(NamedTuple):
    """How a dtype's rows are multiplied."""

    planes: int  # parts of a number
    columns: int  # of a tile at most: its sums are in registers, in float32 two of each
    rows: tuple[int, ...]  # of a load: as many as there is room for
    stages: int  # loads on their way and in use
    column: float  # nanoseconds in which a block adds a sequence's step to a column of its tiles


def _way(spec: KernelSpec) -> _Way:
    if spec.dtype.itemsize == 2:
        return _Way(1, 256, (128, 64, 32), 4, 0.075)
    # the times by a count of the bytes of shared memory, not measured
    return _Way(spec.planes, 128, (64, 32), 2, 0.2 if spec.variant.tf32 else 0.35)


@dataclass(frozen=True)
class Layout:
    """How d_R is spread over blocks; names as in resident/kernels/concurrent_gradient.cuh."""

    columns: int  # of a tile
    tiles: int  # of a block
    blocks: int
    rows: int  # of a load

    def keeps_up(self, spec: KernelSpec) -> bool:
        """Whether a step of the loop is not done long before."""
        gates, head_dim, batch = len(spec.cell.recurrent_gates), spec.head_dim, spec.batch
        step = _STEP + (_UNIT + _GATE_UNIT * gates) * head_dim + _GATE_SEQUENCE * gates * batch
        if spec.dtype == torch.float32:
            narrow = max(1, _LIBRARY_WIDTH / head_dim) ** 2
            product = (_FLOAT_PRODUCT + _LIBRARY_PRODUCT * narrow) / (2 if spec.variant.tf32 else 1)
            step += product * batch * spec.heads * gates * head_dim**2
        return batch * self.tiles * max(self.columns, _BLOCK) * _way(spec).column <= step

    @staticmethod
    def of(spec: KernelSpec, idle: int) -> "Layout | None":
        """For `idle` multiprocessors: the one whose blocks have least to do; None where they cannot hold d_R."""
        layouts, way, head_dim = [], _way(spec), spec.head_dim
        for across in range(-(-head_dim // way.columns), -(-head_dim // _BLOCK) + 1):  # tiles
            columns = -(-head_dim // (8 * across)) * 8
            number = spec.heads * across * -(-len(spec.cell.recurrent_gates) * head_dim // _UNITS)
            tiles = 1 if number <= idle else 2
            row = way.planes * 2 * (_UNITS + -(-columns // _BLOCK) * _BLOCK)
            room = (spec.gpu.shared_per_block - _UNITS * columns * 4 * (tiles - 1)) // row  # for rows
            rows = next((rows for rows in way.rows if way.stages * rows <= room), None)
            if rows and number <= tiles * idle:
                layouts.append(Layout(columns, tiles, -(-number // tiles), rows))
        return min(layouts, key=lambda layout: (layout.tiles, layout.columns), default=None)


def beside(spec: KernelSpec, producers: int) -> Layout | None:
    """The layout beside a loop of `producers` blocks, each on its own multiprocessor; None if nothing is gained."""
    products = spec.batch * spec.heads * len(spec.cell.recurrent_gates) * spec.head_dim**2
    odd = spec.head_dim % (spec.dtype.itemsize // 2 * 2)  # for copies of at least 4 bytes, in float32 16
    if spec.gpu.capability[0] != 9 or odd or products < _LEAST:
        return None
    layout = Layout.of(spec, spec.gpu.multiprocessors - producers)
    return layout if layout and layout.keeps_up(spec) else None


class ConcurrentGradient:
    """d_R of one call: `progress` is for the loop, behind whose launch this is called, with nothing in between."""

    def __init__(
        self, spec: KernelSpec, layout: Layout, producers: int, h: Tensor, states: Tensor | None, reset: Tensor | None
    ) -> None:
        B, T, N, D = h.shape
        self._kernel, self._blocks = _kernel(spec, layout, h.device.index), layout.blocks
        self._d_R = h.new_empty(len(spec.cell.recurrent_gates), N, D, D)
        self.progress = torch.zeros(-(-T // PART_UNIT), dtype=torch.int32, device=h.device)
        self._known = {
            "h": aligned(h),
            "initial": None if states is None else aligned(states[0].to(h.dtype).contiguous()),
            "reset": contiguous(reset),
            "d_R": self._d_R,
            "progress": self.progress,
            "producers": producers,
            "B": B,
            "T": T,
            "row_t": batch_time_strides(h)[1],
        }

    def __call__(self, d_Wx: Tensor, d_u: Tensor) -> Tensor:
        self._kernel.launch(self._blocks, {"d_x": d_Wx, "d_u": d_u, **self._known})
        return self._d_R


@cache
def _kernel(spec: KernelSpec, layout: Layout, device: int) -> LoadedKernel:
    # As much shared memory as there is, for multiprocessors that the loop has not taken.
    shape = THREADS, spec.gpu.shared_per_block, 1, False
    return load(compile_kernel(spec, layout), parameters.concurrent_gradient(spec), device, *shape, beside=True)


def compile_kernel(spec: KernelSpec, layout: Layout) -> Binary:
    """The kernel; needs no GPU."""
    header, entry = "resident/kernels/concurrent_gradient.cuh", "flashrnn_concurrent_gradient"
    return build(prelude(spec, layout), header, entry, spec.gpu.arch, str(spec))


def prelude(spec: KernelSpec, layout: Layout) -> str:
    """The source before the header."""
    sizes, places = sizes_and_places(spec)
    constants = {
        "UNITS": _UNITS,
        "COLUMNS": layout.columns,
        "TILES": layout.tiles,
        "ROWS": layout.rows,
        "STAGES": _way(spec).stages,
        "THREADS": THREADS,
        "PART_UNIT": PART_UNIT,
        "SHARED_BYTES_EXPECTED": spec.gpu.shared_per_block,
    }
    source = definitions(spec.dtype, sizes | constants, places, spec.variant.tf32)
    return "\n".join((source, declaration(parameters.concurrent_gradient(spec)), *_product_of(layout.columns)))


def _product_of(columns: int) -> tuple[str, str]:
    """The instruction for sums of so many columns, and its operands, as resident/kernels/warpgroup.cuh takes them."""
    sums = range(columns // 2)
    numbers, operands = ", ".join(f"%{i}" for i in sums), ", ".join(f'"+f"(c[{i}])' for i in sums)
    left, right, adds = (f"%{columns // 2 + i}" for i in range(3))
    name = f'"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32." MMA_TYPE "." MMA_TYPE'
    product = f'"setp.ne.b32 add, {adds}, 0; " {name} " {{{numbers}}}, {left}, {right}, add, 1, 1, 1, 1;"'
    return f"#define WGMMA {product}", f"#define WGMMA_SUMS(c) {operands}"
