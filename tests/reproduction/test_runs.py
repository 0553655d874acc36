"""Training runs are started, resumed or skipped; concurrent ones have one of the GPUs and a share of the cores."""

import os
import re
import subprocess
import time
from types import SimpleNamespace

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException

from reproduction import runs
from reproduction.accuracy import extrapolated
from reproduction.result import Options
from reproduction.runs import LOG, Run, collect, environments, train
from tests.reproduction.finished_runs import leave_run
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


def test_runs_are_skipped_resumed_or_started(tmp_path, monkeypatch, capfd):
    commands = []

    def run(command, stdout, **_):
        commands.append(command[3:])
        stdout.write("error: no such thing\n")
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(subprocess, "run", run)
    leave_run(tmp_path / "finished")
    (tmp_path / "finished" / ".hydra" / "overrides.yaml").write_text("[name=finished, seed=1, ckpt_path=x]")
    broken_off = tmp_path / "broken_off"
    (broken_off / "checkpoints").mkdir(parents=True)
    (broken_off / "checkpoints" / "previous.ckpt").touch()  # killed after last.ckpt was moved away
    names = ("finished", "broken_off", "new")
    train([Run(tmp_path / name, (f"name={name}",)) for name in names], Options(overrides=("seed=1",)))
    assert [command[0] for command in commands] == ["name=broken_off", "name=new"]
    assert f"ckpt_path='{broken_off}'" in commands[0]
    assert not any("ckpt_path" in argument for argument in commands[1])
    assert all("seed=1" in command for command in commands)
    assert re.search("name=new .*error: no such thing", capfd.readouterr().out)


def test_run_with_other_overrides_is_an_error(tmp_path):
    leave_run(tmp_path / "0_lstm")
    with pytest.raises(ValueError, match=r"0_lstm .*`model=lstm`.*`model=lstm seed=1`"):
        train([Run(tmp_path / "0_lstm", ("model=lstm",))], Options(overrides=("seed=1",)))


def test_run_that_failed_before_its_first_checkpoint_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))
    record = tmp_path / "run" / ".hydra"
    record.mkdir(parents=True)
    record.joinpath("overrides.yaml").write_text("[name=run, data.seed=1]")
    train([Run(tmp_path / "run", ("name=run",))], Options(overrides=("data.seed=2",)))
    assert (tmp_path / "run" / LOG).exists()


@pytest.mark.parametrize("wrong", ["seeds=1", "optim.lr=fast", "trainer.accelerator=gpu"])
def test_wrong_override_starts_no_run(wrong, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    with pytest.raises((ConfigCompositionException, ValueError), match=wrong.partition("=")[0]):
        train([Run(tmp_path / "new", ("name=new",))], Options(overrides=(wrong,)))
    assert not (tmp_path / "new").exists()


def test_interrupt_starts_no_further_runs(tmp_path, monkeypatch):
    begun = []

    def run(command, **_):
        begun.append(command)
        if len(begun) == 1:
            raise KeyboardInterrupt
        time.sleep(0.2)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(KeyboardInterrupt):
        train([Run(tmp_path / str(k), ()) for k in range(20)], Options())
    assert len(begun) <= 3


@pytest.mark.slow
def test_real_run_is_collected(tmp_path):
    sizes = ("model.d_model=8", "model.num_blocks=1", "data.max_length=6", "data.eval_lengths=[6,9]")
    short = ("data.eval_batches=1", "schedule.warmup_steps=1", "trainer.max_steps=20", "trainer.accelerator=cpu")
    run = Run(tmp_path / "0_elman", ("experiment=parity", "data=s3", "model=elman", *sizes, *short))
    train([run], Options())
    assert run.finished, (run.folder / LOG).read_text()
    (row,) = collect(tmp_path)
    assert (row["experiment"], row["data"], row["model"], row["seed"], row["step"]) == ("parity", "s3", "elman", 0, 20)
    assert row["tokens_per_second"] > 0
    assert 0 <= extrapolated(row) <= 1
