"""The cost model of resident kernels: an estimate of the clock cycles per time step, from a tiling and the rates
below."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from flashrnn.cells.printers.cuda import exchanges
from flashrnn.cells.trace import trace
from flashrnn.constrint import Expression, ceil_div, lookup, maximum, minimum
from flashrnn.constrint.expressions import Operand
from flashrnn.cuda.resident.resources import more_operations, polled_words, registers, shared_memory
from flashrnn.cuda.resident.tiling import (
    Tiling,
    alone,
    cells_of_lane,
    contributions,
    has_one_gate,
    helped,
    lane_cells,
    operands,
    several,
    splits,
    spread,
    tiles_of_warp,
)
from flashrnn.cuda.spec import KernelSpec

# Clock cycles, fitted to the measured times of tilings of an LSTM and of an Elman network in bfloat16 on H200s
# (docs/dev/log.md).
_MMA = 48  # tenths: one 16x8x16 product on one of the four tensor cores of an SM
_ALONE = (90, 235)  # tenths: a tile of R by one or two tiles of sequences, for a warp that is alone on its scheduler
_READ = 39  # tenths: a warp reads 16 bytes per lane from shared memory
_BOTH = 7  # tenths of the shorter of products and reads, which overlap only in part
_CROWDED = 150  # backward of several blocks: each cell of a lane beyond four, if cells have several states
_OPERATION = 4  # one more operation in the step of a cell, if one block holds the head
_OPERATION_OF_SEVERAL = 2  # if several blocks do
_REDUCTION = 200  # a reduction over the units of a block
_REDUCTION_OF_BLOCKS = {False: 600, True: 2300}  # and over those of the blocks of a cluster, or of a grid
_HELPED = 2  # eighths of its time for cells that a warp saves if others help it
_NEXT_WARP = 5  # eighths of its time that a further warp of a scheduler takes for cells whose step reduces over units
# Eighths of its time that a second block on a multiprocessor takes, by whether steps reduce. If they do not, blocks
# whose lanes have half as many cells (SPREAD) take all of it.
_SECOND_BLOCK = {False: 5, True: 4}
_GRID_EXCHANGE_UNIT = {"forward": 66, "backward": 182}  # hundredths, per unit and eight sequences
_POLL = 450  # a warp polls the results of eight other blocks
_GRADIENT = 36  # multiprocessors for d_R, if it overlaps with the backward's loop
_AFTER = 350  # cost of d_R if a loop of one wave leaves no multiprocessors for it
_BLOCKS_TOGETHER = (2, 3, 4)  # blocks of clusters that share a multiprocessor, as far as was timed
_SHARED = 17  # sixteenths of their time: where they would not gain more than this, some were slower
_SPILLED = 20  # per register that spills
_LOAD = 300  # before the loop: a warp of several blocks loads a fragment of R


class _Rates(NamedTuple):
    """Rates that depend on the direction and on whether cells have one gate. Clock cycles unless said."""

    warp: int  # instructions of a warp in a step, without those of its cells
    cell: int  # the element-wise step of one cell per lane
    average: int  # eighths that the average number of a scheduler's warps counts, in place of the largest
    second_tile: int  # a second batch tile, besides its work
    exchange: int  # sending the results of a step between the blocks of a cluster
    exchange_unit: int  # hundredths, per unit and eight sequences
    grid_exchange: int  # the same exchange through L2
    rank: int  # receiving from one more block of the cluster
    slices: int  # reducing the slice-K sums of a tile, per warp; hidden by the exchange of a grid
    single: int  # a lane of a cluster with one cell, whose memory accesses are half as wide as those of a pair
    slices_of_second_tile: int = 0  # as `slices`, for a second batch tile in clusters
    wide_second_tile: int = 0  # four slices of a second batch tile in clusters of more than twelve blocks


_RATES = {
    "forward": _Rates(
        warp=244, cell=61, average=0, second_tile=59, exchange=86, exchange_unit=127, grid_exchange=3020, rank=0,
        slices=114, single=100,
    ),
    "backward": _Rates(
        warp=239, cell=170, average=0, second_tile=59, exchange=193, exchange_unit=131, grid_exchange=1450, rank=9,
        slices=0, single=0,
    ),
}  # fmt: skip
_RATES_OF_TIMED = {
    "forward": _RATES["forward"]._replace(grid_exchange=2820, slices_of_second_tile=114),
    "backward": _RATES["backward"]._replace(wide_second_tile=800),
}
_RATES_OF_ONE_GATE = {
    "forward": _Rates(
        warp=100, cell=40, average=7, second_tile=220, exchange=150, exchange_unit=90, grid_exchange=3020, rank=0,
        slices=40, single=150,
    ),
    "backward": _Rates(
        warp=100, cell=100, average=7, second_tile=50, exchange=300, exchange_unit=60, grid_exchange=1450, rank=15,
        slices=0, single=0,
    ),
}  # fmt: skip
_SECOND_TILE_OF_ONE_GATE = 220  # in float32, where the other rates are those of several gates


def eighths(spec: KernelSpec, tiling: Tiling, at_once: Mapping[int, int], batch: Operand) -> Expression:
    """Return the clock cycles of a time step of the whole batch, in eighths."""
    gpu, blocks = spec.gpu, tiling.blocks
    groups = spec.heads * spec.layers * ceil_div(batch, tiling.sequences)
    if has_one_gate(spec) and spec.layers == 1 and 2 in at_once:
        at_once = {**at_once, 2: gpu.multiprocessors // 2}  # measured for these cells only
    waves = ceil_div(groups, lookup(blocks, at_once))
    by_registers = gpu.registers // (registers(spec, tiling) * 32 * tiling.warps)
    fit = minimum(by_registers, gpu.shared_per_block // maximum(shared_memory(spec, tiling), 1))
    second = alone(blocks) * (minimum(fit, 2) - 1)  # whether two blocks, each its own group, fit on a multiprocessor
    if not trace(spec.cell).reduces:
        second *= 1 - spread(spec, tiling)
    step = _step_cycles(spec, tiling)
    if idle := idle_multiprocessors(spec):
        free = gpu.multiprocessors - groups * blocks
        step += (minimum(maximum(free + 1, 0), 1) - minimum(maximum(free + 1 - idle, 0), 1)) * _AFTER
    total = (8 * waves - second * (8 - _SECOND_BLOCK[trace(spec.cell).reduces]) * (waves - 1)) * step
    # Up to 128 units, other tilings are always better by the estimate, and the search would take longer.
    if gpu.clusters and not tiling.grid and spec.direction == "forward" and _is_timed(spec) and spec.head_dim > 128:
        for together in _BLOCKS_TOGETHER:
            total = minimum(total, _shared_eighths(spec, tiling, at_once, groups, together))
    return total


def _shared_eighths(
    spec: KernelSpec, tiling: Tiling, sizes: Iterable[int], groups: Operand, together: int
) -> Expression:
    """Return the same if `together` blocks of clusters run on a multiprocessor, or a larger number if they do not fit.

    `sizes` are the possible numbers of blocks of a cluster. The compiler may use all registers that a thread can have,
    256 with the granularity of their allocation, and 1 KiB of shared memory is reserved for each block.
    """
    gpu, blocks = spec.gpu, tiling.blocks
    by_registers = gpu.registers // (32 * maximum(tiling.warps, 1) * (gpu.registers_per_thread + 1))
    fit = minimum(by_registers, gpu.shared_per_block // (maximum(shared_memory(spec, tiling), 1) + 1024))
    gains = minimum(4 // cells_of_lane(spec, tiling), 1)  # lanes with eight cells gained nothing,
    gains *= minimum(tiling.warps // 2, 1)  # blocks of one warp were slower
    shared = minimum(fit // together, 1) * gains * several(tiling.blocks) * (1 - spread(spec, tiling))
    waves = ceil_div(groups, lookup(blocks, {size: gpu.clusters_at_once(size, together) for size in sizes}))
    return (8 + 64 * (1 - shared)) * waves * (_step_cycles(spec, tiling, together) * _SHARED // 16)


def _step_cycles(spec: KernelSpec, tiling: Tiling, together: int = 1) -> Expression:
    """Return the estimated clock cycles of a step of one group, if `together` blocks run on a multiprocessor.

    The warps of these blocks share its schedulers, but they all wait for their exchanges at the same time. The cycles
    depend only on the tiling, because units that are padding take as long as others. Thus, by the estimate, no head is
    slower than a larger one, whose tilings also hold it.
    """
    rates, tiles, shares = _rates(spec), tiles_of_warp(spec, tiling), several(tiling.blocks)
    step = _product_cycles(spec, tiling, together) + _cell_cycles(spec, tiling, together)
    step += _grid_cycles(spec, tiling) if tiling.grid else _cluster_cycles(spec, tiling)
    step += _reduction_cycles(spec, tiling)
    if not tiling.grid:
        slices = rates.slices + shares * (tiling.batch_tiles - 1) * rates.slices_of_second_tile
        step += several(tiling.k_slices) * tiling.k_slices * slices
        if rates.wide_second_tile:
            wide = minimum(tiling.blocks // 13, 1) * minimum(tiling.k_slices // 4, 1)
            step += wide * (tiling.batch_tiles - 1) * rates.wide_second_tile
        if not exchanges(spec.cell, spec.direction):
            step += shares * maximum(2 - cells_of_lane(spec, tiling), 0) * rates.single
    if spec.steps:  # the prologue of one block takes about as long with more fragments
        step += shares * splits(spec) * tiles * _LOAD // spec.steps
    if trace(spec.cell).reduces:
        available = minimum(spec.gpu.registers_per_thread, spec.gpu.registers // (32 * tiling.warps))
        step += _SPILLED * maximum(registers(spec, tiling) + polled_words(spec, tiling) - available, 0)
    return step


def _product_cycles(spec: KernelSpec, tiling: Tiling, together: int) -> Expression:
    """Return the cycles of a step's products, and of reading R for them."""
    parts, warps, tiles = splits(spec), tiling.warps * together, tiles_of_warp(spec, tiling)
    per_core = ceil_div(warps, 4)  # warps that share a tensor core and an issue slot
    of_one_warp = lookup(tiling.batch_tiles, dict(enumerate(_ALONE, 1)))
    of_tile = parts * (parts - 1) // 2 + operands(spec, tiling)  # products per tile of R
    products = tiles * of_tile * maximum(tiling.batch_tiles * per_core * _MMA, of_one_warp) // 10
    reads = maximum(parts * tiles - tiling.register_fragments, 0) * warps * _READ // 10
    return maximum(products, reads) + minimum(products, reads) * _BOTH // 10


