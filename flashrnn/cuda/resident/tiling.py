"""Tilings of a resident kernel, and the registers and shared memory that a kernel with a tiling needs."""

from dataclasses import dataclass, replace
from math import ceil

import torch

from flashrnn.cells import Cell
from flashrnn.cells.bounds import is_bounded
from flashrnn.cells.built_in import LSTM
from flashrnn.cells.centring import is_centred
from flashrnn.cells.gates import varying
from flashrnn.cells.printers.cuda import early_values, exchanges, operation_count
from flashrnn.cells.trace import trace
from flashrnn.constrint import Expression, ceil_div, maximum, minimum
from flashrnn.constrint.expressions import Operand
from flashrnn.cuda.spec import KernelSpec
from flashrnn.residual import residual_dtype

_BARRIERS = 64  # bytes of shared memory: BARRIER_BYTES in resident/kernels/tiles.cuh
_GRID_SLACK = {"forward": 20, "backward": 16}  # registers for an exchange through L2
_LATER_EXCHANGE = 16  # registers for each further exchange over units in a forward step, with fp16x2 splits


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
        return self.unit_tiles * self.k_slices

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def distribution(self) -> "Tiling":
        """Return the tiling without its stages and its fragments of R in registers, which do not affect how the work is
        distributed."""
        return replace(self, stages=0, register_fragments=0)

    def batches(self, batch: int) -> int:
        """Return the number of groups per head for a batch of this size."""
        return -(-batch // self.sequences)


@dataclass(frozen=True)
class Unknowns(Tiling):
    """The unknowns of a problem. `spread` follows from the others, but as an unknown it gives tighter bounds of the
    estimate."""

    spread: Operand = 0


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
    return len(spec.cell.recurrent_gates) * tiling.blocks * tiling.unit_tiles // tiling.k_slices


def registers(spec: KernelSpec, tiling: Tiling) -> Expression:
    """Estimate the registers of a thread: R, addresses, tiles of sums, values of cells."""
    gates, states, cells = len(varying(spec.cell)), len(spec.cell.states), cells_of_lane(spec, tiling)
    if spec.direction == "forward":
        sums, values = len(spec.cell.recurrent_gates), 1 + (gates + 2 * states) * cells + cells // 4 * 34
        values += more_operations(spec.cell, spec.direction) // 8 * cells
        if is_scaled(spec):
            values += _LATER_EXCHANGE * tiling.grid * max(len(exchanges(spec.cell, "forward")) - 1, 0)
    else:
        sums = maximum(4, minimum(tiling.blocks // tiling.k_slices, 8))
        constants = len(spec.cell.gates) - gates  # their gradients are summed for neighbouring units
        values = (2 * gates + 3 * states) * cells + constants * minimum(cells, 2)
        values += more_operations(spec.cell, spec.direction) // 8 * cells  # some operations lie between reductions
    slack = _GRID_SLACK[spec.direction] * tiling.grid
    return tiling.register_fragments * 4 + 38 + 8 * splits(spec) + 4 * (sums * tiling.batch_tiles) + values + slack


def polled_words(spec: KernelSpec, tiling: Tiling) -> Operand:
    """Return the registers for the words that a lane of a grid polls at once in a reduction over units, needed only
    briefly."""
    if not tiling.grid:
        return 0
    pairs = max((one.pairs for one in exchanges(spec.cell, spec.direction)), default=0)
    return 2 * pairs * minimum(4, ceil_div(tiling.blocks * tiling.batch_tiles, 4 * tiling.k_slices))


def published_words(spec: KernelSpec, tiling: Tiling) -> int:
    """Return the 8-byte words of a grid's reductions over units: WORDS in kernels/grid_reductions.cuh."""
    found = exchanges(spec.cell, spec.direction)
    pairs = max((one.pairs for one in found), default=0)
    row = tiling.columns * (pairs if pairs < 2 else pairs + pairs % 2)
    return max(len(found), 2) * tiling.blocks * tiling.unit_tiles * (row + -row % 16)


def shared_bytes(spec: KernelSpec, tiling: Tiling) -> int:
    """Return the bytes of a block's dynamic shared memory."""
    return shared_memory(spec, tiling).evaluate({})


def shared_memory(spec: KernelSpec, tiling: Tiling) -> Expression:
    """Return the bytes of SharedMemory in resident/kernels/{forward,backward}_memory.cuh."""
    cell, parts, size = spec.cell, splits(spec), spec.dtype.itemsize
    gates, others = len(cell.recurrent_gates), len(cell.states) - 1
    seqs, units, warps = 8 * tiling.batch_tiles, tiling.units, tiling.warps
    from_memory = parts * tiles_of_warp(spec, tiling) - tiling.register_fragments
    several_blocks, several_warps = minimum(tiling.blocks - 1, 1), minimum(tiling.k_slices - 1, 1)
    rows = (1 - several_blocks) * int(in_rows(spec))
    sums = several_warps * warps * lane_cells(spec, tiling) * 128  # of one gate
    early = 0
    if in_rows(spec):
        pairs = ceil(early_values(cell, spec.direction) / 2)
        early = helped(spec, tiling) * tiling.sequences * (pairs * spec.head_dim * 16)
        half = minimum(tiling.columns // (2 * tiling.sequences), 1)  # 1 if every second column alone is used
        slices = tiling.k_slices if spec.direction == "forward" else _slices(spec, tiling)
        of_rows = slices * (4 * tiling.batch_tiles * (2 - half)) * (spec.head_dim + 4 + 4 * half) * 4
        sums = several_blocks * sums + (1 - several_blocks) * of_rows
        row_of_squares = (spec.head_dim // 2 + (8 if spec.head_dim > 16 else 0)) * 4
        early += centres(spec, tiling) * ((4 * tiling.batch_tiles * (2 - half)) * row_of_squares)
    if spec.direction == "forward":
        operand, row = operands(spec, tiling) * tiling.padded * (seqs + rows) * 2, len(cell.input_gates) * size
        exchange = gates * sums + several_blocks * (operands(spec, tiling) * units * seqs * 2)
    else:
        uses_h = cell.states[0] in trace(cell).factors.inputs
        operand = operands(spec, tiling) * gates * units * (seqs + rows) * 2
        received = seqs if tiling.any_sequences else tiling.sequences
        stored_gates = (len(varying(cell)) | 1) * residual_dtype(spec.dtype).itemsize  # the pitch of tiles.cuh
        row = stored_gates + (1 + uses_h) * size + others * 4
        exchange = (
            sums
            if tiling.grid
            else several_blocks * (2 * tiling.padded * received * size) + (1 - several_blocks) * sums
        )
        row += ceil(trace(cell).statistics.needed / 4)  # 16 bytes per tile of 16 units
    inputs = units * seqs * row + rows * (tiling.unit_tiles * 32)
    constants = (len(cell.gates) - len(varying(cell))) * units * 4  # biases
    resident = warps * maximum(from_memory, 0) * 512 + _BARRIERS + _reduction_bytes(spec, tiling) + constants
    resident += int(is_scaled(spec)) * contributions(spec, tiling) * seqs * 4  # MAGNITUDE_BYTES in scale.cuh
    return 2 * operand + tiling.stages * inputs + exchange + resident + early


def _slices(spec: KernelSpec, tiling: Tiling) -> Operand:
    """Return SLICES of kernels/backward_memory.cuh, if a row of lanes has all units of a sequence."""
    alone = 2 - minimum(tiling.k_slices, 2)  # 1 if one warp multiplies for a unit tile, else 0
    return tiling.k_slices + alone * (tiling.unit_tiles - 1)


def _reduction_bytes(spec: KernelSpec, tiling: Tiling) -> Operand:
    """Return REDUCTION_BYTES of resident/kernels/unit_reductions.cuh."""
    found = exchanges(spec.cell, spec.direction)
    if not found:
        return 0
    vectors, seqs = max(one.vectors for one in found), 8 * tiling.batch_tiles
    if tiling.grid:
        return 2 * tiling.warps * seqs * vectors * 16
    several = minimum(tiling.blocks - 1, 1)
    of_buffers = found if len(found) > 1 else found * 2
    part = sum(8 if one.words <= 2 else 16 * one.vectors for one in of_buffers)
    sequences = seqs if tiling.any_sequences else tiling.sequences
    received = tiling.blocks * contributions(spec, tiling) * sequences * part + ceil(len(of_buffers) / 2) * 16
    partials = seqs * (2 * (contributions(spec, tiling) * vectors + 1) + vectors) * 16
    return (1 - several) * (1 - int(in_rows(spec))) * partials + several * received


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
    return (1 - minimum(tiling.blocks - 1, 1)) * minimum(2 // tiling.sequences, 1)


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
    alone = (1 - minimum(tiling.blocks - 1, 1)) * (2 - minimum(tiling.k_slices, 2))
    return alone * minimum(tiling.register_fragments // tiles_of_warp(spec, tiling), 1)


def bias_parts(spec: KernelSpec, tiling: Tiling) -> Expression:
    """Return the number of parts whose sum is the gradient of a bias: BIAS_PARTS in kernels/backward_cells.cuh."""
    alone = (1 - minimum(tiling.blocks - 1, 1)) * int(in_rows(spec))
    rows = 4 * tiling.k_slices
    rows -= helped(spec, tiling) * (rows - tiling.sequences)
    return (1 - alone) * minimum(tiling.k_slices, lane_cells(spec, tiling)) + alone * rows


def lane_cells(spec: KernelSpec, tiling: Tiling) -> Operand:
    """Return the number of cells in a lane's fragment: half as many if only every second column is used."""
    of_tiles = 4 * tiling.batch_tiles
    if tiling.grid:
        return of_tiles
    if trace(spec.cell).reduces:
        several = minimum(tiling.blocks - 1, 1)
        of_cluster = of_tiles - 2 * dense(spec, tiling)
        return maximum(several * of_cluster + (1 - several) * maximum(tiling.sequences // 2, 2), 1)
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
    warps each was slower. A backward of half types would gain 2 %, and need a seventh kernel for all batch sizes. A
    forward of half types loses 4 to 7 %, unless a cell has four sums, which are one vector in shared memory.
    """
    half = spec.dtype.itemsize == 2 and (spec.direction == "backward" or len(spec.cell.recurrent_gates) != 4)
    if tiling.grid or tiling.any_sequences or half or not trace(spec.cell).reduces:
        return 0
    few = minimum(tiling.columns // 2 // tiling.sequences, 1)  # at most half of the columns are used
    warps = minimum(8 // tiling.warps, 1) * minimum(tiling.k_slices // (2 if spec.direction == "forward" else 4), 1)
    return few * warps * minimum(tiling.blocks - 1, 1) * (2 - tiling.batch_tiles)


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


def spillable(spec: KernelSpec, grid: bool) -> int:
    """Return how many registers may spill in the loop: none, except if steps reduce over units in a cluster. In a grid,
    where a kernel needs fewer registers, each exchange takes longer than all that spills."""
    return 40 if trace(spec.cell).reduces and not grid else 0


def more_operations(cell: Cell, direction: str) -> int:
    """Return by how many operations the step of a cell that reduces over units exceeds that of an LSTM; 0 for other
    cells."""
    return max(0, operation_count(cell, direction) - operation_count(LSTM, direction)) if trace(cell).reduces else 0
