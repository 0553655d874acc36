import re
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch

from flashrnn import Cell, dispatch, flashrnn, get_cell
from flashrnn.cpu import build, call
from flashrnn.dispatch import BACKENDS
from flashrnn.problem import KernelUnavailable
from tests.problems import random_inputs, results
from tests.processes import in_processes
from tests.suite import Case, problem

RUN = """
import torch
from flashrnn import flashrnn, get_cell
from tests.problems import random_inputs
from numba.core import event

with event.install_recorder("numba:compile") as compiled:
    flashrnn(*random_inputs(get_cell("elman"), 2, 3, 1, 8, torch.float32), function="elman", backend="cpu_fused")
print(len(compiled.buffer))
"""


def compilations(folder) -> int:
    """Return the number of compilations in a process with the cache `folder`."""
    command = [sys.executable, "-c", RUN]
    environment = {"FLASHRNN_CACHE": str(folder), "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
def test_compiled_code_is_cached_and_replaced_if_damaged(tmp_path):
    assert compilations(tmp_path) > 0
    assert compilations(tmp_path) == 0
    damaged = list(tmp_path.rglob("cpu-cell-*.nb?"))
    assert damaged
    for kept in damaged:
        kept.write_bytes(kept.read_bytes()[:20])
    assert compilations(tmp_path) > 0


def test_compilation_works_without_a_writable_cache(tmp_path):
    module = ModuleType("of_a_full_disk")
    module.CACHE = True
    code = compile("if CACHE: raise OSError(28, 'No space left on device')\ndone = True", "of_a_full_disk", "exec")
    with pytest.warns(RuntimeWarning, match=rf"{re.escape(str(tmp_path))} \(No space left"):
        build._execute(code, module, tmp_path / "of_a_full_disk.py")
    assert module.done


def test_one_of_several_threads_compiles(monkeypatch):
    cell, executed, execute = Cell("mine", lambda g, h: torch.tanh(g) - h, states=("h",)), [], build._execute

    def record(code, module, path):
        executed.append(path)
        execute(code, module, path)

    monkeypatch.setattr(build, "_execute", record)
    with ThreadPoolExecutor(4) as threads:
        steps = list(threads.map(lambda _: build.cell_step("forward", cell, 64, torch.float32), range(4)))
    assert len(executed) == 1
    assert len({step.part.address for step in steps}) == 1


@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_auto_selects_vanilla_if_numba_fails(monkeypatch, passes):
    """Kernels of the backward pass are compiled before the forward pass runs, so that both use one backend."""
    execute = build._execute

    def fail(code, module, path):
        if passes in ("forward", path.name.split("-")[1]):
            raise RuntimeError("LLVM has no such target")
        execute(code, module, path)

    monkeypatch.setattr(build, "_execute", fail)
    monkeypatch.setattr(dispatch, "_FAILED", {})
    for cached in (build._compiled_once, build.time_loop, build.cell_step, call.prepare, dispatch._warn_of_fallback):
        cached.cache_clear()
    inputs = random_inputs(get_cell("elman"), 2, 3, 1, 6, torch.float32)
    with pytest.raises(KernelUnavailable, match=r"numba .*LLVM has no such target"):
        flashrnn(*inputs, function="elman", backend="cpu_fused")
    with pytest.warns(RuntimeWarning, match=r"'cpu_fused' .*LLVM has no such target"):
        found = results(flashrnn, inputs, function="elman")
    expected = results(flashrnn, inputs, function="elman", backend="vanilla")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_results_are_the_same_without_private_interfaces_of_numba(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHRNN_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "flashrnn.cpu._numba_private", None)
    made = build._shared, build._compiled_once, build.time_loop, build.matrix_product, build.cell_step, call.prepare
    for cached in made:
        cached.cache_clear()
    inputs = random_inputs(get_cell("elman"), 2, 3, 1, 6, torch.float64)
    found, expected = (results(flashrnn, inputs, function="elman", backend=name) for name in ("cpu_fused", "vanilla"))
    assert build._shared(torch.float64, "loop").Kernel is None
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=name)
    for cached in made:
        cached.cache_clear()


def test_tile_widths_are_whole_vectors_with_little_padding():
    for head_dim in range(1, 3000):
        width, rows, chunk, stride, row = build.tile(head_dim)
        assert width % 16 == 0
        assert head_dim <= width <= max(head_dim + 15, 1.5 * head_dim)
        assert row >= width
        assert stride >= chunk * width >= rows * width


def reason(**changes) -> str | None:
    (backend,) = (b for b in BACKENDS if b.name == "cpu_fused")
    return backend.unsupported_reason(
        problem(backend.name, Case(), torch.float32, torch.device("cpu"))._replace(**changes)
    )


def test_reasons_for_unsupported_problems(monkeypatch):
    assert reason() is None
    assert "cuda" in reason(device=torch.device("cuda:0"))
    assert re.search(r"bfloat16, float32 and float64.* torch\.float16", reason(dtype=torch.float16))
    assert reason(head_dim=4096) is None
    assert reason(dtype=torch.bfloat16, head_dim=768) is None
    assert "768" in reason(dtype=torch.bfloat16, head_dim=769)
    monkeypatch.setattr("flashrnn.cpu.backend._installed", lambda: False)
    assert "pip install numba" in reason()


def test_slow_call_without_numba_causes_a_warning(monkeypatch):
    monkeypatch.setattr("flashrnn.cpu.backend._installed", lambda: False)
    for cached in (dispatch._refusal, dispatch._choose, dispatch._warn_of_missing_numba):
        cached.cache_clear()
    inputs = random_inputs(get_cell("gru"), 2, 3, 1, 6, torch.float32)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for backend in ("vanilla", "auto", "auto"):
            flashrnn(*inputs, function="gru", backend=backend)
    (warning,) = seen
    assert "pip install numba" in str(warning.message)
    for cached in (dispatch._refusal, dispatch._choose):
        cached.cache_clear()


@pytest.mark.parametrize("backend", ["auto", "cpu_fused"])
def test_requested_states_without_gradients_are_correct(backend):
    inputs = random_inputs(get_cell("lstm"), 3, 5, 2, 8, torch.float32)
    with torch.no_grad():
        _, last, states = flashrnn(*inputs, function="lstm", backend=backend, return_states=True)
    torch.testing.assert_close(torch.stack(states)[:, :, -1], last)


def test_one_of_several_processes_compiles_and_the_others_load(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHRNN_CACHE", str(tmp_path / "cache"))

    def execute(code, module, path):
        stored = path.parent / "__pycache__" / f"{path.stem}.nbi"
        with (tmp_path / "log").open("a") as log:
            log.write("loaded\n" if stored.exists() else "compiled\n")
        time.sleep(0.2)
        stored.parent.mkdir(exist_ok=True)
        stored.touch()
        module.kernel = SimpleNamespace(address=0)

    monkeypatch.setattr(build, "_execute", execute)
    run = partial(build._compiled_once.__wrapped__, "test", torch.float32, "")
    assert in_processes(4, run) == [0] * 4
    assert sorted((tmp_path / "log").read_text().split()) == ["compiled"] + ["loaded"] * 3
