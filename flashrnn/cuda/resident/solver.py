"""The tiling of a resident kernel as an integer constraint problem: which tilings fit on the chip, and which is
fastest.

The unknowns are the fields of `Tiling`. The constraints are the limits of the GPU and the assumptions of the kernels'
sources (tiles.cuh, forward.cuh, backward.cuh); the objective is the estimate of cost.py. The registers of a kernel are
known only after compilation: before, they are estimated, and a kernel that spills is replaced by the next best
solution.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from math import ceil
from pathlib import Path

from flashrnn.cells.trace import trace
from flashrnn.constrint import (
    ConstraintProblem,
    Expression,
    Infeasible,
    Solution,
    Variable,
    compile_value,
    lookup,
    minimum,
)
from flashrnn.cuda.buckets import Solver, bucket
from flashrnn.cuda.resident import cost
from flashrnn.cuda.resident.resources import registers, shared_memory, spillable
from flashrnn.cuda.resident.tiling import (
    WARPS_WITH_LOADERS,
    Tiling,
    Unknowns,
    bias_parts,
    dense,
    in_rows,
    may_have_loaders,
    splits,
    spread,
    spreads_clusters,
    tiles_of_warp,
)
from flashrnn.cuda.spec import KernelSpec

_BATCH, _SPREAD = "batch", "spread"  # quantities of the problem that are not fields of a Tiling


def tilings(spec: KernelSpec) -> Iterator[Tiling]:
    """Yield the tilings that fit, the best by estimate first.

    Raises Infeasible, which names the violated constraints.
    """
    return (tiling for _, tiling in estimates(spec))


def estimates(spec: KernelSpec) -> Iterator[tuple[float, Tiling]]:
    """Yield the same tilings, with the estimated clock cycles of a time step of the whole batch."""
    if reason := infeasible(spec):
        raise reason
    found = (_solutions(spec, grid) for grid in (False, True) if not _infeasible(_of_any_batch(spec), grid=grid))
    for (eighths, *_), tiling in heapq.merge(*found, key=lambda solution: solution[0]):
        yield eighths / 8, tiling


def _solutions(spec: KernelSpec, grid: bool) -> Iterator[tuple[tuple[int, ...], Tiling]]:
    """Yield the values of the objectives and the tiling of each solution, the best first."""
    problem, objective = pose(spec, grid)
    for solution in problem.best(objective):
        yield tuple(map(solution.value, objective)), _as_tiling(spec, solution, grid)


def _as_tiling(spec: KernelSpec, solution: Solution, grid: bool) -> Tiling:
    """Return the tiling of a solution."""
    unknowns = {name: value for name, value in solution.items() if name not in (_BATCH, _SPREAD)}
    tiling = Tiling(**{"sequences": 8 * solution["batch_tiles"], **unknowns}, grid=grid)
    any_sequences = spec.any_sequences if trace(spec.cell).reduces else tiling.sequences < tiling.columns
    constant = tiling.blocks == 1 or grid or solution.get(_SPREAD)
    return replace(tiling, any_sequences=bool(any_sequences and not constant))


def infeasible(spec: KernelSpec) -> Infeasible | None:
    """Return why no tiling fits, or None if one does.

    The batch size is ignored, because it may have any number of tiles.
    """
    spec = _of_any_batch(spec)
    return _infeasible(spec, grid=False) and _infeasible(spec, grid=True)


def _of_any_batch(spec: KernelSpec) -> KernelSpec:
    """Return the spec that all specs with the same constraints share."""
    variant = replace(spec.of_all_variants.variant, reset=spec.variant.reset)  # resets take some shared memory
    return replace(spec, variant=variant, batch=8)


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
        if unknown.name not in (_BATCH, _SPREAD):
            problem.add(f"given {unknown}", unknown == getattr(tiling, unknown.name))
    return any(_as_tiling(spec, solution, tiling.grid) == tiling for solution in problem.solutions())


def pose(spec: KernelSpec, grid: bool) -> tuple[ConstraintProblem, tuple[Expression, ...]]:
    """Return the problem and the objectives to minimise; the first is the clock cycles per time step, in eighths."""
    gpu, sizes = spec.gpu, f"{spec.cell.name}, head size {spec.head_dim}"
    p = ConstraintProblem(f"{spec.direction} of {sizes}, on {gpu.name}")
    at_once = _groups_at_once(spec, grid)
    tiling = _unknowns(p, spec, grid, at_once)
    blocks, k_slices, warps = tiling.blocks, tiling.k_slices, tiling.warps
    shared = shared_memory(spec, tiling)

    p.add("units of the head", tiling.padded >= spec.head_dim)
    p.add("threads", tiling.threads <= gpu.threads_per_block)
    p.add("whole fragments", (blocks * tiling.unit_tiles) % k_slices == 0)
    p.add("fragments of R", tiling.register_fragments <= splits(spec) * tiles_of_warp(spec, tiling))
    if in_rows(spec) and not grid:
        whole_rows = tiling.sequences % (4 * k_slices) == 0
        if len(at_once) > 1:
            helped = (tiling.sequences == 2) & (k_slices == 1)  # HELPED in tiles.cuh
            whole_rows |= helped & (tiling.unit_tiles > 1) & (tiling.stages > 2)
        p.add("whole rows of lanes", (blocks > 1) | (tiling.padded == spec.head_dim) & whole_rows)
    p.add("barriers of unit tiles", (k_slices == 1) | (tiling.unit_tiles <= 15))
    if spec.direction == "backward":
        per_warp = blocks % k_slices == 0
        if trace(spec.cell).reduces:  # the step takes longer than the product
            per_warp |= (blocks == 1) & (len(spec.cell.recurrent_gates) * tiling.unit_tiles % k_slices == 0)
        p.add("units per warp", per_warp)
        of_biases = bias_parts(spec, tiling) * len(spec.cell.gates) * tiling.units * 4
        p.add("shared memory for the sums of biases", of_biases <= shared, unit="bytes")
    if grid and spec.layers > 1:
        p.add("clusters alone, of layers at the same time", blocks <= 1)
    elif spec.layers > 1:  # four layers of 1 x 512 with two tiles took 1.92 us per step, by the estimate 1.39
        p.add("one tile of sequences, of layers at the same time", tiling.batch_tiles == 1)
    if grid:
        p.add("no idle block", tiling.units * (blocks - k_slices) < spec.head_dim)
    needed = registers(spec, tiling) - spillable(spec, grid)
    p.add("registers per thread", needed <= gpu.registers_per_thread, unit="registers")
    p.add("registers", needed * 32 * warps <= gpu.registers, unit="registers")
    p.add("shared memory", shared <= gpu.shared_per_block, unit="bytes")

    batch = p.variable(_BATCH, spec.batch)  # a variable, so that the objective is compiled once for all batch sizes
    return p, (cost.eighths(spec, tiling, at_once, batch), warps * blocks, -tiling.register_fragments)


def _unknowns(p: ConstraintProblem, spec: KernelSpec, grid: bool, at_once: Mapping[int, int]) -> Tiling:
    """Add the unknowns of a tiling to the problem, and return them as a tiling."""
    blocks = p.variable("blocks", [size for size in at_once if at_once[size] > 0], "blocks that share a head")
    unit_tiles = p.variable("unit_tiles", range(1, 5 if grid else 17), "tiles of 16 units per block")
    k_slices = p.variable("k_slices", [1, 2, 4, 8, 16] if grid else [1, 2, 4], "warps per tile")
    batch_tiles = p.variable("batch_tiles", [1, 2], "tiles of 8 sequences per block")
    sequences, spreads = 8 * batch_tiles, 0  # per group
    if not grid and len(at_once) > 1:
        fewer = minimum(
            sequences, lookup(blocks, {size: _sequences_in_one_wave(spec, size, at_once[size]) for size in at_once})
        )
        sequences = p.variable("sequences", range(2, 17, 2), "sequences of a group")
        right = sequences == fewer
        if not trace(spec.cell).reduces and spec.direction == "backward":
            # With the number of sequences as an argument, clusters of four of 12 x 64 took 181 to 191 us for 512 steps
            # (165 with all columns), and clusters of two 292 (267). So they use all columns, whatever the batch size.
            right &= blocks > 4
            right |= (blocks <= 4) & (sequences == 8 * batch_tiles)
        if trace(spec.cell).reduces:
            right |= (blocks == 1) & (sequences == 4 * batch_tiles)
            if in_rows(spec) and spec.layers == 1:
                right |= (blocks == 1) & (batch_tiles == 1) & (sequences == 2)
        else:
            spreads = _spread_columns(p, spec, blocks, k_slices, batch_tiles, sequences)
            right |= spreads == 1
        p.add("sequences of a group", right)
    few = grid or spec.layers > 1  # later loads do not require the layer below to be as far ahead
    stages = p.variable("stages", [2, 3, 4] if few else [2, 3, 4, 6, 8], "steps loaded ahead", prefer="largest")
    register_fragments = p.variable("register_fragments", range(0, 65, 4), "fragments of R in a thread's registers")
    any_sequences = spec.any_sequences or not trace(spec.cell).reduces  # memory is sized as if it were True
    allowed = [0, 2, 4] if not grid and may_have_loaders(spec) else [0]
    loaders = p.variable("loaders", allowed, "further warps that load inputs")
    tiling = unit_tiles, k_slices, batch_tiles, sequences, blocks, grid, stages, register_fragments, any_sequences
    unknowns = Unknowns(*tiling, loaders, spreads)
    if len(allowed) > 1:
        whole = (unknowns.padded == spec.head_dim) & ((blocks * unit_tiles) % WARPS_WITH_LOADERS == 0)
        right = (unknowns.warps == WARPS_WITH_LOADERS) & (k_slices == 2) & (dense(spec, unknowns) == 1)
        p.add("loaders", (loaders == 0) | (whole & right))
    return unknowns


def _spread_columns(
    p: ConstraintProblem,
    spec: KernelSpec,
    blocks: Variable,
    k_slices: Variable,
    batch_tiles: Variable,
    sequences: Variable,
) -> Variable:
    """Return the unknown whose value is `tiling.spread` of the tiling."""
    spreads = p.variable(_SPREAD, [0, 1], "whether every second column alone is used")
    allowed, otherwise = blocks == 1, blocks > 1
    if spreads_clusters(spec) and not spec.any_sequences:
        allowed, otherwise = allowed | (k_slices == 1), otherwise & (k_slices > 1)
    p.add("every second column", (spreads == 0) | ((batch_tiles == 1) & (sequences == 4) & allowed))
    p.add("all columns", (spreads == 1) | (batch_tiles == 2) | (sequences < 4) | (sequences > 4) | otherwise)
    return spreads


def _sequences_in_one_wave(spec: KernelSpec, size: int, at_once: int) -> int:
    """Return the even number of sequences, at most 16, with which clusters serve the batch in one wave.

    It is small, because the exchange between the blocks of a cluster takes longer for more sequences. If every head
    still gets a cluster, multiprocessors are left for d_R.
    """
    if size == 1:
        return 16
    beside_idle = (spec.gpu.multiprocessors - cost.idle_multiprocessors(spec)) // size
    heads = spec.heads * spec.layers
    groups = min(at_once, beside_idle) // heads or at_once // heads
    fewest = ceil(spec.batch / groups) if groups else 16
    return min(fewest + fewest % 2, 16)


def _groups_at_once(spec: KernelSpec, grid: bool) -> dict[int, int]:
    """Return how many groups are co-resident, by the number of blocks of a group.

    With several layers, the clusters that compute their input products run at the same time.
    """
    gpu, products = spec.gpu, spec.layers - 1
    if grid:
        return {size: gpu.multiprocessors // size for size in range(2, gpu.multiprocessors + 1)}
    return {
        size: gpu.clusters_at_once(size) - products * ceil(spec.product_blocks / size) for size in gpu.cluster_sizes
    }


@cache
def best(spec: KernelSpec) -> Tiling:
    """Return the first of `tilings`."""
    return next(tilings(spec))


def for_batch(spec: KernelSpec, tiling: Tiling) -> Tiling:
    """Return the tiling of the same kernel that is the best by estimate for the spec's batch size."""
    if not tiling.any_sequences:
        return tiling
    choices = [replace(tiling, sequences=number) for number in range(2, tiling.columns + 1, 2)]
    estimate = _estimate_for(spec, tiling)
    return min(choices, key=lambda choice: estimate(choice, spec.batch))


