"""The tiling of a streaming kernel as an integer constraint problem: how the work of a step is distributed over blocks.

The unknowns are the fields of `Tiling`. The estimated time of a step is that of its busiest multiprocessor: it reads
rows of R and, for each item, the vectors of all sequences, and its warps wait for these loads.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

import torch

from flashrnn.cells.gates import varying
from flashrnn.cells.printers.cuda import exchanges
from flashrnn.cells.trace import trace
from flashrnn.constrint import ConstraintProblem, Expression, Infeasible, ceil_div, minimum
from flashrnn.constrint.expressions import Operand
from flashrnn.cuda.buckets import Solver
from flashrnn.cuda.parameters import declaration
from flashrnn.cuda.source import cell_prelude
from flashrnn.cuda.spec import KernelSpec
from flashrnn.cuda.streaming.parameters import streaming

# Clock cycles on an H100, from its data sheet and from what docs/kernels.md reports of other kernels; not fitted.
_BYTES = 40  # that a multiprocessor reads from L2 per cycle
_LATENCY = 600  # of a read from L2
_ITEM = 600  # waiting for vectors, barriers, sums over warps
_CELL = 100  # the element-wise step of one cell in every thread
_SUM = 2  # reading and adding the partial sum of one warp

_READ_AT_ONCE = 64  # bytes of a row, read by four lanes


@dataclass(frozen=True)
class Tiling:
    """Names as in streaming/kernels/stream.cuh. While the problem is posed, the fields are expressions."""

    units: int
    seq_tiles: int
    warps: int
    warp_vectors: int
    depth: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def vectors(self) -> int:
        """Return the number of 64-byte vectors in a row of R, including padding."""
        return self.warps * self.warp_vectors

    def padded(self, dtype: torch.dtype) -> int:
        """Return the number of elements in a row, including padding."""
        return self.vectors * _READ_AT_ONCE // dtype.itemsize

    def unit_blocks(self, head_dim: int) -> int:
        """Return the number of items in a group."""
        return math.ceil(head_dim / self.units)

    def groups(self, heads: int, batch: int) -> int:
        """Return the number of groups of a batch."""
        return heads * math.ceil(batch / (16 * self.seq_tiles))


@dataclass(frozen=True)
class Rows:
    """The matrix of a step's product: [Gr*D, D] in the forward, [D, Gr*D] in the backward."""

    per_unit: int
    length: int

    @staticmethod
    def of(spec: KernelSpec) -> "Rows":
        """Return the matrix for the cell and the direction of a spec."""
        gates = len(spec.cell.recurrent_gates)
        return Rows(gates, spec.head_dim) if spec.direction == "forward" else Rows(1, gates * spec.head_dim)


def infeasible(spec: KernelSpec) -> str | None:
    """Return why no tiling fits, or None if one does. The numbers of heads and sequences do not matter."""
    return _infeasible(replace(spec.of_all_variants, heads=1, batch=1))


@cache
def _infeasible(spec: KernelSpec) -> str | None:
    try:
        pose(spec)[0].solve()
    except Infeasible as reason:
        return reason.summary
    return None


def best_tiling(spec: KernelSpec) -> Tiling:
    """Return the tiling that should be fastest.

    Raises Infeasible, which names the constraints that exclude each other.
    """
    return _best_tiling(spec.of_all_variants)


@cache
def _best_tiling(spec: KernelSpec) -> Tiling:
    problem, objective = pose(spec)
    problem.solve()
    found = next(problem.best(objective))
    warp_vectors = math.ceil(_vectors(spec) / found["warps"])
    return Tiling(found["units"], found["seq_tiles"], found["warps"], warp_vectors, found["depth"])


def pose(spec: KernelSpec) -> tuple[ConstraintProblem, tuple[Expression, ...]]:
    """Return the problem and the objective to minimise."""
    gpu, head_dim, batch, rows = spec.gpu, spec.head_dim, spec.batch, Rows.of(spec)
    p = ConstraintProblem(
        f"{spec.direction} of {spec.cell.name}, head size {head_dim}, R read at every step, on {gpu.name}"
    )
    step = 8 // math.gcd(8, rows.per_unit)
    units = p.variable("units", range(step, max(step, 32) + 1, step), "units per item")
    seq_tiles = p.variable("seq_tiles", [1, 2, 4], "tiles of 16 sequences per item")
    warps = p.variable("warps", range(4, 17), "warps, between which rows are split")
    depth = p.variable("depth", range(1, 9), "vectors of every row that a warp reads ahead", prefer="largest")
    warp_vectors = ceil_div(_vectors(spec), warps)
    cells = ceil_div(16 * seq_tiles * units, 32 * warps)

    p.add("vectors read ahead", depth <= warp_vectors)
    tiling = Tiling(units, seq_tiles, warps, warp_vectors, depth)
    need = _registers(spec, tiling, cells)
    p.add("registers per thread", need <= gpu.registers_per_thread, unit="registers")
    p.add("registers", need * 32 * (4 * ceil_div(warps, 4)) <= gpu.registers, unit="registers")  # of four schedulers
    stride = rows.per_unit * units + 32  # upper bound; see SUM_STRIDE
    shared = warps * 16 * seq_tiles * stride * 4 + _reduction_bytes(spec, units, seq_tiles)
    p.add("shared memory", shared <= gpu.shared_per_block, unit="bytes")
    if trace(spec.cell).reduces:
        p.add("one item per block", ceil_div(head_dim, units) <= gpu.multiprocessors)

    return p, (_cycles(spec, tiling, cells, batch), warps, -depth)


