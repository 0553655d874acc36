"""The tiling of a kernel as an integer constraint problem: what fits on the chip, and what of it is fastest.

The unknowns are those of `Tiling`. Constraints are the GPU's limits and what the kernels' sources (tiles.cuh,
forward.cuh, backward.cuh) take for granted; the objective is an estimate of the time of the whole loop, in clock cycles
per step, from the rates below. The register need of a kernel is known only once it is compiled: `register_need` is an
estimate for the first guess, and a kernel that spills gives way to the next best solution.
"""

import heapq
from collections.abc import Iterator
from functools import cache
from math import ceil

import torch

from flashrnn.cells import Cell
from flashrnn.cells.trace import trace
from flashrnn.constrint import Expression, Infeasible, Problem, ceil_div, lookup, maximum, minimum
from flashrnn.constrint.expressions import Operand, as_expression
from flashrnn.cuda.source import Tiling
from flashrnn.gpu import Gpu
from flashrnn.problem import kept_dtype

# Clock cycles, fitted to tilings of an LSTM in bfloat16 that were timed on an H200 (docs/log.md).
_MMA = 48  # tenths: one 16x8x16 product on one of an SM's four tensor cores
_ALONE = (
    90,
    235,
)  # tenths: a tile of R by one, by two tiles of sequences, for a warp that has nobody to take turns with
_READ = 39  # tenths: a warp reads 16 bytes per lane of shared memory
_BOTH = 7  # tenths of the shorter of products and reads, which do not quite hide each other
_WARP = {"forward": 244, "backward": 239}  # a warp's instructions in a step, apart from those of its cells
_CELL = {"forward": 61, "backward": 170}  # the element-wise step of one cell per lane
_SECOND_TILE = 59  # what two batch tiles in one block cost besides the work of both
_BESIDE = 5  # eighths of its time that a block after the first takes where two fit on a multiprocessor
_REDUCE = 114  # adding up the sums of a tile's warps, for each of them; a grid's exchange hides that
_EXCHANGE = {"forward": 86, "backward": 193}  # a step's results from block to block of a cluster
_EXCHANGE_UNIT = {"forward": 127, "backward": 131}  # hundredths, for every unit and eight sequences
_RANK = 9  # what another block of the cluster has sent
_GRID_EXCHANGE = {"forward": 3020, "backward": 1450}  # the same through L2
_GRID_EXCHANGE_UNIT = {"forward": 66, "backward": 182}  # hundredths
_LOOK = 450  # at what eight other blocks have sent to a warp
_GRADIENT = 36  # multiprocessors, for d_R beside the backward's loop
_AFTER = 350  # what d_R costs where a loop of one wave leaves it no room
_BARRIERS = 64  # bytes of shared memory, as BARRIER_BYTES in kernels/tiles.cuh
_GRID_SLACK = {"forward": 20, "backward": 16}  # registers for an exchange through L2


def tilings(
    direction: str,
    cell: Cell,
    heads: int,
    head_dim: int,
    batch: int,
    dtype: torch.dtype,
    gpu: Gpu,
    tf32: bool = False,
) -> Iterator[Tiling]:
    """Tilings that fit, the one that should be fastest first. Raises Infeasible, which names what does not fit."""
    return (tiling for _, tiling in estimates(direction, cell, heads, head_dim, batch, dtype, gpu, tf32))


def estimates(
    direction: str,
    cell: Cell,
    heads: int,
    head_dim: int,
    batch: int,
    dtype: torch.dtype,
    gpu: Gpu,
    tf32: bool = False,
) -> Iterator[tuple[float, Tiling]]:
    """The same tilings with the estimated clock cycles of a time step of the whole batch."""
    without_batch = direction, cell, heads, head_dim, dtype, gpu, tf32
    if reason := infeasible(*without_batch):
        raise reason
    ways = [way for way in (False, True) if not _infeasible(*without_batch, grid=way)]
    sizes = direction, cell, heads, head_dim, batch, dtype, gpu
    found = (_solutions(*sizes, grid=way, tf32=tf32) for way in ways)
    for (eighths, *_), tiling in heapq.merge(*found, key=lambda solution: solution[0]):
        yield eighths / 8, tiling