def likely_tiling(spec: KernelSpec) -> Tiling:
    """Return the tiling that the spec will get, unless another one has been tuned or spills less."""
    return for_batch(spec, best(bucket(spec.of_all_variants, SOLVER)))


def cycles(spec: KernelSpec, tiling: Tiling) -> float:
    """Return the estimated clock cycles of a time step of the whole batch.

    The tiling may have been chosen for another batch.
    """
    return _estimate_for(spec, tiling)(tiling, spec.batch)


def _estimate_for(spec: KernelSpec, tiling: Tiling) -> Callable[[Tiling, int], float]:
    """Return the estimate for tilings of the same kernel, as a function of a tiling and a batch size."""
    return _estimate(replace(_of_any_batch(spec), any_sequences=tiling.any_sequences), tiling.grid)


@cache
def _estimate(spec: KernelSpec, grid: bool) -> Callable[[Tiling, int], float]:
    """Return the estimate as a function of a tiling and a batch size."""
    p, at_once = ConstraintProblem(), _groups_at_once(spec, grid)
    tiling = _unknowns(p, spec, grid, at_once)
    names = [unknown.name for unknown in p.variables]
    batch = p.variable(_BATCH, range(1, 2**20))
    eighths = compile_value(cost.eighths(spec, tiling, at_once, batch), p.variables)

    def values(tiling: Tiling) -> list[int]:
        return [spread(spec, tiling) if name == _SPREAD else getattr(tiling, name) for name in names]

    return lambda tiling, batch: eighths([*values(tiling), batch]) / 8


def _kernel_cycles(spec: KernelSpec, tiling: Tiling) -> float:
    """Return the estimate for the kernel of a tiling, plus one cycle if its number of sequences is an argument."""
    return cycles(spec, for_batch(spec, tiling)) + tiling.any_sequences


_SOURCES = tuple(str(Path(__file__).with_name(f"{name}.py")) for name in ("solver", "cost", "resources", "tiling"))
SOLVER = Solver(_SOURCES, best, _kernel_cycles)
