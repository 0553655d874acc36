"""The tilings of the fused kernels: the same optima as CP-SAT in less time, and reasons if nothing fits."""

import itertools
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median

import pytest
import torch

from flashrnn import get_cell
from flashrnn.constrint import ConstraintProblem, Expression, Infeasible
from flashrnn.cuda.resident import resources, solver, tiling
from flashrnn.cuda.spec import KernelSpec, Variant
from flashrnn.gpu import named_gpu
from tests.constrint.cp_sat import solve_with_cp_sat

HEAD_DIMS = (16, 22, 64, 96, 128, 256, 512, 768, 1024, 2048)
HEADS_AND_BATCH = ((12, 16), (1, 1), (12, 64), (1, 65), (48, 16))
CELLS = ("elman", "gru", "lstm", "slstm")
GPUS = ("H100", "A100", "RTX 4090")
FAST = (("H100", "lstm"), ("H100", "gru"), ("RTX 4090", "lstm"))
LIMIT_MS = 20
RUNS = 3
BF16 = torch.bfloat16

Posed = tuple[ConstraintProblem, tuple[Expression, ...]]


def spec_of(
    direction: str, cell: str, heads: int, head_dim: int, batch: int, gpu: str = "H100", dtype=BF16, tf32: bool = False
) -> KernelSpec:
    return KernelSpec(direction, get_cell(cell), heads, head_dim, batch, dtype, named_gpu(gpu), Variant(tf32=tf32))


def cases() -> list[tuple]:
    """Return every third combination of cells, directions, GPUs and head sizes, with alternating heads and batches."""
    sizes = itertools.islice(itertools.product(GPUS, CELLS, ("forward", "backward"), HEAD_DIMS), 0, None, 3)
    return [(*size, *rest) for size, rest in zip(sizes, itertools.cycle(HEADS_AND_BATCH))]


def pose(gpu: str, cell: str, direction: str, head_dim: int, heads: int, batch: int) -> Posed:
    """Return the problem for a cluster if the head fits, otherwise for a grid."""
    grid = head_dim > (768 if gpu == "H100" else 128)
    return solver.pose(spec_of(direction, cell, heads, head_dim, batch, gpu), grid)


def by_constrint(posed: Posed) -> tuple[int, ...] | None:
    problem, objective = posed
    solution = next(problem.best(objective), None)
    return None if solution is None else tuple(map(solution.value, objective))


def by_cp_sat(posed: Posed) -> tuple[int, ...] | None:
    problem, objective = posed
    solution = solve_with_cp_sat(problem, objective)
    return None if solution is None else tuple(map(solution.value, objective))


def cpu_ms(solve: Callable[[Posed], object], posed: Posed) -> float:
    start = time.process_time()
    solve(posed)
    return 1e3 * (time.process_time() - start)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(), ids=lambda case: "-".join(map(str, case)))
def test_same_optimum_as_cp_sat_in_less_time(case, record_property):
    assert by_constrint(pose(*case)) == by_cp_sat(pose(*case))
    # In turns, so that other load affects both; each run starts from a problem that has not been compiled.
    pairs = [(cpu_ms(by_constrint, pose(*case)), cpu_ms(by_cp_sat, pose(*case))) for _ in range(RUNS)]
    ours, theirs = (median(times) for times in zip(*pairs, strict=True))
    record_property("constrint_ms", ours)
    record_property("cp_sat_ms", theirs)
    assert ours <= LIMIT_MS
    assert ours < theirs


def largest_head_dim(gpu: str, cell: str, direction: str) -> int:
    sizes = range(64, 4097, 64)
    fits = [D for D in sizes if not solver.infeasible(spec_of(direction, cell, 1, D, 16, gpu))]
    assert fits == list(range(64, fits[-1] + 1, 64)), "a head size between others does not fit"
    return fits[-1]


@pytest.mark.parametrize(
    ("gpu", "cell"),
    [pytest.param(gpu, cell, marks=[] if (gpu, cell) in FAST else pytest.mark.slow) for gpu in GPUS for cell in CELLS],
)
def test_every_head_size_up_to_the_largest_fits(gpu, cell):
    largest = {direction: largest_head_dim(gpu, cell, direction) for direction in ("forward", "backward")}
    assert min(largest.values()) >= {"H100": 2048, "A100": 1664, "RTX 4090": 1536}[gpu], largest


