"""The tiling of a kernel as an integer constraint problem: which tilings fit on the chip, and which one is fastest.

The unknowns are the fields of `Tiling`. Constraints are the GPU's limits and what the kernels' sources (tiles.cuh,
forward.cuh, backward.cuh) assume; the objective is an estimate of the time of the whole loop, in clock cycles per step,
from the rates below. The registers of a kernel are known only once it is compiled: `_registers` estimates them, and a
kernel that spills is replaced by the next best solution.
"""

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import ceil

from flashrnn.cells import Cell
from flashrnn.cells.built_in import LSTM
from flashrnn.cells.printers.cuda import exchanges, operation_count
from flashrnn.cells.trace import trace
from flashrnn.constrint import ConstraintProblem, Expression, Infeasible, Solution, ceil_div, lookup, maximum, minimum
from flashrnn.constrint.expressions import Operand, Variable
from flashrnn.cuda.buckets import Solver, bucket
from flashrnn.cuda.spec import KernelSpec
from flashrnn.gpu import Gpu
from flashrnn.products import varying
from flashrnn.residual import residual_dtype

# Clock cycles, fitted to tilings of an LSTM in bfloat16 that were timed on an H200 (docs/dev/log.md).
_MMA = 48  # tenths: one 16x8x16 product on one of an SM's four tensor cores
_ALONE = (90, 235)  # tenths: a tile of R by one, by two tiles of sequences, for a warp that is alone on its scheduler
_READ = 39  # tenths: a warp reads 16 bytes per lane of shared memory
_BOTH = 7  # tenths of the shorter of products and reads, which overlap, but not completely
_WARP = {"forward": 244, "backward": 239}  # a warp's instructions in a step, without those of its cells
_CELL = {"forward": 61, "backward": 170}  # the element-wise step of one cell per lane
_OPERATION = 2  # one more operation in the step of a cell
_REDUCTION = 200  # reducing over the units of a block
_REDUCTION_OF_BLOCKS = {False: 1000, True: 5000}  # and over those of several, of a cluster or of a grid
_SECOND_TILE = 59  # what a second batch tile in a block costs besides its work
_SECOND_BLOCK = 5  # eighths of its time that a block after the first takes where two fit on a multiprocessor
_REDUCE = 114  # reducing the slice-K sums of a tile, for each of its warps; a grid's exchange hides it
_EXCHANGE = {"forward": 86, "backward": 193}  # sending a step's results from block to block of a cluster
_EXCHANGE_UNIT = {"forward": 127, "backward": 131}  # hundredths, for every unit and eight sequences
_RANK = 9  # receiving from another block of the cluster
_GRID_EXCHANGE = {"forward": 3020, "backward": 1450}  # the same through L2
_GRID_EXCHANGE_UNIT = {"forward": 66, "backward": 182}  # hundredths
_POLL = 450  # a warp polls the results of eight other blocks
_GRADIENT = 36  # multiprocessors for d_R, overlapped with the backward's loop
_AFTER = 350  # what d_R costs where a loop of one wave leaves no multiprocessors for it
_SPILLED = 20  # a register that spills
_BARRIERS = 64  # bytes of shared memory, as BARRIER_BYTES in resident/kernels/tiles.cuh
_GRID_SLACK = {"forward": 20, "backward": 16}  # registers for an exchange through L2


