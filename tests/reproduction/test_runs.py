"""Concurrent training runs: each has one of the GPUs, and its share of the cores."""

import os
import subprocess
import time
from types import SimpleNamespace

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from reproduction import runs
from reproduction.result import Options
from reproduction.runs import Run, environments, train
from training.checkpoint import LAST


@pytest.fixture
def cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))


@pytest.mark.usefixtures("cores")
def test_gpus_and_cores_are_distributed():
    jobs = environments(3, ["4", "5"], {"HOME": "/root"})
    assert [job["CUDA_VISIBLE_DEVICES"] for job in jobs] == ["4", "5", "4"]
    assert all(job["OMP_NUM_THREADS"] == "2" and job["HOME"] == "/root" for job in jobs)


@pytest.mark.usefixtures("cores")
def test_cores_are_distributed_without_a_gpu():
    assert environments(2, [], {}) == [{"OMP_NUM_THREADS": "4"}] * 2
    assert environments(20, [], {}) == [{"OMP_NUM_THREADS": "1"}] * 20


def test_environment_variable_of_threads_is_kept():
    assert environments(2, [], {"OMP_NUM_THREADS": "7"}) == [{"OMP_NUM_THREADS": "7"}] * 2


def test_single_job_uses_the_whole_machine():
    assert environments(1, ["0", "1"], {"HOME": "/root"}) == [{"HOME": "/root"}]


@pytest.mark.parametrize(
    ("visible", "names"), [(None, ["0", "1"]), ("5,7", ["5", "7"]), ("GPU-a,GPU-b", ["GPU-a", "GPU-b"])]
)
def test_only_visible_gpus_are_used(monkeypatch, visible, names):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [job["CUDA_VISIBLE_DEVICES"] for job in environments(2, runs._gpus(), os.environ)] == names


def test_concurrent_runs_use_different_gpus(tmp_path, monkeypatch):
    under_way, together = [], []

    def run(command, env, **_):
        under_way.append(env["CUDA_VISIBLE_DEVICES"])
        together.append(sorted(under_way))
        time.sleep(0.05)
        under_way.remove(env["CUDA_VISIBLE_DEVICES"])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(runs, "_gpus", lambda: ["0", "1"])
    train([Run(tmp_path / str(k), ()) for k in range(6)], Options(jobs=2))
    assert len(together) == 6
    assert ["0", "1"] in together
    assert not {("0", "0"), ("1", "1")} & set(map(tuple, together))


def test_folder_names_with_special_characters(tmp_path, monkeypatch):
    folder = tmp_path / "lr=1e-3, it's {one}"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / LAST).touch()
    commands = []

    def run(command, **_):
        commands.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    train([Run(folder, ())], Options())
    parsed = OverridesParser.create().parse_overrides(commands[0][3:])
    asked = {override.key_or_group: override.value() for override in parsed}
    assert asked["hydra.run.dir"] == str(folder)
    assert asked["ckpt_path"] == str(folder)