def test_conflict_of_a_too_large_head_lists_the_limits():
    spec = spec_of("forward", "lstm", 1, 4096, 16)
    with pytest.raises(Infeasible, match="shared memory") as error:
        next(solver.tilings(spec))
    assert set(error.value.conflict) == {"units of the head", "registers", "shared memory"}
    _, units, _, shared_memory = solver.infeasible(spec).summary.split("\n")
    assert re.match("  units of the head: .* 2112, .* 4096$", units)
    assert re.match(r"  shared memory: .* 1012\.6 KiB, .* 227 KiB$", shared_memory)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_tilings_are_yielded_in_order_of_their_estimates(direction):
    spec = spec_of(direction, "lstm", 12, 64, 16)
    found = list(itertools.islice(solver.tilings(spec), 50))
    assert len(set(found)) == 50
    problem, objective = solver.pose(spec, grid=False)
    values = [tuple(map(solution.value, objective)) for solution in itertools.islice(problem.best(objective), 50)]
    assert values == sorted(values)
    first = next(problem.best(objective))
    others = {"batch": spec.batch, "spread": tiling.spread(spec, found[0])}
    assert first == {name: others[name] if name in others else getattr(found[0], name) for name in first}


@pytest.mark.parametrize("gpu", ["A100", "RTX 4090"])
def test_no_clusters_on_gpus_without_them(gpu):
    for direction, cell in itertools.product(("forward", "backward"), CELLS):
        for D in (96, 512):
            found = solver.tilings(spec_of(direction, cell, 4, D, 16, gpu))
            assert {choice.grid or choice.blocks == 1 for choice in itertools.islice(found, 20)} == {True}


def test_no_clusters_that_do_not_fit_on_a_small_gpu():
    """A cluster of 8 blocks fits on a slice of an H100 (MIG) with 16 multiprocessors, but a cluster of 16 does not."""
    part = replace(named_gpu("H100"), name="a seventh of an H100", multiprocessors=16)
    found = solver.tilings(replace(spec_of("forward", "elman", 1, 512, 8), gpu=part))
    sizes = {choice.blocks for choice in found if not choice.grid}
    assert max(sizes) == 8


@pytest.mark.parametrize(("batch", "sequences"), [(2, 2), (16, 4), (32, 6), (56, 8)])
def test_batch_is_spread_over_the_clusters_that_run_at_once(batch, sequences):
    """Seven clusters of 16 blocks run at once on an H100."""
    choice = next(solver.tilings(spec_of("forward", "lstm", 1, 768, batch)))
    assert (choice.blocks, choice.grid, choice.sequences) == (16, False, sequences)
    assert choice.batches(batch) <= 7


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_narrow_heads_are_spread_over_twice_as_many_multiprocessors(direction, cell):
    """If half of the columns are used, lanes have half as many cells. Small batches use the kernel of larger ones."""
    found = (next(solver.tilings(spec_of(direction, cell, 12, 64, batch))) for batch in (1, 4, 8, 16, 32, 64))
    assert [(choice.blocks, choice.sequences) for choice in found] == [(1, 4)] * 5 + [(1, 8)]


