"""The tiling of a kernel as an integer constraint problem: what fits on the chip, and what of it is fastest.

The unknowns are those of `Tiling`. Constraints are the GPU's limits and what the kernels' sources (tiles.cuh,
forward.cuh, backward.cuh) take for granted; the objective is an estimate of the time of the whole loop, in clock cycles
per step, from the rates below. The register need of a kernel is known only once it is compiled: `register_need` is an
estimate for the first guess, and a kernel that spills is excluded in favour of the next best solution.
"""

from collections.abc import Iterator
from dataclasses import fields
from functools import cache

from flashrnn.cells import Cell
from flashrnn.constrint import Expression, Infeasible, Problem, ceil_div, lookup, maximum, minimum
from flashrnn.constrint.expressions import Operand, as_expression
from flashrnn.cuda.source import Tiling, sum_rows
from flashrnn.gpu import Gpu
from flashrnn.trace import trace

# Clock cycles on an H100, fitted to the runs in docs/kernels.md.
_MMA = 6  # one 16x8x16 product on one of an SM's four tensor cores
_READ = 4  # a warp reads 16 bytes per lane of shared memory
_WARP = {"forward": 330, "backward": 420}  # a warp's instructions in a step, apart from those of its cells
_CELL = {"forward": 80, "backward": 160}  # the element-wise step of one cell per lane
_SECOND_TILE = 300  # what two batch tiles in one block cost besides the work of both
_REDUCE = 150  # adding up the sums of a tile's warps
_EXCHANGE = 250  # a step's results from block to block, and _EXCHANGE_UNIT / 10 for every unit of the head
_EXCHANGE_UNIT = 8


def tilings(direction: str, cell: Cell, heads: int, head_dim: int, batch: int, gpu: Gpu) -> Iterator[Tiling]:
    """Tilings that fit, the one that should be fastest first. Raises Infeasible, which names what does not fit."""
    problem, objective = pose(direction, cell, heads, head_dim, batch, gpu)
    problem.solve()
    for solution in problem.best(objective):
        yield Tiling(**{field.name: solution[field.name] for field in fields(Tiling)})


@cache
def infeasible(direction: str, cell: Cell, heads: int, head_dim: int, gpu: Gpu) -> str | None:
    """Why no tiling fits, or None if one does; the batch does not matter, there can always be more tiles of it."""
    try:
        pose(direction, cell, heads, head_dim, 8, gpu)[0].solve()
    except Infeasible as reason:
        return reason.summary
    return None


