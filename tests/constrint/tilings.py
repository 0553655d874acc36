"""Tiling problems similar to those of recurrent kernels, with hardware limits of an H100.

A CTA owns units of one head; its warps share the rows (16 per tile: units times gates) and split the previous state.
Weight fragments that do not fit in registers are in shared memory. Times are rough, in nanoseconds.
"""

from dataclasses import dataclass

from flashrnn.constrint import ConstraintProblem, Expression, Variable, any_of, ceil_div, lookup, maximum

SMS = 132
SHARED_MEMORY = 227 * 1024
REGISTERS = 65536
CLUSTERS_THAT_FIT = {2: 66, 4: 30, 8: 15, 16: 7}
CLUSTER_EXCHANGE = {2: 540, 4: 540, 8: 540, 16: 610}


@dataclass
class Tiling:
    """A problem, and the expressions to minimise, the most important first."""

    problem: ConstraintProblem
    objective: tuple[Expression, ...]


def tiling(kernel: str, head_dim: int, batch: int, heads: int, gates: int = 4) -> Tiling:
    """Return the problem for a kernel that keeps the weights in one CTA ("cta"), in a cluster, or in a grid."""
    p = ConstraintProblem(f"{kernel}, head size {head_dim}, batch {batch}, {heads} heads")
    units = p.variable("head_dim", head_dim, "head size")
    known_gates = p.variable("gates", gates, "gates per unit")
    ctas = p.variable(
        "ctas", {"cta": [1], "cluster": [2, 4, 8, 16], "grid": range(1, SMS + 1)}[kernel], "CTAs per head"
    )
    row_warps = p.variable("row_warps", range(1, 17), "warps that share the rows")
    k_warps = p.variable("k_warps", [1, 2, 4, 8], "warps that split the previous state")
    row_tiles = p.variable("row_tiles", range(1, 17), "tiles of 16 rows per warp")
    k_tiles = p.variable("k_tiles", range(1, 257), "tiles of 16 columns per warp")
    batch_tile = p.variable("batch_tile", range(8, 65, 8), "sequences per CTA")
    in_registers = p.variable("in_registers", range(257), "fragments in registers", prefer="largest")
    in_shared = p.variable("in_shared", range(257), "fragments in shared memory")
    stages = p.variable("stages", range(2, 9), "steps of input in flight", prefer="largest")

    rows, columns = 16 * row_tiles * row_warps, 16 * k_tiles * k_warps
    p.add("rows cover the gates", rows * ctas >= known_gates * units)
    p.add("no idle CTA", rows * (ctas - 1) < known_gates * units)
    p.add("columns cover the state", columns >= units)
    p.add("no idle column tile", columns - 16 * k_warps < units)
    p.add("every fragment has a place", in_registers + in_shared == row_tiles * k_tiles)
    p.add("whole vectors", (row_tiles * batch_tile) % 8 == 0)
    p.add("deep pipelines for small tiles", any_of(batch_tile <= 32, stages <= 4))

    warps = row_warps * k_warps
    p.add("warps per CTA", warps <= 16)
    registers = 4 * in_registers + row_tiles * batch_tile // 2 + batch_tile // 4 + 44
    p.add("registers per thread", registers <= 255, unit="registers")
    p.add("register file", 32 * warps * 8 * ceil_div(registers, 8) <= REGISTERS, unit="registers")
    weights, state = 512 * in_shared * warps, 2 * 2 * batch_tile * (columns + 8)
    inputs = 2 * stages * batch_tile * rows
    partial_sums = 4 * lookup(k_warps, {1: 0, 2: 2, 4: 4, 8: 8}) * rows * batch_tile
    p.add("shared memory", weights + state + inputs + partial_sums <= SHARED_MEMORY, unit="bytes")
    waves = _waves(p, kernel, ctas, heads * ceil_div(batch, batch_tile))

    products = row_tiles * k_tiles * (batch_tile // 8) * ceil_div(warps, 4) * 8
    exchange: Expression | int = {"cta": 60, "cluster": 0, "grid": 1400 + 6 * ctas}[kernel]
    if kernel == "cluster":
        exchange = lookup(ctas, CLUSTER_EXCHANGE)
    elementwise = 3 * row_tiles * batch_tile + 30 * k_warps
    step = maximum(products, 4 * in_shared * warps) + exchange + elementwise + 200
    return Tiling(p, (waves * step, rows * ctas + columns, -stages))


def _waves(p: ConstraintProblem, kernel: str, ctas: Variable, tiles: Expression) -> Expression | int:
    """Return the number of waves, which is one for a grid, because its CTAs wait for each other."""
    if kernel == "cta":
        return ceil_div(tiles, SMS)
    if kernel == "cluster":
        return ceil_div(tiles, lookup(ctas, CLUSTERS_THAT_FIT))
    p.add("all CTAs at once", tiles * ctas <= SMS, unit="SMs")
    return 1