def _cell_cycles(spec: KernelSpec, tiling: Tiling, together: int) -> Expression:
    """Return the cycles of the element-wise step of a scheduler's warps."""
    direction, warps, rates = spec.direction, _cell_warps(spec, tiling) * together, _rates(spec)
    of_scheduler = ceil_div(warps, 4)
    operation = _OPERATION + several(tiling.blocks) * (_OPERATION_OF_SEVERAL - _OPERATION)
    of_cell = rates.cell + operation * more_operations(spec.cell, direction)
    cells = rates.warp + cells_of_lane(spec, tiling) * of_cell
    if trace(spec.cell).reduces:  # while a warp waits for reductions, others run
        cells -= helped(spec, tiling) * (_HELPED * cells // 8)
        return (8 + _NEXT_WARP * (of_scheduler - 1)) * cells // 8
    if direction == "backward" and not tiling.grid and len(spec.cell.states) > 1:
        cells += several(tiling.blocks) * maximum(cells_of_lane(spec, tiling) - 4, 0) * _CROWDED
    return ((8 - rates.average) * 4 * of_scheduler + rates.average * maximum(warps, 4)) * cells // 32


def _is_timed(spec: KernelSpec) -> bool:
    """Return whether tilings of such cells with two batch tiles, in grids, and sharing multiprocessors were timed.

    Grids and sharing were timed in forwards only.
    """
    four_gates = len(spec.cell.recurrent_gates) == 4 and not trace(spec.cell).reduces
    return spec.dtype.itemsize == 2 and four_gates and spec.layers == 1


def _rates(spec: KernelSpec) -> _Rates:
    if _is_timed(spec):
        return _RATES_OF_TIMED[spec.direction]
    if not has_one_gate(spec):
        return _RATES[spec.direction]
    if spec.dtype.itemsize == 2:
        return _RATES_OF_ONE_GATE[spec.direction]
    return _RATES[spec.direction]._replace(second_tile=_SECOND_TILE_OF_ONE_GATE)


def _cell_warps(spec: KernelSpec, tiling: Tiling) -> Expression:
    """Return the number of warps of a block that compute cells."""
    return tiling.unit_tiles * minimum(tiling.k_slices, lane_cells(spec, tiling))


def _reduction_cycles(spec: KernelSpec, tiling: Tiling) -> Expression | int:
    """Return the cycles of the reductions over the units of a head."""
    shares, cycles = several(tiling.blocks), 0
    for exchange in exchanges(spec.cell, spec.direction):
        cycles += _REDUCTION + shares * _REDUCTION_OF_BLOCKS[tiling.grid]
        if not tiling.grid:  # every warp reads all parts from shared memory, 16 bytes per lane in four cycles
            parts = tiling.blocks * contributions(spec, tiling) * exchange.vectors
            cycles += shares * (_cell_warps(spec, tiling) * parts // 2)
    return cycles


def _grid_cycles(spec: KernelSpec, tiling: Tiling) -> Expression:
    """Return the cycles of a step's exchange through L2, which hides the cost of a second batch tile."""
    direction = spec.direction
    cycles = _GRID_EXCHANGE_UNIT[direction] * tiling.padded * tiling.batch_tiles // 100 + _rates(spec).grid_exchange
    return cycles + ceil_div(tiling.blocks // tiling.k_slices, 8) * _POLL if direction == "backward" else cycles


def _cluster_cycles(spec: KernelSpec, tiling: Tiling) -> Expression:
    """Return the cycles of a step's exchange between the blocks of a cluster, and of a second batch tile."""
    rates, batch_tiles = _rates(spec), tiling.batch_tiles
    exchange = rates.exchange_unit * tiling.padded * tiling.sequences // (800 * batch_tiles)
    exchange += rates.exchange + rates.rank * tiling.blocks
    return rates.second_tile * (batch_tiles - 1) + several(tiling.blocks) * exchange


def idle_multiprocessors(spec: KernelSpec) -> int:
    """Return how many multiprocessors a loop should leave idle: on Hopper, those for d_R, which overlaps with it."""
    hopper = spec.gpu.warpgroup_products and spec.gpu.multiprocessors > _GRADIENT
    return _GRADIENT if spec.direction == "backward" and hopper and spec.layers == 1 else 0
