"""Batch buckets: six kernels for all batch sizes, and their estimated slowdown."""

import json
from dataclasses import replace

import pytest
import torch

from flashrnn import get_cell
from flashrnn.cuda import buckets
from flashrnn.cuda.buckets import FEW, LARGEST, SLOWEST, bucket
from flashrnn.cuda.resident import kernel
from flashrnn.cuda.resident import solver as resident
from flashrnn.cuda.resident.source import prelude
from flashrnn.cuda.resident.tuned import save_tiling
from flashrnn.cuda.spec import KernelSpec, Variant
from flashrnn.cuda.streaming import tiling as streaming
from flashrnn.gpu import named_gpu

H100 = named_gpu("H100")
LSTM, GRU, LAYERNORM_GRU, LAYERNORM_LSTM = map(get_cell, ("lstm", "gru", "layernorm_gru", "layernorm_lstm"))
SOME = (1, 3, 16, 32, 36, 64, 80, 200)


def spec_of(direction, cell, heads, head_dim, batch=1) -> KernelSpec:
    return KernelSpec(direction, cell, heads, head_dim, batch, torch.bfloat16, H100)


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHRNN_CACHE", str(tmp_path))
    buckets._ranges.cache_clear()
    yield
    buckets._ranges.cache_clear()


@pytest.mark.parametrize(
    ("solver", "direction", "cell", "heads", "head_dim", "slowest"),
    [
        pytest.param(resident.SOLVER, "backward", LSTM, 12, 64, 1.02, marks=pytest.mark.slow),
        (resident.SOLVER, "forward", LSTM, 1, 768, 1.02),
        pytest.param(resident.SOLVER, "backward", LSTM, 1, 768, 1.02, marks=pytest.mark.slow),
        pytest.param(resident.SOLVER, "forward", GRU, 3, 256, 1.02, marks=pytest.mark.slow),
        (resident.SOLVER, "backward", LSTM, 4, 192, 1.02),
        (resident.SOLVER, "forward", LSTM, 12, 152, 1.08),  # argument, and smaller sum of slowdowns
        (resident.SOLVER, "forward", LAYERNORM_GRU, 3, 256, SLOWEST),  # compile-time number of sequences
        (resident.SOLVER, "forward", LAYERNORM_GRU, 2, 384, SLOWEST),  # argument: six would be slower
        pytest.param(resident.SOLVER, "backward", LAYERNORM_GRU, 2, 384, SLOWEST, marks=pytest.mark.slow),
        (streaming.SOLVER, "backward", LSTM, 1, 4096, 1.02),
    ],
    ids=[
        "lstm 12 x 64",
        "lstm 1 x 768, forward",
        "lstm 1 x 768, backward",
        "gru 3 x 256",
        "lstm 4 x 192",
        "lstm 12 x 152",
        "layernorm_gru",
        "any sequences, forward",
        "any sequences, backward",
        "streaming",
    ],
)
def test_six_kernels_are_nearly_as_fast_for_all_batch_sizes(solver, direction, cell, heads, head_dim, slowest):
    spec = spec_of(direction, cell, heads, head_dim)
    assert number_of_kernels(spec, solver, slowest) <= FEW


def number_of_kernels(spec: KernelSpec, solver: buckets.Solver, slowest: float) -> int:
    """Return the number of kernels for all batch sizes; check that none is slower than `slowest` by the estimate."""
    serving = {batch: bucket(replace(spec, batch=batch), solver) for batch in range(1, LARGEST + 1)}
    for batch in SOME:
        here = replace(spec, batch=batch)
        ratio = solver.cycles(here, solver.best(serving[batch])) / solver.cycles(here, solver.best(here))
        assert ratio <= slowest, batch
    return len({(one.batch, one.any_sequences) for one in serving.values()})


def test_six_kernels_suffice_even_if_each_batch_size_has_another_tiling():
    other = buckets.Solver((), best=lambda spec: spec.batch, cycles=lambda spec, batch: 100 + abs(spec.batch - batch))
    assert len({kernel for _, kernel in buckets.find(spec_of("forward", LSTM, 1, 64), other)}) == FEW


HARD = (  # the cases out of 1,976 that once needed seven or eight kernels
    *(
        (resident.SOLVER, "backward", "elman", heads, size, torch.bfloat16, 0)
        for heads, size in ((2, 384), (4, 576), (4, 254))
    ),
    (resident.SOLVER, "backward", "elman_relu", 2, 384, torch.bfloat16, 0),
    *(
        (resident.SOLVER, "backward", "elman", heads, size, "tf32", 0)
        for heads, size in ((4, 192), (4, 184), (1, 1026))
    ),
    (resident.SOLVER, "forward", "lstm", 4, 192, torch.bfloat16, 4),
    (resident.SOLVER, "backward", "elman", 4, 192, torch.bfloat16, 4),
    (resident.SOLVER, "backward", "elman", 2, 384, torch.bfloat16, 24),
    (resident.SOLVER, "backward", "gru", 4, 192, torch.bfloat16, 24),
    (streaming.SOLVER, "forward", "lstm", 1, 768, torch.float32, 0),
    *((streaming.SOLVER, "backward", "lstm", 1, size, torch.float32, 0) for size in (918, 1024, 1026)),
)


