"""d_R by a kernel that overlaps with the backward's time loop, on multiprocessors that the loop leaves idle.

The kernel is launched as a programmatic dependent of the loop: it begins when all blocks of the loop are running, and
these count the chunks of steps that they have finished. It multiplies by wgmma, which Hopper alone has.
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
from flashrnn.cuda.resident.source import CHUNK_UNIT
from flashrnn.cuda.source import definitions
from flashrnn.cuda.spec import KernelSpec
from flashrnn.cuda.weight_gradient import sizes_and_indices
from flashrnn.memory_format import aligned, batch_time_strides, contiguous

_UNITS = 128  # of a tile
_BLOCK = 64  # columns in shared memory; fewer take as long
THREADS = 256
_LOADS_AHEAD = 2, 4  # loads in flight with TF32, at least and at most
_WORDS = 4.5  # times as long where rows are copied in words of 4 bytes: 6 at 12 x 126, and at most 5 at 12 x 62
_FEWEST_PRODUCTS = 1_000_000  # per step; fewer take less time after the loop than counting chunks takes the loop
# Nanoseconds on an H200, fitted to measured times; those of the loop are a fifth higher, because overlapping still pays
# where d_R takes a little longer than the loop:
_STEP, _UNIT, _GATE_UNIT, _GATE_SEQUENCE = 190, 0.84, 0.42, 0.48  # of the loop: a step, and what sizes add to it
# What a product of the step adds in float32: in the loop three 16-bit products, by the estimates of cost.py, and in a
# library, which would make d_R after the loop, one at 52 TFLOP/s for one head of 768, 43 for one of 128, 23 for one of
# 64. Products of several heads are not divided along the steps: 7 for 12 of 100, 3 for 12 of 64.
_FLOAT_PRODUCT, _LIBRARY_PRODUCT = 1.5e-5, 4e-5
_LIBRARY_WIDTH, _LIBRARY_WIDTH_OF_HEADS = 128, 512  # head sizes from which a library's products are about that fast


class _Pipeline(NamedTuple):
    """How rows of a dtype are loaded and multiplied."""

    splits: int  # as `KernelSpec.splits`
    columns: int  # of a tile, at most: its sums are in registers, in float32 two of each
    rows: tuple[int, ...]  # of a load: the first that fits into shared memory
    stages: int  # loads in flight and in use; in float32 of parts of numbers, which are in use
    column: float  # nanoseconds in which a block adds a sequence's step to a column of its tiles


def _pipeline(spec: KernelSpec) -> _Pipeline:
    if spec.dtype.itemsize == 2:
        return _Pipeline(1, 256, (128, 64, 32), 4, 0.075)
    return _Pipeline(spec.splits, 128, (64, 32), 2, 0.4 if spec.variant.tf32 else 0.55)


@dataclass(frozen=True)
class Tiling:
    """How d_R is distributed over blocks; names as in resident/kernels/concurrent_gradient.cuh."""

    columns: int  # of a tile
    tiles: int  # of a block
    blocks: int
    rows: int  # of a load

    def keeps_up(self, spec: KernelSpec) -> bool:
        """Return whether a step takes hardly longer than the loop's."""
        gates, head_dim, batch = len(spec.cell.recurrent_gates), spec.head_dim, spec.batch
        step = _STEP + (_UNIT + _GATE_UNIT * gates) * head_dim + _GATE_SEQUENCE * gates * batch
        if spec.dtype == torch.float32:
            product = _FLOAT_PRODUCT + _library_product(spec) / (2 if spec.variant.tf32 else 1)
            step += product * batch * spec.heads * gates * head_dim**2
        column = _pipeline(spec).column * (_WORDS if spec.dtype.itemsize == 2 and head_dim % 4 else 1)
        return batch * self.tiles * max(self.columns, _BLOCK) * column <= step

    def ahead(self, spec: KernelSpec) -> int | None:
        """Return how many loads asynchronous copies are ahead: none in float32. None if there is no room for them."""
        pipeline = _pipeline(spec)
        stage = pipeline.splits * 2 * (_UNITS + -(-self.columns // _BLOCK) * _BLOCK) * self.rows
        free = spec.gpu.shared_per_block - _UNITS * self.columns * 4 * (self.tiles - 1) - pipeline.stages * stage
        if free < 0:
            return None
        if not spec.variant.tf32:
            return 0 if spec.dtype == torch.float32 else pipeline.stages - 2
        at_once = 2 ** ((4 * THREADS // self.columns).bit_length() - 1)  # rows of h: H_AT_ONCE in gradient_rows.cuh
        copied = 16 * THREADS * (self.rows * _UNITS // (4 * THREADS) + -(-self.rows // at_once))
        fewest, most = _LOADS_AHEAD
        return min(free // copied, most) if free >= fewest * copied else None

    @staticmethod
    def of(spec: KernelSpec, idle: int) -> "Tiling | None":
        """Return the tiling for `idle` multiprocessors whose blocks have least to do; None if they cannot hold d_R."""
        found, pipeline, head_dim = [], _pipeline(spec), spec.head_dim
        for across in range(-(-head_dim // pipeline.columns), -(-head_dim // _BLOCK) + 1):  # tiles
            columns = -(-head_dim // (8 * across)) * 8
            number = spec.heads * across * -(-len(spec.cell.recurrent_gates) * head_dim // _UNITS)
            tiles = 1 if number <= idle else 2
            choices = [Tiling(columns, tiles, -(-number // tiles), rows) for rows in pipeline.rows]
            fitting = next((choice for choice in choices if choice.ahead(spec) is not None), None)
            if fitting and number <= tiles * idle:
                found.append(fitting)
        return min(found, key=lambda tiling: (tiling.tiles, tiling.columns), default=None)


def _library_product(spec: KernelSpec) -> float:
    if spec.heads == 1:
        return _LIBRARY_PRODUCT * max(1, _LIBRARY_WIDTH / spec.head_dim)
    return _LIBRARY_PRODUCT * max(1, _LIBRARY_WIDTH_OF_HEADS / spec.head_dim) ** 2


def fewest_steps(spec: KernelSpec) -> int:
    """Return from how many steps on overlapping may gain something.

    Of 64 steps, d_R of the last 16 is left after the loop. In float32, whose product a library makes without tensor
    cores, overlapping still gains: LSTM 1 x 512 took 342 us in place of 372; 1 x 768 in bfloat16 283 in place of 269.
    """
    return 64 if spec.dtype == torch.float32 and not spec.variant.tf32 else 128


def overlapped(spec: KernelSpec, producers: int) -> Tiling | None:
    """Return the tiling that overlaps with a loop of `producers` blocks, each on its own multiprocessor; None if
    overlapping gains nothing."""
    products = spec.batch * spec.heads * len(spec.cell.recurrent_gates) * spec.head_dim**2
    odd = spec.head_dim % (spec.dtype.itemsize // 2 * 2)  # for copies of at least 4 bytes, in float32 16
    if not spec.gpu.warpgroup_products or odd or products < _FEWEST_PRODUCTS or spec.variant.both_ways:
        return None  # the last: the kernel adds up the chunks of all heads in one order of time
    tiling = Tiling.of(spec, spec.gpu.multiprocessors - producers)
    return tiling if tiling and tiling.keeps_up(spec) else None


class ConcurrentGradient:
    """d_R of one call. The loop gets `progress`, and this is called right after its launch, with nothing in between."""

    def __init__(
        self, spec: KernelSpec, tiling: Tiling, producers: int, h: Tensor, states: Tensor | None, reset: Tensor | None
    ) -> None:
        B, T, N, D = h.shape
        self._kernel, self._blocks = _kernel(spec, tiling, h.device.index), tiling.blocks
        self._d_R = h.new_empty(len(spec.cell.recurrent_gates), N, D, D)
        self.progress = torch.zeros(-(-T // CHUNK_UNIT), dtype=torch.int32, device=h.device)
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
def _kernel(spec: KernelSpec, tiling: Tiling, device: int) -> LoadedKernel:
    # All of the shared memory: so a block gets a multiprocessor that the loop has not taken.
    shape = THREADS, spec.gpu.shared_per_block, 1, False
    return load(compile_kernel(spec, tiling), parameters.concurrent_gradient(spec), device, *shape, dependent=True)


def compile_kernel(spec: KernelSpec, tiling: Tiling) -> Binary:
    """Return the compiled kernel; needs no GPU."""
    header, entry = "resident/kernels/concurrent_gradient.cuh", "flashrnn_concurrent_gradient"
    return build(prelude(spec, tiling), header, entry, spec.gpu.arch, str(spec))


def prelude(spec: KernelSpec, tiling: Tiling) -> str:
    """Return the source before the header."""
    sizes, indices = sizes_and_indices(spec)
    constants = {
        "UNITS": _UNITS,
        "COLUMNS": tiling.columns,
        "TILES": tiling.tiles,
        "ROWS": tiling.rows,
        "STAGES": _pipeline(spec).stages,
        "AHEAD": tiling.ahead(spec),
        "THREADS": THREADS,
        "CHUNK_UNIT": CHUNK_UNIT,
        "SHARED_BYTES_EXPECTED": spec.gpu.shared_per_block,
    }
    source = definitions(spec.dtype, sizes | constants, indices, spec.variant.tf32)
    return "\n".join((source, declaration(parameters.concurrent_gradient(spec)), *_wgmma_of(tiling.columns)))


def _wgmma_of(columns: int) -> tuple[str, str]:
    """Return the instruction for that many columns and its operands, as resident/kernels/warpgroup.cuh takes them."""
    sums = range(columns // 2)
    numbers, operands = ", ".join(f"%{i}" for i in sums), ", ".join(f'"+f"(c[{i}])' for i in sums)
    left, right, adds = (f"%{columns // 2 + i}" for i in range(3))
    name = f'"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32." MMA_TYPE "." MMA_TYPE'
    product = f'"setp.ne.b32 add, {adds}, 0; " {name} " {{{numbers}}}, {left}, {right}, add, 1, 1, 1, 1;"'
    return f"#define WGMMA {product}", f"#define WGMMA_SUMS(c) {operands}"