@dataclass(frozen=True)
class Tiling:
    """How one head is distributed over warps and blocks; names as in resident/kernels/tiles.cuh.

    While the problem is posed, its fields are the unknowns and its properties expressions of them.
    """

    unit_tiles: int
    k_slices: int
    batch_tiles: int
    sequences: int
    blocks: int
    grid: bool
    stages: int
    register_fragments: int

    @property
    def units(self) -> int:
        """Return the units of a block."""
        return 16 * self.unit_tiles

    @property
    def padded(self) -> int:
        """Return the units of a head, padding included."""
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

    def batches(self, batch: int) -> int:
        """Return how many groups of blocks a batch takes for every head."""
        return -(-batch // self.sequences)


def tilings(spec: KernelSpec) -> Iterator[Tiling]:
    """Yield the tilings that fit, the one that should be fastest first; Infeasible names what does not fit."""
    return (tiling for _, tiling in estimates(spec))


def estimates(spec: KernelSpec) -> Iterator[tuple[float, Tiling]]:
    """Yield the same tilings with the estimated clock cycles of a time step of the whole batch."""
    if reason := infeasible(spec):
        raise reason
    found = (_solutions(spec, grid) for grid in (False, True) if not _infeasible(_of_any_batch(spec), grid=grid))
    for (eighths, *_), tiling in heapq.merge(*found, key=lambda solution: solution[0]):
        yield eighths / 8, tiling


def _solutions(spec: KernelSpec, grid: bool) -> Iterator[tuple[tuple[int, ...], Tiling]]:
    problem, objective = pose(spec, grid)
    for solution in problem.best(objective):
        yield tuple(map(solution.value, objective)), _as_tiling(solution, grid)


def _as_tiling(solution: Solution, grid: bool) -> Tiling:
    return Tiling(**{"sequences": 8 * solution["batch_tiles"], **solution}, grid=grid)


def infeasible(spec: KernelSpec) -> Infeasible | None:
    """Return why no tiling fits, or None if one does. The batch does not matter: it may have any number of tiles."""
    spec = _of_any_batch(spec)
    return _infeasible(spec, grid=False) and _infeasible(spec, grid=True)


def _of_any_batch(spec: KernelSpec) -> KernelSpec:
    return replace(spec.of_all_variants, batch=8)


@cache
def _infeasible(spec: KernelSpec, grid: bool) -> Infeasible | None:
    try:
        pose(spec, grid)[0].solve()
    except Infeasible as reason:
        return reason
    return None


def is_solution(spec: KernelSpec, tiling: Tiling) -> bool:
    """Return whether the tiling is among `tilings`."""
    problem, _ = pose(spec, tiling.grid)
    for unknown in problem.variables:
        problem.add(f"given {unknown}", unknown == getattr(tiling, unknown.name))
    return any(_as_tiling(solution, tiling.grid) == tiling for solution in problem.solutions())


def pose(spec: KernelSpec, grid: bool) -> tuple[ConstraintProblem, tuple[Expression, ...]]:
    """Return the problem and what to minimize: first the eighths of a clock cycle per time step."""
    gpu, sizes = spec.gpu, f"{spec.cell.name}, head size {spec.head_dim}"
    p = ConstraintProblem(f"{spec.direction} of {sizes}, on {gpu.name}")
    at_once = _groups_at_once(gpu, grid)
    tiling = _unknowns(p, spec, grid, at_once)
    blocks, k_slices, warps = tiling.blocks, tiling.k_slices, tiling.warps

    p.add("units of the head", tiling.padded >= spec.head_dim)
    p.add("threads", tiling.threads <= gpu.threads_per_block)
    p.add("whole fragments", (blocks * tiling.unit_tiles) % k_slices == 0)
    p.add("fragments of R", tiling.register_fragments <= spec.splits * tiles_of_warp(spec, tiling))
    p.add("barriers of unit tiles", (k_slices == 1) | (tiling.unit_tiles <= 15))
    if spec.direction == "backward":
        per_warp = blocks % k_slices == 0
        if trace(spec.cell).reduces:  # whose step takes longer than the product
            per_warp |= (blocks == 1) & (len(spec.cell.recurrent_gates) * tiling.unit_tiles % k_slices == 0)
        p.add("units per warp", per_warp)
        of_biases = minimum(k_slices, _lane_cells(spec, tiling)) * len(spec.cell.gates) * tiling.units * 4
        p.add("shared memory for the sums of biases", of_biases <= _shared_bytes(spec, tiling), unit="bytes")
    if grid:
        p.add("no idle block", tiling.units * (blocks - k_slices) < spec.head_dim)
    registers, shared = _registers(spec, tiling), _shared_bytes(spec, tiling)
    kept = registers - _spillable(spec, grid)
    p.add("registers per thread", kept <= gpu.registers_per_thread, unit="registers")
    p.add("registers", kept * 32 * warps <= gpu.registers, unit="registers")
    p.add("shared memory", shared <= gpu.shared_per_block, unit="bytes")

    return p, (_eighths(spec, tiling, at_once, spec.batch), warps * blocks, -tiling.register_fragments)


def _eighths(spec: KernelSpec, tiling: Tiling, at_once: Mapping[int, int], batch: Operand) -> Expression:
    """Return eighths of the clock cycles of a time step of the whole batch."""
    gpu, blocks = spec.gpu, tiling.blocks
    registers, shared = _registers(spec, tiling), _shared_bytes(spec, tiling)
    groups = spec.heads * ceil_div(batch, tiling.sequences)
    waves = ceil_div(groups, lookup(blocks, at_once))
    fit = minimum(gpu.registers // (registers * 32 * tiling.warps), gpu.shared_per_block // maximum(shared, 1))
    alone = lookup(blocks, {size: int(size == 1) for size in at_once})
    second = alone * (minimum(fit, 2) - 1)  # whether two blocks, each a group by itself, fit on a multiprocessor
    step = _step_cycles(spec, tiling)
    if idle := _idle(spec):
        free = gpu.multiprocessors - groups * blocks
        step += (minimum(maximum(free + 1, 0), 1) - minimum(maximum(free + 1 - idle, 0), 1)) * _AFTER
    return (8 * waves - second * (8 - _SECOND_BLOCK) * (waves - 1)) * step


def cycles(spec: KernelSpec, tiling: Tiling) -> float:
    """Return the estimated clock cycles of a time step of the whole batch; the tiling may be that of another batch."""
    unknowns, batch, eighths = _of_batch(_of_any_batch(spec), tiling.grid)
    values = {unknown: getattr(tiling, unknown.name) for unknown in unknowns}
    return eighths.evaluate({batch: spec.batch, **values}) / 8


@cache
def best(spec: KernelSpec) -> Tiling:
    """Return the first of `tilings`."""
    return next(tilings(spec))


def any_sequences(cell: Cell, tiling: Tiling) -> bool:
    """Return whether the kernel serves any number of sequences up to the tiling's columns, given at its launch."""
    clustered = tiling.blocks > 1 and not tiling.grid
    return clustered and tiling.sequences < tiling.columns and not trace(cell).reduces


def for_batch(spec: KernelSpec, tiling: Tiling) -> Tiling:
    """Return the tiling of the same kernel that should be fastest for the spec's batch."""
    if not any_sequences(spec.cell, tiling):
        return tiling
    numbers = range(2, tiling.columns + 1, 2)
    return min((replace(tiling, sequences=number) for number in numbers), key=lambda choice: cycles(spec, choice))


def likely(spec: KernelSpec) -> Tiling:
    """Return the tiling that the spec will get, unless another one is tuned, or spills less once it is compiled."""
    return for_batch(spec, best(bucket(spec.of_all_variants, SOLVER)))


def _kernel_cycles(spec: KernelSpec, tiling: Tiling) -> float:
    """Return the estimate for the kernel of a tiling, a cycle more where the number of sequences is no constant."""
    return cycles(spec, for_batch(spec, tiling)) + any_sequences(spec.cell, tiling)


SOLVER = Solver(__file__, best, _kernel_cycles)


@cache
def _of_batch(spec: KernelSpec, grid: bool) -> tuple[tuple[Variable, ...], Variable, Expression]:
    """Return the unknowns, the batch size, and the eighths of clock cycles by these."""
    p, at_once = ConstraintProblem(), _groups_at_once(spec.gpu, grid)
    tiling = _unknowns(p, spec, grid, at_once)
    unknowns, batch = p.variables, p.variable("batch", range(1, 2**20))
    return unknowns, batch, _eighths(spec, tiling, at_once, batch)


def _groups_at_once(gpu: Gpu, grid: bool) -> dict[int, int]:
    """Return how many groups run at the same time, by how many blocks they may have."""
    if grid:
        return {size: gpu.multiprocessors // size for size in range(2, gpu.multiprocessors + 1)}
    return {size: gpu.clusters_at_once(size) for size in gpu.cluster_sizes}


def _unknowns(p: ConstraintProblem, spec: KernelSpec, grid: bool, at_once: Mapping[int, int]) -> Tiling:
    blocks = p.variable("blocks", [size for size in at_once if at_once[size]], "blocks that share a head")
    unit_tiles = p.variable("unit_tiles", range(1, 5 if grid else 17), "tiles of 16 units per block")
    k_slices = p.variable("k_slices", [1, 2, 4, 8, 16] if grid else [1, 2, 4], "warps per tile")
    batch_tiles = p.variable("batch_tiles", [1, 2], "tiles of 8 sequences per block")
    sequences = 8 * batch_tiles  # of a group
    if not grid and len(at_once) > 1:
        fewer = minimum(sequences, lookup(blocks, {size: _spread(spec, size, at_once[size]) for size in at_once}))
        sequences = p.variable("sequences", range(2, 17, 2), "sequences of a group")
        right = sequences == fewer
        if trace(spec.cell).reduces:  # whose cells take longest
            right |= (blocks == 1) & (sequences == 4 * batch_tiles)
        p.add("sequences of a group", right)
    stages = p.variable("stages", [2, 3, 4] if grid else [2, 3, 4, 6, 8], "steps loaded ahead", prefer="largest")
    register_fragments = p.variable("register_fragments", range(0, 65, 4), "fragments of R in a thread's registers")
    return Tiling(unit_tiles, k_slices, batch_tiles, sequences, blocks, grid, stages, register_fragments)


def _step_cycles(spec: KernelSpec, tiling: Tiling) -> Expression:
    """Return the estimated clock cycles of a step of one group.

    They depend on the tiling alone, because units that are padding take as long as others. So a head is never slower,
    by the estimate, than a larger one, whose tilings hold it too.
    """
    direction, splits, warps, batch_tiles = spec.direction, spec.splits, tiling.warps, tiling.batch_tiles
    tiles = tiles_of_warp(spec, tiling)
    per_core = ceil_div(warps, 4)  # warps that share a tensor core and an issue slot
    alone = lookup(batch_tiles, dict(enumerate(_ALONE, 1)))
    products = tiles * (splits * (splits + 1) // 2) * maximum(batch_tiles * per_core * _MMA, alone) // 10
    reads = maximum(splits * tiles - tiling.register_fragments, 0) * warps * _READ // 10
    step = maximum(products, reads) + minimum(products, reads) * _BOTH // 10
    cell_warps = tiling.unit_tiles * minimum(tiling.k_slices, _lane_cells(spec, tiling))
    cell = _CELL[direction] + _OPERATION * _more_operations(spec.cell, direction)
    step += ceil_div(cell_warps, 4) * (_WARP[direction] + _cells_of_lane(spec, tiling) * cell)
    step += _grid_cycles(direction, tiling) if tiling.grid else _cluster_cycles(spec, tiling)
    step += len(exchanges(spec.cell, direction)) * (
        _REDUCTION + _several(spec, tiling) * _REDUCTION_OF_BLOCKS[tiling.grid]
    )
    if direction == "forward" and not tiling.grid:
        step += minimum(tiling.k_slices - 1, 1) * tiling.k_slices * _REDUCE
    if _spillable(spec, tiling.grid):
        available = minimum(spec.gpu.registers_per_thread, spec.gpu.registers // (32 * warps))
        step += _SPILLED * maximum(_registers(spec, tiling) - available, 0)
    return step


def _grid_cycles(direction: str, tiling: Tiling) -> Expression:
    """Return what a step's exchange through L2 takes; it hides what a second batch tile costs."""
    cycles = _GRID_EXCHANGE[direction] + _GRID_EXCHANGE_UNIT[direction] * tiling.padded * tiling.batch_tiles // 100
    return cycles + ceil_div(tiling.blocks // tiling.k_slices, 8) * _POLL if direction == "backward" else cycles


def _cluster_cycles(spec: KernelSpec, tiling: Tiling) -> Expression:
    """Return what a step's exchange between the blocks of a cluster takes; nothing if there is one block."""
    direction, batch_tiles = spec.direction, tiling.batch_tiles
    exchange = _EXCHANGE_UNIT[direction] * tiling.padded * tiling.sequences // (800 * batch_tiles)
    exchange += _EXCHANGE[direction]
    if direction == "backward":
        exchange += _RANK * tiling.blocks
    return _SECOND_TILE * (batch_tiles - 1) + _several(spec, tiling) * exchange


def _several(spec: KernelSpec, tiling: Tiling) -> Expression | int:
    """Return 1 if several blocks share a head, else 0."""
    return 1 if tiling.grid else lookup(tiling.blocks, {size: int(size > 1) for size in spec.gpu.cluster_sizes})


def _more_operations(cell: Cell, direction: str) -> int:
    """Return how many more operations than an LSTM's the step of a cell that reduces over units has."""
    return max(0, operation_count(cell, direction) - operation_count(LSTM, direction)) if trace(cell).reduces else 0


def _lane_cells(spec: KernelSpec, tiling: Tiling) -> Operand:
    """Return the cells in a lane's fragment: a single block may have half as many sequences as its tiles have."""
    of_tiles = 4 * tiling.batch_tiles
    if tiling.grid or not trace(spec.cell).reduces:
        return of_tiles
    several = minimum(tiling.blocks - 1, 1)
    return maximum(several * of_tiles + (1 - several) * (tiling.sequences // 2), 1)


def _cells_of_lane(spec: KernelSpec, tiling: Tiling) -> Expression:
    """Return the cells whose element-wise step a lane computes."""
    return maximum(_lane_cells(spec, tiling) // tiling.k_slices, 1)


def _spillable(spec: KernelSpec, grid: bool) -> int:
    """Return how many registers may spill in the loop. It is none, but for steps that reduce over units in a cluster:
    in a grid, which needs fewer registers, each of their exchanges takes longer than all that spills."""
    return 24 if trace(spec.cell).reduces and not grid else 0


def _idle(spec: KernelSpec) -> int:
    """Return how many multiprocessors a loop should leave idle: on Hopper, those for d_R, which overlaps with it."""
    hopper = spec.gpu.capability[0] == 9 and spec.gpu.multiprocessors > _GRADIENT
    return _GRADIENT if spec.direction == "backward" and hopper else 0


def _spread(spec: KernelSpec, size: int, at_once: int) -> int:
    """Return the even number of sequences with which clusters of `size` blocks serve the batch in one wave, at most 16.

    Few sequences for each cluster, because the exchange between its blocks takes longer for more. Multiprocessors are
    left for d_R, if every head still gets a cluster.
    """
    if size == 1:
        return 16
    leaving_room = (spec.gpu.multiprocessors - _idle(spec)) // size
    groups = min(at_once, leaving_room) // spec.heads or at_once // spec.heads
    fewest = ceil(spec.batch / groups) if groups else 16
    return min(fewest + fewest % 2, 16)


def tiles_of_warp(spec: KernelSpec, tiling: Tiling) -> Operand:
    """Return the number of 16 x 16 tiles of R that a warp multiplies, in either direction."""
    return len(spec.cell.recurrent_gates) * tiling.blocks * tiling.unit_tiles // tiling.k_slices


def _registers(spec: KernelSpec, tiling: Tiling) -> Expression:
    """Estimate the registers of a thread: R, addresses, tiles of sums, values of cells."""
    gates, states, cells = len(varying(spec.cell)), len(spec.cell.states), _cells_of_lane(spec, tiling)
    if spec.direction == "forward":
        sums, values = len(spec.cell.recurrent_gates), 1 + (gates + 2 * states) * cells + cells // 4 * 34
        values += _more_operations(spec.cell, spec.direction) // 8 * cells
    else:
        sums = maximum(4, minimum(tiling.blocks // tiling.k_slices, 8))
        constants = len(spec.cell.gates) - gates  # whose gradients are added up, of neighbouring units
        values = (2 * gates + 3 * states) * cells + constants * minimum(cells, 2)
        values += _more_operations(spec.cell, spec.direction) // 8 * cells  # some of them between reductions
    slack = _GRID_SLACK[spec.direction] * tiling.grid
    return tiling.register_fragments * 4 + 38 + 8 * spec.splits + 4 * (sums * tiling.batch_tiles) + values + slack


def shared_bytes(spec: KernelSpec, tiling: Tiling) -> int:
    """Return the bytes of a block's dynamic shared memory."""
    return _shared_bytes(spec, tiling).evaluate({})


def _shared_bytes(spec: KernelSpec, tiling: Tiling) -> Expression:
    """Return the bytes that SharedMemory in resident/kernels/{forward,backward}_memory.cuh has."""
    cell, splits, size = spec.cell, spec.splits, spec.dtype.itemsize
    gates, others = len(cell.recurrent_gates), len(cell.states) - 1
    seqs, units, warps = 8 * tiling.batch_tiles, tiling.units, tiling.warps
    from_memory = splits * tiles_of_warp(spec, tiling) - tiling.register_fragments
    several_blocks, several_warps = minimum(tiling.blocks - 1, 1), minimum(tiling.k_slices - 1, 1)
    sums = several_warps * warps * _lane_cells(spec, tiling) * 128  # of one gate
    if spec.direction == "forward":
        operand, row = splits * tiling.padded * seqs * 2, len(cell.input_gates) * size
        exchange = gates * sums + several_blocks * (splits * units * seqs * 2)
    else:
        uses_h = cell.states[0] in trace(cell).factors.inputs
        operand = splits * gates * units * seqs * 2
        stored_gates = (len(varying(cell)) | 1) * residual_dtype(spec.dtype).itemsize  # as `pitch` in tiles.cuh
        row = stored_gates + (1 + uses_h) * size + others * 4
        exchange = (
            sums if tiling.grid else several_blocks * (2 * tiling.padded * seqs * size) + (1 - several_blocks) * sums
        )
        row += ceil(trace(cell).statistics.needed / 4)  # 16 bytes of each tile of 16 units
    inputs = units * seqs * row
    constants = (len(cell.gates) - len(varying(cell))) * units * 4  # biases
    resident = warps * maximum(from_memory, 0) * 512 + _BARRIERS + _reduction_bytes(spec, tiling) + constants
    return 2 * operand + tiling.stages * inputs + exchange + resident


def _reduction_bytes(spec: KernelSpec, tiling: Tiling) -> Operand:
    """Return REDUCTION_BYTES of resident/kernels/unit_reductions.cuh."""
    found = exchanges(spec.cell, spec.direction)
    if not found:
        return 0
    vectors, buffers, seqs = max(one.vectors for one in found), max(len(found), 2), 8 * tiling.batch_tiles
    contributions = tiling.unit_tiles * (1 + minimum(tiling.k_slices // _lane_cells(spec, tiling), 1))
    several, alone = (0, 0) if tiling.grid else (minimum(tiling.blocks - 1, 1), 1 - minimum(tiling.blocks - 1, 1))
    received = buffers * seqs * (tiling.blocks * vectors + 1) * 16 + ceil(buffers / 2) * 16
    return seqs * ((1 + alone) * (contributions * vectors + 1) + vectors) * 16 + several * received
