"""Candidates of tuning, and the use of stored tilings."""

from dataclasses import replace

import pytest
import torch

from flashrnn import get_cell
from flashrnn.__main__ import main
from flashrnn.cuda.resident import solver, tuned, tuning
from flashrnn.cuda.resident.kernel import compile_best
from flashrnn.cuda.resident.tuned import save_tiling, saved_tiling
from flashrnn.cuda.spec import KernelSpec, Variant
from flashrnn.gpu import named_gpu

SPEC = KernelSpec("forward", get_cell("elman"), 12, 64, 16, torch.bfloat16, named_gpu("H100"))


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHRNN_CACHE", str(tmp_path))


def other_tiling():
    """Return a tiling other than the one with the best estimate."""
    found = solver.tilings(SPEC)
    first = next(found)
    return next(choice for choice in found if choice.unit_tiles != first.unit_tiles)


def test_candidates_differ_not_only_in_their_stages():
    found = tuning.candidates(SPEC, 6)
    assert len(found) == 6
    assert found[0] == next(solver.tilings(SPEC))
    assert len({replace(choice, stages=0) for choice in found}) == 6


def test_stored_tiling_is_used_for_these_sizes_only():
    other = other_tiling()
    save_tiling(SPEC, other, 0.25)
    assert saved_tiling(SPEC) == other
    assert saved_tiling(replace(SPEC, direction="backward")) is None
    assert saved_tiling(replace(SPEC, batch=32)) is None
    assert saved_tiling(replace(SPEC, variant=Variant(tf32=True))) is None
    assert compile_best(replace(SPEC, variant=Variant(reset=True, training=True)))[1] == other


def test_stored_tiling_is_ignored_after_a_change_of_the_sources(monkeypatch):
    save_tiling(SPEC, other_tiling(), 0.25)
    monkeypatch.setattr(tuned, "sources_hash", lambda: "other")
    assert saved_tiling(SPEC) is None


@pytest.mark.parametrize("content", [b"", b"[]", b'{"tiling": {"blocks": 1}}'], ids=["empty", "list", "incomplete"])
def test_corrupt_file_is_ignored(tmp_path, content):
    save_tiling(SPEC, other_tiling(), 0.25)
    (file,) = tmp_path.glob("tuned-*")
    file.write_bytes(content)
    assert saved_tiling(SPEC) is None


@pytest.mark.parametrize(
    "change",
    [
        {"blocks": 1, "unit_tiles": 1},  # covers 16 of the units
        {"unit_tiles": 0},
        {"register_fragments": 400},
        {"sequences": 3},
        {"stages": 1000},
        {"grid": True},
        {"grid": 0},
        {"k_slices": 1.0},
        {"batch_tiles": "1"},
    ],
    ids=str,
)
def test_stored_tiling_that_violates_constraints_is_ignored(change):
    save_tiling(SPEC, replace(other_tiling(), **change), 0.25)
    assert saved_tiling(SPEC) is None


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("gpu", ["A100", "H100"])
def test_all_candidates_can_be_stored(direction, gpu):
    spec = replace(SPEC, direction=direction, gpu=named_gpu(gpu))
    for choice in tuning.candidates(spec, 4):
        save_tiling(spec, choice, 0.25)
        assert saved_tiling(spec) == choice


def test_command_without_a_gpu_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune", "--heads", "12", "--head-dim", "64", "--batch", "16"]) == 1
    expected = "error: backend cuda_fused does not support this: it runs on CUDA GPUs, not on cpu\n"
    assert capsys.readouterr().err == expected
