"""d_R by a kernel that overlaps with the backward's time loop, on multiprocessors that the loop leaves idle.

The kernel is launched as a programmatic dependent of the loop: it begins when all blocks of the loop are running, and
these count the chunks of steps that they have finished. It multiplies by wgmma, so it needs a Hopper GPU.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product
from typing import NamedTuple

import torch
from torch import Tensor

from flashrnn.cuda.build import Binary, build
from flashrnn.cuda.launch import LoadedKernel, load
from flashrnn.cuda.parameters import Parameter, Parameters, Tensors, declaration, numbers
from flashrnn.cuda.resident.source import CHUNK_UNIT
from flashrnn.cuda.source import definitions
from flashrnn.cuda.spec import KernelSpec
from flashrnn.cuda.weight_gradient import WIDEST, gradient_rows, previous_h, sizes_and_indices
from flashrnn.memory_format import batch_time_strides

_BLOCK = 64  # columns of a block in shared memory (128-byte swizzle)
_TURN_STEPS = 64  # steps of a turn of one of a block's tiles, at least: changing turns takes about as long as 10 steps
_LOADS_AHEAD = 2, 4  # loads in flight with TF32: minimum and maximum
_FEWEST_PRODUCTS = 1_000_000  # per step; with fewer, counting chunks takes longer than d_R after the loop
_OTHER_REGISTERS = 64  # of a thread, besides those for sums and loads
# Slowdowns if heads begin in the middle of a 32-byte sector, and if rows are copied in words of 4 bytes.
_SECTORS, _WORDS = 1.2, 3.5
# Nanoseconds, fitted to times measured on an H200. The constants of the loop are a fifth higher than measured, because
# overlapping still pays if d_R takes a little longer than the loop.
_STEP, _UNIT, _GATE_UNIT, _GATE_SEQUENCE = 190, 0.84, 0.42, 0.48  # a step of the loop, and what sizes add to it
_TURN = 2.4e-3  # per sum and step, if the tiles of a block take turns
# Per product (multiply-add) of half types, if d_R is computed after the loop: with one head, and with several. The
# latter takes twice as long for narrow heads, and for heads that begin in the middle of a sector.
_PRODUCT_AFTER, _PRODUCT_OF_HEADS_AFTER = 2.6e-6, 5e-6
# What a product adds to a step in float32. In the loop it is three 16-bit products, by the estimates of cost.py. A
# library's d_R after the loop runs at 52 TFLOP/s for one head of 768, 43 for one of 128, 23 for one of 64. Products of
# several heads are not split along the steps: 7 TFLOP/s for 12 of 100, 3 for 12 of 64. With TF32, those of several
# heads take half as long, those of one head a quarter.
_FLOAT_PRODUCT, _LIBRARY_PRODUCT = 1.5e-5, 4e-5
_LIBRARY_WIDTH, _LIBRARY_WIDTH_OF_HEADS = 128, 512  # head sizes from which library products reach about that speed


class _Pipeline(NamedTuple):
    """How the rows of a dtype are loaded and multiplied."""

    splits: int  # see `KernelSpec.splits`
    tiles: int  # maximum per block: more than two were tried in float32 only
    units: tuple[int, ...]  # choices per tile, 64 for each warpgroup
    columns: int  # maximum per tile: its sums are in registers, two of each in float32
    rows: tuple[int, ...]  # choices per load: the first that fits into shared memory is used
    stages: int  # loads in flight and in use; in float32, splits of loads in use
    # Nanoseconds of a block per load; per row and unit or column; per row and sum:
    load: float
    side: float
    pair: float


def _pipeline(spec: KernelSpec) -> _Pipeline:
    """Return the pipeline for the dtype and the precision of a spec."""
    if spec.dtype.itemsize == 2:
        return _Pipeline(1, 2, (128, 192), 256, (128, 64, 32), 4, 480, 0, 2.5e-4)
    if spec.variant.tf32:
        return _Pipeline(spec.splits, 2, (128, 192), 128, (64, 32), 2, 0, 0.155, 0)
    return _Pipeline(spec.splits, 4, (128,), 128, (64, 32), 2, 0, 0.19, 0)


@dataclass(frozen=True)
class Tiling:
    """How d_R is distributed over blocks; names as in resident/kernels/concurrent_gradient.cuh."""

    units: int  # per tile
    columns: int  # per tile
    tiles: int  # per block
    blocks: int
    rows: int  # per load
    resumes: bool = False  # adds the rows that another kernel has left

    def threads(self, dtype: torch.dtype) -> int:
        """Return the number of threads of a block: two for each unit, and with half types a warpgroup that copies."""
        return 2 * self.units + (128 if dtype.itemsize == 2 else 0)

    def kernels(self, dtype: torch.dtype) -> "tuple[Tiling, ...]":
        """Return the tilings of the kernels that compute d_R.

        In float32, if tiles take turns, another kernel adds the rows that are left when the loop ends.
        """
        if self.tiles == 1 or dtype != torch.float32:
            return (self,)
        return self, replace(self, tiles=1, blocks=self.blocks * self.tiles, resumes=True)

    def step(self, spec: KernelSpec) -> float:
        """Return the estimated nanoseconds that a step takes."""
        pipeline, sums = _pipeline(spec), self.units * self.columns
        row = pipeline.load / self.rows + pipeline.side * (self.units + self.columns) + pipeline.pair * sums
        if spec.dtype.itemsize == 2:
            row *= _WORDS if spec.head_dim % 4 else _SECTORS if spec.head_dim % 16 else 1
        return spec.batch * self.tiles * row + (self.tiles - 1) * sums * _TURN

    def keeps_up(self, spec: KernelSpec) -> bool:
        """Return whether a step takes about as long as one of the loop plus its share of a library's d_R, or less."""
        gates, head_dim, batch = len(spec.cell.recurrent_gates), spec.head_dim, spec.batch
        step = _STEP + (_UNIT + _GATE_UNIT * gates) * head_dim + _GATE_SEQUENCE * gates * batch
        return self.step(spec) <= step + _product(spec) * batch * spec.heads * gates * head_dim**2

    def ahead(self, spec: KernelSpec) -> int | None:
        """Return by how many loads the copies of TF32 are ahead, otherwise 0. None if the loads do not fit."""
        pipeline, threads = _pipeline(spec), self.threads(spec.dtype)
        stage = pipeline.splits * 2 * (self.units + -(-self.columns // _BLOCK) * _BLOCK) * self.rows
        barriers = 16 if spec.dtype.itemsize == 2 else 0
        free = spec.gpu.shared_per_block - pipeline.stages * (stage + barriers)
        if free < 0:
            return None
        if spec.dtype.itemsize == 2:
            return 0
        if not spec.variant.tf32:  # loads are in registers
            registers = self.columns + self.rows * (self.units + self.columns) // threads + _OTHER_REGISTERS
            return 0 if registers <= min(255, spec.gpu.registers // threads) else None
        # Rows of h that are copied together: H_AT_ONCE in gradient_rows.cuh.
        at_once = min(2 ** ((threads // (-(-self.columns // 32) * 8)).bit_length() - 1), 32)
        copied = 16 * threads * (self.rows // 8 + self.rows // at_once)
        fewest, most = _LOADS_AHEAD
        return min(free // copied, most) if free >= fewest * copied else None

    @staticmethod
    def of(spec: KernelSpec, idle: int) -> "Tiling | None":
        """Return the fastest tiling by estimate on `idle` multiprocessors; None if these cannot hold d_R."""
        pipeline, head_dim, found = _pipeline(spec), spec.head_dim, []
        most_across = -(-head_dim // _BLOCK)  # maximum tiles along a head's columns
        for units, across in product(pipeline.units, range(-(-head_dim // pipeline.columns), most_across + 1)):
            columns = -(-head_dim // (8 * across)) * 8
            number = spec.heads * across * -(-len(spec.cell.recurrent_gates) * head_dim // units)
            tiles = -(-number // idle) if idle > 0 else number
            choices = [Tiling(units, columns, tiles, -(-number // tiles), rows) for rows in pipeline.rows]
            fitting = next((choice for choice in choices if choice.ahead(spec) is not None), None)
            if fitting and tiles <= pipeline.tiles:
                found.append(fitting)
        return min(found, key=lambda tiling: tiling.step(spec), default=None)


def _product(spec: KernelSpec) -> float:
    """Return the nanoseconds that a product adds to the estimates of a step of the loop and of a library's d_R."""
    if spec.dtype == torch.float32:
        faster = (4 if spec.heads == 1 else 2) if spec.variant.tf32 else 1
        return _FLOAT_PRODUCT + _library_product(spec) / faster
    if spec.heads == 1:
        return _PRODUCT_AFTER
    return _PRODUCT_OF_HEADS_AFTER * (2 if spec.head_dim <= WIDEST or spec.head_dim % 16 else 1)


def _library_product(spec: KernelSpec) -> float:
    """Return the nanoseconds per product of a library's d_R in float32."""
    if spec.heads == 1:
        return _LIBRARY_PRODUCT * max(1, _LIBRARY_WIDTH / spec.head_dim)
    return _LIBRARY_PRODUCT * max(1, _LIBRARY_WIDTH_OF_HEADS / spec.head_dim) ** 2


def fewest_steps(spec: KernelSpec) -> int:
    """Return the number of steps from which on overlapping may gain time.

    With 64 steps, the last 16 remain after the loop. Overlapping gains in float32, where a library does not use tensor
    cores (LSTM 1 x 512: 342 us instead of 372), but not in bfloat16 (1 x 768: 283 us instead of 269).
    """
    return 64 if spec.dtype == torch.float32 and not spec.variant.tf32 else 128


def overlapped(spec: KernelSpec, producers: int) -> Tiling | None:
    """Return the tiling that overlaps with a loop of `producers` blocks; None if overlapping gains nothing.

    Each of these blocks has its own multiprocessor.
    """
    products = spec.batch * spec.heads * len(spec.cell.recurrent_gates) * spec.head_dim**2
    odd = spec.head_dim % (spec.dtype.itemsize // 2 * 2)  # copies have at least 4 bytes, in float32 16
    if not spec.gpu.warpgroup_products or odd or products < _FEWEST_PRODUCTS or spec.variant.bidirectional:
        return None  # bidirectional: the kernel adds the chunks of all heads in one order of time
    tiling = Tiling.of(spec, spec.gpu.multiprocessors - producers)
    return tiling if tiling and tiling.keeps_up(spec) else None


class ConcurrentGradient:
    """d_R of one call.

    Pass `progress` to the loop, and call this directly after its launch, with no other launch in between.
    """

    def __init__(
        self, spec: KernelSpec, tiling: Tiling, producers: int, h: Tensor, states: Tensor | None, reset: Tensor | None
    ) -> None:
        B, T, N, D = h.shape
        self._kernels = [(one.blocks, _kernel(spec, one, h.device.index)) for one in tiling.kernels(h.dtype)]
        self._d_R = h.new_empty(len(spec.cell.recurrent_gates), N, D, D)
        tiles = tiling.blocks * tiling.tiles if tiling.tiles > 1 else 0
        # The number of steps that the overlapped kernel has added to each tile, if another kernel adds the rest.
        self.added = h.new_empty(tiles, dtype=torch.int32) if len(self._kernels) > 1 else None
        self.progress = torch.zeros(-(-T // CHUNK_UNIT), dtype=torch.int32, device=h.device)
        self._known = {
            **previous_h(h, states, reset),
            "d_R": self._d_R,
            "sums": h.new_empty(tiles * tiling.units * tiling.columns, dtype=torch.float32) if tiles else None,
            "added": self.added,
            "progress": self.progress,
            "producers": producers,
            "B": B,
            "T": T,
            "row_t": batch_time_strides(h)[1],
        }

    def __call__(self, d_Wx: Tensor, d_u: Tensor) -> Tensor:
        """Launch the kernels for these gradients of the gates. Return d_R, which they write."""
        for blocks, kernel in self._kernels:
            kernel.launch(blocks, {"d_x": d_Wx, "d_u": d_u, **self._known})
        return self._d_R


def parameters(spec: KernelSpec) -> Parameters:
    """Return the parameters of resident/kernels/concurrent_gradient.cuh."""
    GR, N, D = len(spec.cell.recurrent_gates), spec.heads, spec.head_dim
    return (
        *gradient_rows(spec),
        Tensors(spec).writes("d_R", "scalar", GR, N, D, D),
        Tensors(spec).writes("sums", "float"),
        Parameter("added", "u32*", torch.int32),
        Parameter("progress", "const u32*", torch.int32),
        *numbers("producers", "B", "T", "row_t"),
    )


@cache
def _kernel(spec: KernelSpec, tiling: Tiling, device: int) -> LoadedKernel:
    # All of the shared memory, so that each block gets a multiprocessor that the loop does not use.
    shape = tiling.threads(spec.dtype), spec.gpu.shared_per_block, 1, False
    dependent = not tiling.resumes
    return load(compile_kernel(spec, tiling), parameters(spec), device, *shape, dependent)


def compile_kernels(spec: KernelSpec, tiling: Tiling) -> None:
    """Compile the kernels of a tiling. This needs no GPU."""
    for one in tiling.kernels(spec.dtype):
        compile_kernel(spec, one)


def compile_kernel(spec: KernelSpec, tiling: Tiling) -> Binary:
    """Return the compiled kernel. This needs no GPU."""
    header, entry = "resident/kernels/concurrent_gradient.cuh", "flashrnn_concurrent_gradient"
    return build(prelude(spec, tiling), header, entry, spec.gpu.arch, str(spec))


def prelude(spec: KernelSpec, tiling: Tiling) -> str:
    """Return the printed source before the header."""
    sizes, indices = sizes_and_indices(spec)
    second = _second_column(spec, tiling)
    constants = {
        "UNITS": tiling.units,
        "COLUMNS": tiling.columns,
        "SECOND_COLUMN": second,
        "TILES": tiling.tiles,
        "ROWS": tiling.rows,
        "STAGES": _pipeline(spec).stages,
        "AHEAD": tiling.ahead(spec),
        "THREADS": tiling.threads(spec.dtype),
        "CHUNK_UNIT": CHUNK_UNIT,
        "TURN_STEPS": _TURN_STEPS,
        "RESUMES": tiling.resumes,
        "SHARED_BYTES_EXPECTED": spec.gpu.shared_per_block,
    }
    source = definitions(spec.dtype, sizes | constants, indices, spec.variant.tf32)
    return "\n".join((source, declaration(parameters(spec)), *_wgmma_of(tiling.columns, second)))


def _second_column(spec: KernelSpec, tiling: Tiling) -> int:
    """Return the first column of the second of two wgmma instructions; all columns if there is one.

    With three warpgroups that multiply and one that copies, the compiler refuses an instruction for more columns.
    """
    return 128 if tiling.threads(spec.dtype) == 512 and tiling.columns > 200 else tiling.columns


def _wgmma_of(columns: int, second: int) -> tuple[str, str]:
    """Return the wgmma instructions for `columns` columns, and their operands, as warpgroup.cuh takes them.

    The second instruction begins at column `second`.
    """
    operands = ", ".join(f'"+f"(c[{i}])' for i in range(columns // 2))
    left, right, adds = columns // 2, columns // 2 + 1, columns // 2 + 3
    product = f"setp.ne.b32 add, %{adds}, 0;"
    for i, (first, end) in enumerate(pairwise(sorted({0, second, columns}))):
        sums = ", ".join(f"%{i}" for i in range(first // 2, end // 2))
        name = f'wgmma.mma_async.sync.aligned.m64n{end - first}k16.f32." MMA_TYPE "." MMA_TYPE "'
        product += f" {name} {{{sums}}}, %{left}, %{right + i}, add, 1, 1, 1, 1;"
    return f'#define WGMMA "{product}"', f"#define WGMMA_SUMS(c) {operands}"
