"""Tilings of a resident kernel, and how a tiling distributes products and cells over warps and lanes."""

from dataclasses import dataclass, replace

import torch

from flashrnn.cells.bounds import is_bounded
from flashrnn.cells.centring import is_centred
from flashrnn.cells.printers.cuda import has_early_sums
from flashrnn.cells.trace import trace
from flashrnn.constrint import Expression, maximum, minimum
from flashrnn.constrint.expressions import Operand
from flashrnn.cuda.spec import KernelSpec

WARPS_WITH_LOADERS = 8  # as many as have 255 registers each


@dataclass(frozen=True)
class Tiling:
    """How one head is distributed over warps and blocks; names as in resident/kernels/tiles.cuh.

    While the problem is posed, the fields are its unknowns, and the properties are expressions of them.
    """

    unit_tiles: int
    k_slices: int
    batch_tiles: int
    sequences: int
    blocks: int
    grid: bool
    stages: int
    register_fragments: int
    any_sequences: bool = False  # for clusters: `sequences`, up to all columns, is a kernel argument
    loaders: int = 0  # further warps of a backward, which load its inputs and multiply; with them, a block has eight

    @property
    def units(self) -> int:
        """Return the units of a block."""
        return 16 * self.unit_tiles

    @property
    def padded(self) -> int:
        """Return the units of a head, including padding."""
        return self.units * self.blocks

    @property
    def columns(self) -> int:
        """Return the columns of the product, of which `sequences` are used."""
        return 8 * self.batch_tiles

    @property
    def warps(self) -> int:
        return self.unit_tiles * self.k_slices + self.loaders

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def distribution(self) -> "Tiling":
        """Return the tiling without what does not affect how work is distributed: stages, and R in registers."""
        return replace(self, stages=0, register_fragments=0)

    def batches(self, batch: int) -> int:
        """Return the number of groups per head for a batch of this size."""
        return -(-batch // self.sequences)


@dataclass(frozen=True)
class Unknowns(Tiling):
    """The unknowns of a problem.

    `spread` follows from the others, but as an unknown it gives tighter bounds of the estimate.
    """

    spread: Operand = 0


def several(number: Operand) -> Expression:
    """Return 1 if a number of blocks or warps, which is at least 1, is larger than 1, else 0."""
    return minimum(number - 1, 1)


def alone(number: Operand) -> Expression:
    """Return 1 if a number of blocks or warps is 1, else 0."""
    return 1 - several(number)


def is_scaled(spec: KernelSpec) -> bool:
    """Return whether operands of products are scaled and split into float16 numbers: SCALED in common.cuh.

    The backward computes the largest of its operands. In the forward, where h is sent to other blocks, it must be
    bounded.
    """
    if spec.dtype != torch.float32 or spec.variant.tf32:
        return False
    return spec.direction == "backward" or is_bounded(spec.cell)


def splits(spec: KernelSpec) -> int:
    """Return the number of tensor-core operands into which a float is split: SPLITS in kernels/common.cuh."""
    return 2 if is_scaled(spec) else spec.splits


def tiles_of_warp(spec: KernelSpec, tiling: Tiling) -> Operand:
    """Return the number of 16 x 16 tiles of R that a warp multiplies, in either direction."""
    tiles = len(spec.cell.recurrent_gates) * tiling.blocks * tiling.unit_tiles
    if not may_have_loaders(spec):
        return tiles // tiling.k_slices
    loaded = minimum(tiling.loaders, 1)
    return loaded * (tiles * tiling.unit_tiles // WARPS_WITH_LOADERS) + (1 - loaded) * (tiles // tiling.k_slices)


def uses_early_sums(spec: KernelSpec, tiling: Tiling) -> bool:
    """Return whether a backward has an exchange before it has received dh: EARLY_SUMS in kernels/unit_reductions.cuh.

    In clusters without loaders, more words than in exchanges one after the other take too long to add up.
    """
    return has_early_sums(spec.cell, spec.direction) and (tiling.grid or tiling.loaders > 0)


def contributions(spec: KernelSpec, tiling: Tiling) -> Operand:
    """Return the number of warps of a block that have units of the same sequence."""
    if tiling.grid and trace(spec.cell).reduces:  # BOTH_UNITS in tiles.cuh
        return tiling.unit_tiles
    one_cell = minimum(tiling.k_slices // lane_cells(spec, tiling), 1) * (1 - dense(spec, tiling))
    return tiling.unit_tiles * (1 + one_cell * (1 - helped(spec, tiling)))


def in_rows(spec: KernelSpec) -> bool:
    """Return whether, in kernels of one block, a row of lanes has all units of a sequence: IN_ROWS in tiles.cuh."""
    return trace(spec.cell).reduces and spec.head_dim in (16, 32, 64)


def helped(spec: KernelSpec, tiling: Tiling) -> Operand:
    """Return 1 if half of the warps have all cells, and the others help them, else 0: HELPED in tiles.cuh."""
    if not in_rows(spec) or tiling.grid:
        return 0
    return alone(tiling.blocks) * minimum(2 // tiling.sequences, 1)


def is_helped(spec: KernelSpec, tiling: Tiling) -> bool:
    """Return whether `helped` is 1 for a tiling whose fields are numbers."""
    return _is_one(helped(spec, tiling))


def centres_weights(spec: KernelSpec, tiling: Tiling) -> bool:
    """Return whether `centres` is 1 for a tiling whose fields are numbers."""
    return _is_one(centres(spec, tiling))


def centres(spec: KernelSpec, tiling: Tiling) -> Operand:
    """Return 1 if a kernel centres R h, and adds up its squares before it is exchanged, else 0: CENTRED in tiles.cuh.

    This is for half types: with float32's scales, sums are complete later. All of R must be in registers.
    """
    permitted = spec.direction == "forward" and spec.dtype.itemsize == 2
    if not permitted or not in_rows(spec) or tiling.grid or not is_centred(spec.cell):
        return 0
    one_warp = alone(tiling.blocks) * alone(tiling.k_slices)
    return one_warp * minimum(tiling.register_fragments // tiles_of_warp(spec, tiling), 1)


def bias_parts(spec: KernelSpec, tiling: Tiling) -> Expression:
    """Return the number of parts whose sum is the gradient of a bias: BIAS_PARTS in kernels/backward_cells.cuh."""
    of_rows = alone(tiling.blocks) * int(in_rows(spec))
    rows = 4 * tiling.k_slices
    rows -= helped(spec, tiling) * (rows - tiling.sequences)
    return (1 - of_rows) * minimum(tiling.k_slices, lane_cells(spec, tiling)) + of_rows * rows


def lane_cells(spec: KernelSpec, tiling: Tiling) -> Operand:
    """Return the number of cells in a lane's fragment: half as many if only every second column is used."""
    of_tiles = 4 * tiling.batch_tiles
    if tiling.grid:
        return of_tiles
    if trace(spec.cell).reduces:
        of_cluster, of_block = of_tiles - 2 * dense(spec, tiling), maximum(tiling.sequences // 2, 2)
        return maximum(several(tiling.blocks) * of_cluster + alone(tiling.blocks) * of_block, 1)
    return of_tiles - 2 * spread(spec, tiling)


def spread(spec: KernelSpec, tiling: Tiling) -> Operand:
    """Return 1 if a step without reductions uses only every second column, else 0: SPREAD in tiles.cuh."""
    if isinstance(tiling, Unknowns):
        return tiling.spread
    of_cluster = spreads_clusters(spec) and tiling.k_slices == 1 and not tiling.any_sequences
    return int(
        (tiling.blocks == 1 or of_cluster) and not tiling.grid and tiling.batch_tiles == 1 and tiling.sequences == 4
    )


def spreads_clusters(spec: KernelSpec) -> bool:
    """Return whether clusters with one warp per tile may use only every second column: SPREAD in tiles.cuh.

    In float32, where R does not fit into the registers of so few warps, and for cells with one gate, they were slower.
    """
    half = spec.dtype.itemsize == 2
    return spec.direction == "forward" and half and not has_one_gate(spec) and not trace(spec.cell).reduces


def has_one_gate(spec: KernelSpec) -> bool:
    """Return whether cells have one gate, and no reductions over units: their steps take much less time than others."""
    return len(spec.cell.gates) == 1 and not trace(spec.cell).reduces


def dense(spec: KernelSpec, tiling: Tiling) -> Operand:
    """Return 1 if lanes take over cells of other lanes' fragments, else 0: DENSE in tiles.cuh.

    With more than eight warps, registers for the additional addresses would spill. A backward whose tiles have two
    warps each was slower, unless further warps load the inputs, and so was one of half types with a single exchange. A
    forward of half types loses 4 to 7 %, unless a cell has four sums, which are one vector in shared memory.
    """
    backward, half = spec.direction == "backward", spec.dtype.itemsize == 2
    if tiling.grid or tiling.any_sequences or not trace(spec.cell).reduces:
        return 0
    if half and not backward and len(spec.cell.recurrent_gates) != 4:
        return 0
    few = minimum(tiling.columns // 2 // tiling.sequences, 1)  # at most half of the columns are used
    warps = minimum(8 // tiling.warps, 1) * minimum(tiling.k_slices // (4 if backward and not half else 2), 1)
    if backward and half:
        warps *= minimum(tiling.loaders, 1)
    return few * warps * several(tiling.blocks) * (2 - tiling.batch_tiles)


def may_have_loaders(spec: KernelSpec) -> bool:
    """Return whether further warps may load the inputs of a backward: LOADERS in tiles.cuh.

    This was timed with half types and two exchanges alone.
    """
    half = spec.dtype.itemsize == 2
    return half and spec.layers == 1 and not spec.any_sequences and has_early_sums(spec.cell, spec.direction)


def operands(spec: KernelSpec, tiling: Tiling) -> Operand:
    """Return the number of tiles into which a right operand is split: OPERANDS in tiles.cuh."""
    return splits(spec) - dense(spec, tiling) if splits(spec) == 2 else splits(spec)


def is_dense(spec: KernelSpec, tiling: Tiling) -> bool:
    """Return whether `dense` is 1 for a tiling whose fields are numbers."""
    return _is_one(dense(spec, tiling))


def _is_one(of_numbers: Operand) -> bool:
    return bool(of_numbers if isinstance(of_numbers, int) else of_numbers.evaluate({}))


def cells_of_lane(spec: KernelSpec, tiling: Tiling) -> Expression:
    """Return the number of cells whose element-wise step a lane computes."""
    return maximum(lane_cells(spec, tiling) // tiling.k_slices, 1 + helped(spec, tiling))
