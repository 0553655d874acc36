"""Processes that are forked while another thread compiles, and systems without fork."""

import multiprocessing
import os
import threading
import time

import pytest
import torch

from flashrnn import Cell, flashrnn
from flashrnn.cells import trace
from flashrnn.cpu import build
from tests import fresh
from tests.problems import random_inputs

WITHOUT = """
import os, tempfile
import torch

for name in ("register_at_fork", "getuid", "fork", "O_DIRECTORY"):
    delattr(os, name)

from flashrnn import flashrnn, get_cell
from tests.problems import random_inputs

flashrnn(*random_inputs(get_cell("lstm"), 1, 2, 1, 2), backend="vanilla")[0].sum().backward()

from pathlib import Path
from flashrnn.cache import cache_folder

def home(): raise RuntimeError("Could not determine home directory.")

os.environ.pop("FLASHRNN_CACHE"), os.environ.pop("XDG_CACHE_HOME", None)
Path.home = home
assert Path(tempfile.gettempdir()) in cache_folder().parents
"""


def test_package_runs_on_systems_without_fork_and_user_ids(tmp_path):
    ended = fresh.program(WITHOUT, folder=tmp_path, environment={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr


def _run(cell: Cell, backend: str) -> None:
    flashrnn(*random_inputs(cell, 1, 2, 1, 2, torch.float32), function=cell, backend=backend)[0].sum().backward()


@pytest.mark.parametrize(
    ("backend", "module", "part"), [("vanilla", trace, "_make_trace"), ("cpu_fused", build, "_execute")]
)
def test_child_forked_during_compilation_can_compile(monkeypatch, backend, module, part):
    scale = len(part)  # makes the cell different from all that have been compiled
    cell = Cell("of_two_processes", lambda g, h: scale * torch.tanh(g) * h, states=("h",))
    begun, make = threading.Event(), getattr(module, part)

    def slowly(*arguments):
        begun.set()
        time.sleep(0.2)  # the main thread forks in this time
        return make(*arguments)

    monkeypatch.setattr(module, part, slowly)
    thread = threading.Thread(target=_run, args=(cell, backend))
    thread.start()
    assert begun.wait(20)
    child = multiprocessing.get_context("fork").Process(target=_run, args=(cell, backend))
    child.start()
    child.join(60)
    child.kill()  # if it hangs
    thread.join()
    assert child.exitcode == 0
