"""The registers and the shared memory that a resident kernel with a tiling needs.

Shared memory is counted as the kernels count it, part by part; a kernel asserts that both numbers are equal. Registers
are an estimate, because only the compiler knows them.
"""

from math import ceil

from flashrnn.cells import Cell
from flashrnn.cells.built_in import LSTM
from flashrnn.cells.gates import varying
from flashrnn.cells.printers.cuda import Exchange, early_values, exchanges, has_early_sums, operation_count
from flashrnn.cells.trace import trace
from flashrnn.constrint import Expression, ceil_div, maximum, minimum
from flashrnn.constrint.expressions import Operand
from flashrnn.cuda.resident.tiling import (
    Tiling,
    alone,
    cells_of_lane,
    centres,
    contributions,
    helped,
    in_rows,
    is_scaled,
    lane_cells,
    operands,
    several,
    splits,
    tiles_of_warp,
)
from flashrnn.cuda.spec import KernelSpec
from flashrnn.residual import residual_dtype

_BARRIERS = 64  # bytes of shared memory: BARRIER_BYTES in resident/kernels/tiles.cuh
_GRID_SLACK = {"forward": 20, "backward": 16}  # registers for an exchange through L2
_LOADS = 24  # registers for addresses of inputs and for sums, which loaders spare the other warps
_LATER_EXCHANGE = 16  # registers for each further exchange over units in a forward step, with fp16x2 splits


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
        values -= _LOADS * minimum(tiling.loaders, 1)
    slack = _GRID_SLACK[spec.direction] * tiling.grid
    return tiling.register_fragments * 4 + 38 + 8 * splits(spec) + 4 * (sums * tiling.batch_tiles) + values + slack


def polled_words(spec: KernelSpec, tiling: Tiling) -> Operand:
    """Return the registers for the words that a lane of a grid polls at once, which are needed only briefly."""
    if not tiling.grid:
        return 0
    pairs = max((one.pairs for one in _exchange_buffers(spec, early=True)), default=0)
    return 2 * pairs * minimum(4, ceil_div(tiling.blocks * tiling.batch_tiles, 4 * tiling.k_slices))


def spillable(spec: KernelSpec, grid: bool) -> int:
    """Return how many registers may spill in the loop: none, except if steps reduce over units in a cluster.

    In a grid, where a kernel needs fewer registers, each exchange takes longer than all that spills.
    """
    return 40 if trace(spec.cell).reduces and not grid else 0


def more_operations(cell: Cell, direction: str) -> int:
    """Return how many more operations than an LSTM's a step has that reduces over units; 0 for other steps."""
    return max(0, operation_count(cell, direction) - operation_count(LSTM, direction)) if trace(cell).reduces else 0


def published_words(spec: KernelSpec, tiling: Tiling) -> int:
    """Return the 8-byte words of a grid's reductions over units: WORDS in kernels/grid_reductions.cuh."""
    found = _exchange_buffers(spec, early=True)
    pairs = max((one.pairs for one in found), default=0)
    row = tiling.columns * (pairs if pairs < 2 else pairs + pairs % 2)
    return len(found) * tiling.blocks * tiling.unit_tiles * (row + -row % 16)


def _exchange_buffers(spec: KernelSpec, early: bool) -> tuple[Exchange, ...]:
    """Return the exchanges of a step of several blocks, one for each of EXCHANGE_BUFFERS in warp_parts.cuh.

    `early`: with early sums, if the cell has any.
    """
    found = exchanges(spec.cell, spec.direction, early)
    has_two = len(found) == 1 or (early and has_early_sums(spec.cell, spec.direction))
    return (found[0], *found) if has_two else found


def shared_bytes(spec: KernelSpec, tiling: Tiling) -> int:
    """Return the bytes of a block's dynamic shared memory."""
    return shared_memory(spec, tiling).evaluate({})


def shared_memory(spec: KernelSpec, tiling: Tiling) -> Expression:
    """Return the same: SIZE of SharedMemoryOf in resident/kernels/shared_memory.cuh."""
    constants = (len(spec.cell.gates) - len(varying(spec.cell))) * tiling.units * 4  # CONSTANT_BYTES in cells.cuh
    magnitudes = int(is_scaled(spec)) * contributions(spec, tiling) * tiling.columns * 4  # MAGNITUDE_BYTES in scale.cuh
    in_shared = maximum(splits(spec) * tiles_of_warp(spec, tiling) - tiling.register_fragments, 0)  # fragments of R
    return (
        2 * _operand_bytes(spec, tiling)
        + tiling.stages * _input_bytes(spec, tiling)
        + _sum_and_exchange_bytes(spec, tiling)
        + tiling.warps * in_shared * 512
        + _BARRIERS
        + _reduction_bytes(spec, tiling)
        + constants
        + magnitudes
        + _early_bytes(spec, tiling)
    )


def _operand_bytes(spec: KernelSpec, tiling: Tiling) -> Operand:
    """Return H_BYTES of forward_memory.cuh or GATE_BYTES of backward_memory.cuh."""
    rows = tiling.padded if spec.direction == "forward" else len(spec.cell.recurrent_gates) * tiling.units
    return operands(spec, tiling) * rows * (tiling.columns + _rows(spec, tiling)) * 2