@pytest.mark.slow
@pytest.mark.parametrize(("solver", "direction", "cell", "heads", "head_dim", "dtype", "steps"), HARD)
def test_six_kernels_suffice_for_hard_cases(solver, direction, cell, heads, head_dim, dtype, steps):
    of_dtype = (torch.float32, H100, Variant(tf32=True)) if dtype == "tf32" else (dtype, H100)
    spec = KernelSpec(direction, get_cell(cell), heads, head_dim, 1, *of_dtype)
    assert number_of_kernels(replace(spec, steps=steps), solver, 1.15) <= FEW


def test_one_cluster_kernel_runs_different_numbers_of_sequences():
    spec = spec_of("forward", LSTM, 1, 768)
    tilings = {batch: resident.likely_tiling(replace(spec, batch=batch)) for batch in (2, 16, 30)}
    assert {batch: one.sequences for batch, one in tilings.items()} == {2: 2, 16: 4, 30: 6}
    assert len({prelude(replace(spec, batch=batch), one, 0) for batch, one in tilings.items()}) == 1


def test_kernel_with_reductions_runs_any_number_of_sequences_if_six_are_slower():
    spec = spec_of("backward", LAYERNORM_GRU, 4, 192)
    tilings = {batch: resident.likely_tiling(replace(spec, batch=batch)) for batch in (9, 18)}
    assert {batch: one.sequences for batch, one in tilings.items()} == {9: 4, 18: 6}
    assert len({prelude(replace(spec, batch=batch), one, 0) for batch, one in tilings.items()}) == 1
    assert not resident.best(replace(spec, batch=9)).any_sequences


def test_estimate_for_the_own_batch_equals_the_solvers():
    gru, lstm = spec_of("backward", GRU, 4, 192), spec_of("forward", LAYERNORM_LSTM, 2, 384)
    for spec in (replace(gru, batch=3), replace(gru, batch=40), lstm, replace(lstm, any_sequences=True)):
        cycles, tiling = next(resident.estimates(spec))
        assert resident.cycles(replace(spec, any_sequences=False), tiling) == cycles


def test_larger_batches_use_the_fastest_bucket():
    spec = spec_of("forward", LSTM, 1, 768)
    batches = {batch for _, (batch, _) in buckets._ranges(spec, resident.SOLVER)}
    large = replace(spec, batch=1000)
    cycles = {one: resident.SOLVER.cycles(large, resident.best(replace(spec, batch=one))) for one in batches}
    assert cycles[bucket(large, resident.SOLVER).batch] == min(cycles.values())


def test_buckets_are_cached_for_later_processes(monkeypatch):
    spec = spec_of("forward", LSTM, 2, 32, 20)
    found = bucket(spec, resident.SOLVER)
    buckets._ranges.cache_clear()
    monkeypatch.setattr(buckets, "find", lambda *_: pytest.fail("found again"))
    assert bucket(spec, resident.SOLVER) == found
    named_by_its_driver = replace(spec, gpu=replace(H100, name="NVIDIA H100 80GB HBM3"))
    assert bucket(named_by_its_driver, resident.SOLVER).batch == found.batch


RANGES = ("[]", "[[1, 8]]", "[[2, [8, false]]]", "[[1, [8.5, false]]]", "[[1, [8, 0]]]")


@pytest.mark.parametrize("content", ["", "[]", *(f'{{"ranges": {ranges}}}' for ranges in RANGES)])
def test_invalid_file_of_buckets_is_replaced(tmp_path, content):
    spec = spec_of("forward", LSTM, 2, 32, 20)
    found = bucket(spec, resident.SOLVER)
    (file,) = tmp_path.glob("buckets-*.json")
    file.write_text(content)
    buckets._ranges.cache_clear()
    assert bucket(spec, resident.SOLVER) == found
    assert json.loads(file.read_text())["ranges"]


def test_batch_sizes_of_a_bucket_share_a_kernel_unless_tuned(monkeypatch):
    compiled = []

    def compile_tiling(spec, tiling):
        compiled.append(tiling)
        return type("Binary", (), {"spilled": 0})

    monkeypatch.setattr(kernel, "compile_tiling", compile_tiling)
    kernel._compile_bucket.cache_clear()
    spec = spec_of("forward", LSTM, 1, 768)
    (first, _), (second, _), *_ = buckets._ranges(spec, resident.SOLVER)
    for batch in range(first, second):
        kernel.compile_best(replace(spec, batch=batch))
    assert len(compiled) == 1
    other = list(zip(range(5), resident.tilings(replace(spec, batch=24)), strict=False))[4][1]
    save_tiling(replace(spec, batch=24), other, 1.0)
    assert kernel.compile_best(replace(spec, batch=24))[1] == other
    assert kernel.compile_best(replace(spec, batch=25))[1] != other
    kernel._compile_bucket.cache_clear()