def _cycles(spec: KernelSpec, tiling: Tiling, cells: Operand, batch: Operand) -> Expression:
    """Return the estimated clock cycles of a time step of the whole batch."""
    rows, sequences = Rows.of(spec).per_unit * tiling.units, 16 * tiling.seq_tiles
    items = spec.heads * ceil_div(batch, sequences) * ceil_div(spec.head_dim, tiling.units)
    read = _READ_AT_ONCE * tiling.vectors * (rows + minimum(sequences, batch))
    wait = ceil_div(tiling.warp_vectors, tiling.depth) * _LATENCY
    item = read // _BYTES + wait + _ITEM + cells * (_CELL + _SUM * Rows.of(spec).per_unit * tiling.warps)
    return ceil_div(items, spec.gpu.multiprocessors) * item


def cycles(spec: KernelSpec, tiling: Tiling) -> float:
    """Return the estimated clock cycles of a time step of the whole batch.

    The tiling may have been chosen for another batch.
    """
    cells = ceil_div(16 * tiling.seq_tiles * tiling.units, 32 * tiling.warps)
    return _cycles(spec, tiling, cells, spec.batch).evaluate({})


SOLVER = Solver((__file__,), best_tiling, cycles)


def _vectors(spec: KernelSpec) -> int:
    return math.ceil(Rows.of(spec).length * spec.dtype.itemsize / _READ_AT_ONCE)


def _registers(spec: KernelSpec, tiling: Tiling, cells: Expression) -> Expression:
    """Estimate the registers of a thread: sums, loads in flight, values of cells, addresses."""
    cell, splits, seq_tiles = spec.cell, spec.splits, tiling.seq_tiles
    row_tiles = tiling.units * Rows.of(spec).per_unit // 8
    gates, states = len(cell.gates), len(cell.states)
    if trace(cell).reduces:  # values stay in registers between the phases of a step
        values = 2 * len(varying(cell)) + 4 * states + 16
    elif spec.direction == "forward":
        values = len(cell.input_gates) + gates + 2 * states
    else:
        values = len(trace(cell).factors.outputs) + 2 * states + gates
    operands = (6 * splits + 2 + row_tiles) * seq_tiles if splits > 1 else 0
    sums, read_ahead = 4 * row_tiles * seq_tiles, 4 * tiling.depth * (row_tiles + 2 * seq_tiles)
    return sums + read_ahead + (values + 4) * cells + operands + 60


def shared_bytes(spec: KernelSpec, tiling: Tiling) -> int:
    """Return the bytes of a block's shared memory.

    The sums of every warp have rows of SUM_STRIDE floats (stream.cuh).
    """
    rows = Rows.of(spec).per_unit * tiling.units
    sums = tiling.warps * 16 * tiling.seq_tiles * (rows + (40 - rows % 32) % 32) * 4
    return sums + _reduction_bytes(spec, tiling.units, tiling.seq_tiles)


def _reduction_bytes(spec: KernelSpec, units: Operand, seq_tiles: Operand) -> Operand:
    """Return the bytes of shared memory of UnitReductions: REDUCTION_FLOATS in stream.cuh."""
    return part_floats(spec) * (16 * seq_tiles) * (units + 1) * 4


def part_floats(spec: KernelSpec) -> int:
    """Return the floats per sequence of the largest exchange over units; 0 if steps are element-wise."""
    return 4 * max((one.vectors for one in exchanges(spec.cell, spec.direction)), default=0)


def prelude(spec: KernelSpec, tiling: Tiling) -> str:
    """Return the printed source before a streaming kernel's header."""
    rows = Rows.of(spec)
    constants = {
        "UNITS": tiling.units,
        "SEQ_TILES": tiling.seq_tiles,
        "WARPS": tiling.warps,
        "WARP_VECTORS": tiling.warp_vectors,
        "DEPTH": tiling.depth,
        "ROWS": rows.per_unit * tiling.units,
        "K": rows.length,
        "SHARED_BYTES_EXPECTED": shared_bytes(spec, tiling),
    }
    return "\n".join((cell_prelude(spec, constants), declaration(streaming(spec))))