def _solutions(*sizes, grid: bool, tf32: bool) -> Iterator[tuple[tuple[int, ...], Tiling]]:
    problem, objective = pose(*sizes, grid, tf32)
    for solution in problem.best(objective):
        values = {"sequences": 8 * solution["batch_tiles"], **solution}
        tiling = Tiling(**values, grid=grid)
        yield tuple(map(solution.value, objective)), tiling


_IN_SHARED_MEMORY = ("blocks", "unit_tiles", "k_splits", "batch_tiles", "stages", "register_fragments")


def infeasible(
    direction: str, cell: Cell, heads: int, head_dim: int, dtype: torch.dtype, gpu: Gpu, tf32: bool = False
) -> Infeasible | None:
    """Why no tiling fits, or None if one does; the batch does not matter, there can always be more tiles of it."""
    sizes = direction, cell, heads, head_dim, dtype, gpu, tf32
    return _infeasible(*sizes, grid=False) and _infeasible(*sizes, grid=True)


@cache
def _infeasible(
    direction: str, cell: Cell, heads: int, head_dim: int, dtype: torch.dtype, gpu: Gpu, tf32: bool, grid: bool
) -> Infeasible | None:
    try:
        pose(direction, cell, heads, head_dim, 8, dtype, gpu, grid, tf32)[0].solve()
    except Infeasible as reason:
        return reason
    return None