@pytest.mark.parametrize("cell", ["layernorm_lstm", "layernorm_gru"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_half_of_the_warps_help_if_blocks_run_in_one_wave(direction, cell):
    found = [next(solver.tilings(spec_of(direction, cell, 12, 64, batch))) for batch in (1, 16, 24, 44)]
    assert [choice.sequences for choice in found[:3]] == [2, 2, 4]
    helped = [tiling.is_helped(spec_of(direction, cell, 12, 64, 16), choice) for choice in found]
    assert helped == [choice.sequences == 2 for choice in found]


@pytest.mark.parametrize(
    ("cell", "head_dim", "dtype", "centred"),
    [
        ("layernorm_lstm", 64, torch.bfloat16, True),
        ("layernorm_lstm", 16, torch.float16, True),
        ("layernorm_lstm", 64, torch.float32, False),
        ("layernorm_lstm", 48, torch.bfloat16, False),
        ("layernorm_gru", 64, torch.bfloat16, False),
    ],
)
def test_recurrent_sums_are_centred_if_one_block_has_R_in_registers(cell, head_dim, dtype, centred):
    spec = spec_of("forward", cell, 12, head_dim, 16, dtype=dtype)
    choice = next(solver.tilings(spec))
    assert tiling.centres_weights(spec, choice) == centred
    fewer = replace(choice, register_fragments=choice.register_fragments // 2)
    assert not tiling.centres_weights(spec, fewer)


@pytest.mark.parametrize(("dtype", "sequences"), [(torch.bfloat16, 4), (torch.float32, 6)])
def test_clusters_with_one_warp_per_tile_are_spread_if_R_fits_in_registers(dtype, sequences):
    choice = next(solver.tilings(spec_of("forward", "lstm", 12, 96, 16, dtype=dtype)))
    assert (choice.sequences, choice.any_sequences) == (sequences, dtype == torch.float32)


@pytest.mark.parametrize("cell", ["lstm", "slstm"])
def test_small_blocks_of_clusters_share_multiprocessors(cell):
    """Sixteen clusters of 12 blocks of four warps run at once on an H200, two blocks on most multiprocessors."""
    choice = next(solver.tilings(spec_of("forward", cell, 2, 384, 64)))
    assert (choice.blocks, choice.warps, choice.sequences) == (12, 4, 8)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_narrow_heads_share_a_multiprocessor(direction):
    """192 blocks of 8 sequences on 132 multiprocessors take 0.36 ms, 96 blocks of 16 take 0.57 (docs/dev/log.md)."""
    choice = next(solver.tilings(spec_of(direction, "lstm", 12, 64, 128)))
    assert (choice.blocks, choice.sequences) == (1, 8)


def best_estimates(direction: str, sizes: Iterable[tuple[int, int, int]]) -> list[float]:
    """Return the cycles of the best tilings of LSTMs with these heads, head sizes and batches on an H100."""
    return [next(solver.estimates(spec_of(direction, "lstm", *size)))[0] for size in sizes]


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 12])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_no_head_size_is_slower_than_a_larger_one(direction, heads):
    """By the estimate. Heads that do not fit a cluster well use the tiling of a larger head, with padding."""
    cycles = best_estimates(direction, [(heads, D, 16) for D in range(8, 1537, 8)])
    assert cycles == sorted(cycles)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "head_dim"), [(12, 64), (1, 768)])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_no_batch_is_slower_than_a_larger_one(direction, heads, head_dim):
    cycles = best_estimates(direction, [(heads, head_dim, B) for B in (*range(1, 65), *range(66, 301, 2))])
    assert cycles == sorted(cycles)


@pytest.mark.parametrize("cell", ["slstm", "elman_relu"])
def test_R_takes_two_thirds_of_the_memory_with_tf32(cell):
    """With two splits instead of three, larger heads fit, and a step takes fewer cycles."""
    specs = [spec_of("forward", cell, 1, 256, 16, dtype=torch.float32, tf32=tf32) for tf32 in (False, True)]
    posed = [solver.pose(spec, grid=False) for spec in specs]
    exact, coarse = map(by_constrint, posed)
    assert coarse < exact
    largest, larger = (largest_head_of_float32("forward", cell, tf32) for tf32 in (False, True))
    assert larger >= min(1.15 * largest, 2112)  # 16 units on each of 132 multiprocessors
    assert coarse == by_cp_sat(posed[1])


@pytest.mark.parametrize(("direction", "cell"), [("forward", "lstm"), ("backward", "slstm")])
def test_scaled_float32_takes_as_much_memory_as_with_tf32(direction, cell):
    assert largest_head_of_float32(direction, cell, tf32=False) == largest_head_of_float32(direction, cell, tf32=True)


def largest_head_of_float32(direction: str, cell: str, tf32: bool) -> int:
    def fits(D: int) -> bool:
        return not solver.infeasible(spec_of(direction, cell, 1, D, 16, dtype=torch.float32, tf32=tf32))

    return next(filter(fits, range(2496, 63, -64)))


def test_shared_memory_is_within_the_limit_of_the_problem():
    """Kernels check `shared_bytes` against their own size."""
    for direction, cell in itertools.product(("forward", "backward"), CELLS):
        spec = spec_of(direction, cell, 1, 768, 16)
        for choice in itertools.islice(solver.tilings(spec), 20):
            assert 0 < resources.shared_bytes(spec, choice) <= spec.gpu.shared_per_block


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_warps_load_less_of_R_for_few_steps(direction):
    spec = spec_of(direction, "lstm", 1, 768, 16)
    few = replace(spec, steps=4)
    of_all, of_few = (tiling.tiles_of_warp(one, solver.best(one)) for one in (spec, few))
    assert of_few <= of_all / 4
    assert solver.cycles(spec, solver.best(few)) < 1.5 * solver.cycles(spec, solver.best(spec))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("steps", [4, 24])
def test_head_in_one_block_has_the_same_tiling_for_few_steps(direction, steps):
    spec = spec_of(direction, "lstm", 12, 64, 128)
    assert solver.best(replace(spec, steps=steps)) == solver.best(spec)