def pose(
    direction: str, cell: Cell, heads: int, head_dim: int, batch: int, gpu: Gpu
) -> tuple[Problem, tuple[Expression, ...]]:
    """The problem, and what to minimise."""
    p = Problem(f"{direction} of {cell.name}, head size {head_dim}, on {gpu.name}")
    gates = len(cell.recurrent_gates)
    at_once = {size: gpu.multiprocessors * (16 if size == 1 else 15) // 16 // size for size in gpu.cluster_sizes}
    cluster = p.variable("cluster", [size for size in at_once if at_once[size]], "blocks that share a head")
    unit_tiles = p.variable("unit_tiles", range(1, 17), "tiles of 16 units per block")
    k_splits = p.variable("k_splits", [1, 2, 4], "warps per tile")
    batch_tiles = p.variable("batch_tiles", [1, 2], "tiles of 8 sequences per block")
    stages = p.variable("stages", [2, 3, 4, 6, 8], "steps loaded ahead", prefer="largest")
    register_fragments = p.variable("register_fragments", range(0, 65, 4), "fragments of R in a thread's registers")
    warps = unit_tiles * k_splits
    fragments = gates * (cluster * unit_tiles // k_splits)

    p.add("units of the head", 16 * unit_tiles * cluster >= head_dim)
    p.add("threads", 32 * warps <= gpu.threads_per_block)
    p.add("whole fragments", (cluster * unit_tiles) % k_splits == 0)
    p.add("fragments of R", register_fragments <= fragments)
    p.add("barriers of unit tiles", (k_splits == 1) | (unit_tiles <= 15))
    if direction == "backward":
        p.add("units per warp", cluster % k_splits == 0)
    sums = (gates if direction == "forward" else maximum(4, cluster // k_splits)) * batch_tiles
    need = register_fragments * 4 + register_need(direction, cell, 4 * batch_tiles // k_splits, sums)
    p.add("registers per thread", need <= gpu.registers_per_thread, unit="registers")
    p.add("registers", need * 32 * warps <= gpu.registers, unit="registers")
    shared = _shared_bytes(direction, cell, cluster, unit_tiles, k_splits, batch_tiles, stages, register_fragments)
    p.add("shared memory", shared <= gpu.shared_per_block, unit="bytes")

    waves = ceil_div(heads * ceil_div(batch, 8 * batch_tiles), lookup(cluster, at_once))
    per_core = ceil_div(warps, 4)  # warps that share a tensor core and an issue slot
    products = fragments * batch_tiles * per_core * _MMA
    reads = (fragments - register_fragments) * warps * _READ
    step = maximum(products, reads) + minimum(products, reads) // 2 + _SECOND_TILE * (batch_tiles - 1)
    step += per_core * (_WARP[direction] + 4 * batch_tiles // k_splits * _CELL[direction])
    exchange = _EXCHANGE + _EXCHANGE_UNIT * head_dim // 10
    step += lookup(cluster, {size: exchange * (size > 1) for size in gpu.cluster_sizes})
    if direction == "forward":
        step += lookup(k_splits, {1: 0, 2: _REDUCE, 4: _REDUCE})
    idle = minimum(16 * unit_tiles * (cluster - 1) // head_dim, 1)  # whether there is a block without units
    return p, (idle, waves * step, warps * cluster, -register_fragments)


def register_need(direction: str, cell: Cell, cells: Operand, sums: Operand) -> Expression:
    """Registers of a thread besides those for R, about: addresses, `sums` tiles of sums, values of `cells` cells."""
    gates, states = len(cell.gates), len(cell.states)
    if direction == "forward":
        return 44 + 4 * sums + (gates + 2 * states) * cells
    return 38 + 4 * sums + (2 * gates + 3 * states) * cells


def shared_bytes(direction: str, cell: Cell, tiling: Tiling) -> int:
    """Dynamic shared memory of a block."""
    sizes = {field.name: as_expression(getattr(tiling, field.name)) for field in fields(Tiling)}
    return _shared_bytes(direction, cell, **sizes).evaluate({})


def _shared_bytes(
    direction: str,
    cell: Cell,
    cluster: Operand,
    unit_tiles: Operand,
    k_splits: Operand,
    batch_tiles: Operand,
    stages: Operand,
    register_fragments: Operand,
) -> Expression:
    """Dynamic shared memory of a block, as SHARED_BYTES in kernels/{forward,backward}.cuh; numbers or expressions."""
    gates, others = len(cell.recurrent_gates), len(cell.states) - 1
    seqs, units, warps = 8 * batch_tiles, 16 * unit_tiles, unit_tiles * k_splits
    padded = units * cluster
    fragments = gates * (cluster * unit_tiles // k_splits)
    several_blocks, several_warps = minimum(cluster - 1, 1), minimum(k_splits - 1, 1)
    if direction == "forward":
        operand, rows = padded * seqs * 2, len(cell.input_gates)
        exchange = several_warps * (unit_tiles * k_splits * 4 * batch_tiles * 32 * gates * 4)
        exchange += several_blocks * (units * seqs * 2)
    else:
        uses_h = cell.states[0] in trace(cell).factors.inputs
        operand, rows = gates * units * seqs * 2, len(cell.input_gates) + sum_rows(cell) + 1 + 2 * others + uses_h
        exchange = several_blocks * (2 * padded * seqs * 2)
    inputs = unit_tiles * rows * seqs * 32
    return 2 * operand + stages * inputs + exchange + warps * (fragments - register_fragments) * 512 + 16
