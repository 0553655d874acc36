"""Backend `cuda_fused` without a GPU: reasons for unsupported problems, and decisions before a launch."""

import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flashrnn import Cell, get_cell
from flashrnn.cuda import available
from flashrnn.cuda.resident import backend
from flashrnn.cuda.resident.backend import CudaFused
from flashrnn.gpu import named_gpu
from flashrnn.problem import Problem

CUDA, H100 = torch.device("cuda"), named_gpu("H100")
PROBLEM = Problem(get_cell("lstm"), 12, 64, torch.bfloat16, CUDA, True, False, H100)


def reason(**changes) -> str | None:
    return CudaFused().unsupported_reason(PROBLEM._replace(**changes))


def test_supported_problem():
    assert reason() is None
    assert reason(dtype=torch.float16, head_dim=22, heads=1) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"device": torch.device("cpu")}, "it runs on CUDA GPUs, not on cpu"),
        ({"head_dim": 63}, "head sizes must be even, got 63"),
        ({"dtype": torch.float64}, "it computes in bfloat16, float16 and float32, not in torch.float64"),
    ],
    ids=["device", "head size", "dtype"],
)
def test_reasons_for_unsupported_problems(changes, expected):
    assert reason(**changes) == expected


@pytest.mark.parametrize("missing", ["cuda", "cuda.core", "cuda.bindings"])
def test_missing_packages_are_a_reason(monkeypatch, missing):
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{missing}.")]:
        monkeypatch.delitem(sys.modules, name)
    if missing == "cuda":
        monkeypatch.setitem(sys.modules, "cuda", None)  # imports of it fail
    else:
        find_spec = available.find_spec
        monkeypatch.setattr(available, "find_spec", lambda name: None if name == missing else find_spec(name))
    assert "pip install '.[cuda]'" in reason()


def test_old_gpu_is_a_reason():
    v100 = replace(named_gpu("A100"), name="V100", capability=(7, 0))
    assert re.search(r"8\.0.* V100 .*7\.0", reason(assumed_gpu=v100))


@pytest.mark.parametrize("training", [False, True])
def test_cell_without_a_scalar_graph_is_not_supported(training):
    cell = Cell("sorted", lambda g, h: torch.lgamma(g + h), ("h",))
    assert re.search(r"'sorted' .*aten\.lgamma\.default", reason(cell=cell, training=training))


def test_reason_of_a_too_large_head_lists_the_limits():
    lines = reason(head_dim=4096).split("\n")
    assert lines[0].startswith("forward ")
    assert any(re.match(r"  shared memory: .* KiB, .* 227 KiB", line) for line in lines[1:])
    assert all(line.startswith("  ") for line in lines[1:])


TOO_WIDE = SimpleNamespace(summary="too wide")


def test_backward_must_fit_only_in_training(monkeypatch):
    monkeypatch.setattr(backend.solver, "infeasible", lambda spec: TOO_WIDE if spec.direction == "backward" else None)
    assert re.fullmatch("backward .*: too wide", reason())
    assert reason(training=False) is None


@pytest.mark.parametrize(("steps", "about"), [(1, 4), (8, 4), (9, 24), (32, 24), (33, 0), (1024, 0)])
def test_short_sequences_have_their_own_kernels(monkeypatch, steps, about):
    asked = []
    loaded = SimpleNamespace(at_once=1000, waves=lambda groups: [(0, groups)], bind=lambda **_: None)
    monkeypatch.setattr(backend, "device_gpu", lambda index: H100)
    monkeypatch.setattr(backend, "load", lambda *_: loaded)

    def choose(spec):
        asked.append(spec.steps)
        return SimpleNamespace(), next(backend.solver.tilings(spec))

    shape = torch.Size((16, steps, 1, 64))
    backend._plan(choose, "forward", PROBLEM.cell, shape, False, torch.bfloat16, backend.Variant(), 0)
    assert asked == [about]