def _input_bytes(spec: KernelSpec, tiling: Tiling) -> Operand:
    """Return INPUT_BYTES of {forward,backward}_memory.cuh."""
    cell, size = spec.cell, spec.dtype.itemsize
    if spec.direction == "forward":
        of_cell = len(cell.input_gates) * size
    else:
        gates = (len(varying(cell)) | 1) * residual_dtype(spec.dtype).itemsize  # the pitch of tiles.cuh
        uses_h, others = cell.states[0] in trace(cell).factors.inputs, len(cell.states) - 1
        of_cell = gates + (1 + uses_h) * size + others * 4
        of_cell += ceil(trace(cell).statistics.needed / 4)  # 16 bytes per tile of 16 units
    return tiling.units * tiling.columns * of_cell + _rows(spec, tiling) * (tiling.unit_tiles * 32)


def _sum_and_exchange_bytes(spec: KernelSpec, tiling: Tiling) -> Operand:
    """Return the bytes of partial sums of warps, and of what blocks exchange.

    The former are SUM_FLOATS of slice_sums.cuh (in the backward SLICE_FLOATS), the latter SEND_BYTES of
    forward_memory.cuh or two times RECEIVE_BYTES of backward_memory.cuh.
    """
    of_gate = several(tiling.k_slices) * tiling.warps * lane_cells(spec, tiling) * 128
    if in_rows(spec):
        pitch = spec.head_dim + 4 + 4 * _spreads(tiling)
        of_rows = _row_slices(spec, tiling) * _row_sequences(tiling) * pitch * 4
        of_gate = several(tiling.blocks) * of_gate + alone(tiling.blocks) * of_rows
    if spec.direction == "forward":
        sent = operands(spec, tiling) * tiling.units * tiling.columns * 2
        return len(spec.cell.recurrent_gates) * of_gate + several(tiling.blocks) * sent
    if tiling.grid:
        return of_gate
    sequences = tiling.columns if tiling.any_sequences else tiling.sequences
    received = 2 * tiling.padded * sequences * spec.dtype.itemsize
    return several(tiling.blocks) * received + alone(tiling.blocks) * of_gate


def _early_bytes(spec: KernelSpec, tiling: Tiling) -> Operand:
    """Return SIZE of EarlyValues in cells.cuh, for HELPED."""
    if not in_rows(spec):
        return 0
    pairs = ceil(early_values(spec.cell, spec.direction) / 2)
    return helped(spec, tiling) * tiling.sequences * (pairs * spec.head_dim * 16)


def _reduction_bytes(spec: KernelSpec, tiling: Tiling) -> Operand:
    """Return REDUCTION_BYTES of resident/kernels/unit_reductions.cuh."""
    found = exchanges(spec.cell, spec.direction)
    if not found:
        return 0
    vectors, columns = max(one.vectors for one in found), tiling.columns
    if tiling.grid:
        return 2 * tiling.warps * columns * max(one.vectors for one in _exchange_buffers(spec, early=True)) * 16
    loaded = minimum(tiling.loaders, 1)
    received = loaded * _received_bytes(spec, tiling, early=True)
    received += (1 - loaded) * _received_bytes(spec, tiling, early=False)
    if in_rows(spec):  # SquareSums in row_reductions.cuh
        pitch = spec.head_dim // 2 + (8 if spec.head_dim > 16 else 0)
        return centres(spec, tiling) * (_row_sequences(tiling) * pitch * 4) + several(tiling.blocks) * received
    partials = columns * (2 * (contributions(spec, tiling) * vectors + 1) + vectors) * 16
    return alone(tiling.blocks) * partials + several(tiling.blocks) * received


def _received_bytes(spec: KernelSpec, tiling: Tiling, early: bool) -> Operand:
    """Return SHARED of ClusterReductions in cluster_reductions.cuh: parts of all sequences, and mbarriers."""
    buffers, sequences = _exchange_buffers(spec, early), tiling.columns if tiling.any_sequences else tiling.sequences
    part = sum(8 if one.words <= 2 else 16 * one.vectors for one in buffers)
    return tiling.blocks * contributions(spec, tiling) * sequences * part + ceil(len(buffers) / 2) * 16


def _rows(spec: KernelSpec, tiling: Tiling) -> Operand:
    """Return 1 if a row of lanes has all units of a sequence, else 0: IN_ROWS in tiles.cuh."""
    return alone(tiling.blocks) * int(in_rows(spec))


def _row_slices(spec: KernelSpec, tiling: Tiling) -> Operand:
    """Return SLICES of kernels/slice_sums.cuh and kernels/backward_memory.cuh for IN_ROWS."""
    if spec.direction == "forward":
        return tiling.k_slices
    return tiling.k_slices + alone(tiling.k_slices) * (tiling.unit_tiles - 1)  # ALL_TILES in backward_memory.cuh


def _spreads(tiling: Tiling) -> Operand:
    """Return 1 if the block uses only every second column, else 0: SPREAD in tiles.cuh, for IN_ROWS."""
    return minimum(tiling.columns // (2 * tiling.sequences), 1)


def _row_sequences(tiling: Tiling) -> Operand:
    """Return SEQS / SPREAD of tiles.cuh for IN_ROWS."""
    return 4 * tiling.batch_tiles * (2 - _spreads(tiling))