def pose(
    direction: str,
    cell: Cell,
    heads: int,
    head_dim: int,
    batch: int,
    dtype: torch.dtype,
    gpu: Gpu,
    grid: bool,
    tf32: bool = False,
) -> tuple[Problem, tuple[Expression, ...]]:
    """The problem, and what to minimise: first, eighths of a clock cycle per time step."""
    p = Problem(f"{direction} of {cell.name}, head size {head_dim}, on {gpu.name}")
    if grid:
        at_once = {size: gpu.multiprocessors // size for size in range(2, gpu.multiprocessors + 1)}
    else:
        at_once = {size: gpu.clusters_at_once(size) for size in gpu.cluster_sizes}
    blocks = p.variable("blocks", [size for size in at_once if at_once[size]], "blocks that share a head")
    unit_tiles = p.variable("unit_tiles", range(1, 5 if grid else 17), "tiles of 16 units per block")
    k_splits = p.variable("k_splits", [1, 2, 4, 8, 16] if grid else [1, 2, 4], "warps per tile")
    batch_tiles = p.variable("batch_tiles", [1, 2], "tiles of 8 sequences per block")
    sequences = 8 * batch_tiles  # of a group
    if not grid and len(at_once) > 1:
        used = gpu.multiprocessors - _idle(direction, gpu)
        spread = {size: 16 if size == 1 else _spread(batch, heads, at_once[size], used // size) for size in at_once}
        fewer = minimum(sequences, lookup(blocks, spread))
        sequences = p.variable("sequences", range(2, 17, 2), "sequences of a group")
        p.add("sequences of a group", sequences == fewer)
    stages = p.variable("stages", [2, 3, 4] if grid else [2, 3, 4, 6, 8], "steps loaded ahead", prefer="largest")
    register_fragments = p.variable("register_fragments", range(0, 65, 4), "fragments of R in a thread's registers")
    warps = unit_tiles * k_splits
    planes = planes_of(dtype, tf32)
    tiles = tiles_of_warp(cell, blocks, unit_tiles, k_splits)
    fragments = planes * tiles

    p.add("units of the head", 16 * unit_tiles * blocks >= head_dim)
    p.add("threads", 32 * warps <= gpu.threads_per_block)
    p.add("whole fragments", (blocks * unit_tiles) % k_splits == 0)
    p.add("fragments of R", register_fragments <= fragments)
    p.add("barriers of unit tiles", (k_splits == 1) | (unit_tiles <= 15))
    if direction == "backward":
        p.add("units per warp", blocks % k_splits == 0)
    if grid:
        p.add("no idle block", 16 * unit_tiles * (blocks - k_splits) < head_dim)
    cells = _cells_of_lane(k_splits, batch_tiles)
    sums = len(cell.recurrent_gates) if direction == "forward" else maximum(4, minimum(blocks // k_splits, 8))
    need = (
        register_fragments * 4
        + register_need(direction, cell, cells, sums * batch_tiles, planes)
        + _GRID_SLACK[direction] * grid
    )
    p.add("registers per thread", need <= gpu.registers_per_thread, unit="registers")
    p.add("registers", need * 32 * warps <= gpu.registers, unit="registers")
    layout = (blocks, unit_tiles, k_splits, batch_tiles, stages, register_fragments)
    shared = _shared_bytes(direction, cell, dtype, planes, grid, *layout)
    p.add("shared memory", shared <= gpu.shared_per_block, unit="bytes")

    waves = ceil_div(heads * ceil_div(batch, sequences), lookup(blocks, at_once))
    fit = minimum(gpu.registers // (need * 32 * warps), gpu.shared_per_block // maximum(shared, 1))
    alone = lookup(blocks, {size: int(size == 1) for size in at_once})
    beside = alone * (minimum(fit, 2) - 1)  # whether a second block fits beside one that is a group by itself
    unknowns = (blocks, unit_tiles, k_splits, batch_tiles, sequences, register_fragments)
    step = _step_cycles(direction, cell, planes, gpu, grid, *unknowns)
    if idle := _idle(direction, gpu):
        free = gpu.multiprocessors - heads * ceil_div(batch, sequences) * blocks
        step += (minimum(maximum(free + 1, 0), 1) - minimum(maximum(free + 1 - idle, 0), 1)) * _AFTER
    return p, ((8 * waves - beside * (8 - _BESIDE) * (waves - 1)) * step, warps * blocks, -register_fragments)


def _step_cycles(
    direction: str,
    cell: Cell,
    planes: int,
    gpu: Gpu,
    grid: bool,
    blocks: Operand,
    unit_tiles: Operand,
    k_splits: Operand,
    batch_tiles: Operand,
    sequences: Operand,
    register_fragments: Operand,
) -> Expression:
    """The estimate of a step's time, in clock cycles.

    It is that of the tiling alone, because units that are padding take as long as others. So a head is never slower, by
    the estimate, than a larger one, whose tilings hold it too.
    """
    padded = 16 * unit_tiles * blocks
    warps = unit_tiles * k_splits
    tiles = tiles_of_warp(cell, blocks, unit_tiles, k_splits)
    per_core = ceil_div(warps, 4)  # warps that share a tensor core and an issue slot
    alone = lookup(batch_tiles, dict(enumerate(_ALONE, 1)))
    products = tiles * (planes * (planes + 1) // 2) * maximum(batch_tiles * per_core * _MMA, alone) // 10
    reads = maximum(planes * tiles - register_fragments, 0) * warps * _READ // 10
    step = maximum(products, reads) + minimum(products, reads) * _BOTH // 10
    cell_warps = unit_tiles * minimum(k_splits, 4 * batch_tiles)
    step += ceil_div(cell_warps, 4) * (_WARP[direction] + _cells_of_lane(k_splits, batch_tiles) * _CELL[direction])
    if grid:  # whose exchange hides what a second tile costs
        step += _GRID_EXCHANGE[direction] + _GRID_EXCHANGE_UNIT[direction] * padded * batch_tiles // 100
        if direction == "backward":
            step += ceil_div(blocks // k_splits, 8) * _LOOK
    else:
        step += _SECOND_TILE * (batch_tiles - 1)
        exchange = _EXCHANGE[direction] + _EXCHANGE_UNIT[direction] * padded * sequences // (800 * batch_tiles)
        if direction == "backward":
            exchange += _RANK * blocks
        step += lookup(blocks, {size: int(size > 1) for size in gpu.cluster_sizes}) * exchange
    if direction == "forward" and not grid:
        step += minimum(k_splits - 1, 1) * k_splits * _REDUCE
    return step


def _cells_of_lane(k_splits: Operand, batch_tiles: Operand) -> Expression:
    return maximum(4 * batch_tiles // k_splits, 1)


def _idle(direction: str, gpu: Gpu) -> int:
    """Multiprocessors that a loop should leave idle: those on which d_R is made beside the backward's, on Hopper."""
    return _GRADIENT if direction == "backward" and gpu.capability[0] == 9 and gpu.multiprocessors > _GRADIENT else 0


def _spread(batch: int, heads: int, at_once: int, leaving_room: int) -> int:
    """Sequences for each of the clusters that run at once, an even number: a cluster's blocks take longer to hand each
    other what more sequences have. Of `leaving_room` clusters, if every head has one of these."""
    groups = min(at_once, leaving_room) // heads or at_once // heads
    fewest = ceil(batch / groups) if groups else 16
    return min(fewest + fewest % 2, 16)


def planes_of(dtype: torch.dtype, tf32: bool) -> int:
    """Parts of a number that tensor cores multiply one by one, as PLANES in kernels/common.cuh."""
    return 1 if dtype != torch.float32 else 2 if tf32 else 3


def tiles_of_warp(cell: Cell, blocks: Operand, unit_tiles: Operand, k_splits: Operand) -> Operand:
    """Tiles of R, 16 x 16, that a warp multiplies, in either direction."""
    return len(cell.recurrent_gates) * (blocks * unit_tiles // k_splits)


def register_need(direction: str, cell: Cell, cells: Operand, sums: Operand, planes: int) -> Expression:
    """Registers of a thread besides those for R, about: addresses, `sums` tiles of sums, values of `cells` cells."""
    gates, states = len(cell.gates), len(cell.states)
    if direction == "forward":
        return 39 + 8 * planes + 4 * sums + (gates + 2 * states) * cells + cells // 4 * 34
    return 38 + 8 * planes + 4 * sums + (2 * gates + 3 * states) * cells


def shared_bytes(direction: str, cell: Cell, dtype: torch.dtype, tiling: Tiling, tf32: bool = False) -> int:
    """Dynamic shared memory of a block."""
    sizes = {name: as_expression(getattr(tiling, name)) for name in _IN_SHARED_MEMORY}
    return _shared_bytes(direction, cell, dtype, planes_of(dtype, tf32), tiling.grid, **sizes).evaluate({})


def _shared_bytes(
    direction: str,
    cell: Cell,
    dtype: torch.dtype,
    planes: int,
    grid: bool,
    blocks: Operand,
    unit_tiles: Operand,
    k_splits: Operand,
    batch_tiles: Operand,
    stages: Operand,
    register_fragments: Operand,
) -> Expression:
    """Dynamic shared memory of a block, as SHARED_BYTES in kernels/{forward,backward}.cuh; numbers or expressions."""
    gates, others = len(cell.recurrent_gates), len(cell.states) - 1
    size = dtype.itemsize
    seqs, units, warps = 8 * batch_tiles, 16 * unit_tiles, unit_tiles * k_splits
    padded = units * blocks
    from_memory = planes * tiles_of_warp(cell, blocks, unit_tiles, k_splits) - register_fragments
    several_blocks, several_warps = minimum(blocks - 1, 1), minimum(k_splits - 1, 1)
    sums = several_warps * warps * batch_tiles * 512  # of one gate
    if direction == "forward":
        operand, row = planes * padded * seqs * 2, len(cell.input_gates) * size
        exchange = gates * sums + several_blocks * (planes * units * seqs * 2)
    else:
        uses_h = cell.states[0] in trace(cell).factors.inputs
        operand = planes * gates * units * seqs * 2
        kept = (len(cell.gates) | 1) * kept_dtype(dtype).itemsize  # gates' rows lie an odd number of units apart
        row = kept + (1 + uses_h) * size + others * 4
        exchange = sums if grid else several_blocks * (2 * padded * seqs * size)
    inputs = units * seqs * row
    return 2 * operand + stages * inputs + exchange + warps * maximum(from_memory, 0) * 512 + _BARRIERS
