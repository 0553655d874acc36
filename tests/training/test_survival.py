"""Interrupted and failing runs: kill -9, signals, damaged checkpoints, full disks, NaN, dead data workers."""

import os
import re
import resource
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from scripts.train import train
from tests import fresh
from tests.tiny_runs import SHORT, TINY, environment, evaluate, losses, run
from training import checkpoint
from training.build import build_trainer
from training.checkpoint import LAST, PREVIOUS, AtomicCheckpointIO
from training.command_line import one_line_errors
from training.launchers import environments, started_by_launcher
from training.lightning_module import TrainingModule

CONTENT = {"config": {}, "state_dict": {"w": torch.arange(1000.0)}}


@contextmanager
def endless_run(folder, *arguments):
    """A context with a running training without an end, which is killed on exit."""
    endless = ["scripts.train", *TINY["parity"], *SHORT, "trainer.max_steps=1000000", *arguments]
    command = fresh.Command(endless, folder, environment())
    try:
        yield command
    finally:
        if _of_group(command.pid):
            os.killpg(command.pid, signal.SIGKILL)


def wait_for(command, folder, file):
    """Wait until the run has written a file; return the folder of the run."""
    deadline = time.monotonic() + 120
    while not (found := list(folder.glob(f"outputs/parity/*/{file}"))):
        assert command.wait(0.01) is None, command.stderr
        assert time.monotonic() < deadline
    return Path(str(found[0]).removesuffix(file))


@pytest.mark.slow
def test_killed_run_is_resumed_exactly(tiny_config, tmp_path):
    """`ckpt_path=last` resumes with the command of the killed run, and the losses equal an uninterrupted run."""
    with endless_run(tmp_path, "experiment=parity", "trainer.deterministic=true") as killed:
        killed_run = wait_for(killed, tmp_path, f"checkpoints/{LAST}")
        os.killpg(killed.pid, signal.SIGKILL)
    step = checkpoint.load(checkpoint.find(str(killed_run)))["global_step"]
    assert set(range(step - 1)) <= losses(killed_run).keys()  # the loss of the last step may not have been written
    check_resumed_run(step, tiny_config, tmp_path)


def check_resumed_run(step, tiny_config, folder, *arguments):
    """Check that `ckpt_path=last` resumes at this step, with exactly the losses of an uninterrupted run."""
    steps = [f"trainer.max_steps={step + 6}", "schedule.total_steps=1000000"]
    resumed = run("scripts.train", "ckpt_path=last", *steps, folder=folder)
    assert resumed.returncode == 0, resumed.stderr
    (resumed_run,) = {path.parent for path in folder.glob("outputs/parity/*/eval.json")}
    whole = tiny_config("parity", *steps, "trainer.deterministic=true", *arguments, run="whole")
    train(whole)
    expected = {number: loss for number, loss in losses(Path(whole.run_dir)).items() if number >= step}
    assert len(expected) == 6
    assert losses(resumed_run) == expected


SIGNALS = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS, ids=["sigterm", "sigusr1", "ctrl_c"])
def test_signal_saves_the_current_step(number, tiny_config, tmp_path):
    """The signal is also sent to data workers, as by SLURM and terminals, during accumulation."""
    arguments = ["global_batch_size=20", "data.num_workers=1", "val_every=1000000"]
    with endless_run(tmp_path, "trainer.deterministic=true", *arguments) as ended:
        ended_run = wait_for(ended, tmp_path, "metrics.csv")
        os.killpg(ended.pid, number)
        assert ended.wait(60) == 128 + number, ended.stderr
        message = ended.stderr
    step = checkpoint.load(checkpoint.find(str(ended_run)))["global_step"]
    assert list(losses(ended_run)) == list(range(step))
    assert re.search(f"{number.name} .*step {step}.*ckpt_path={ended_run} ", message)
    assert "Traceback" not in message
    check_resumed_run(step, tiny_config, tmp_path, *arguments)


def test_slurm_job_resumes_only_from_the_given_checkpoint(tiny_config, tmp_path, monkeypatch):
    """Lightning would resume any checkpoint of earlier jobs in the working folder."""
    for name in ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "1")
    for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    monkeypatch.setenv("SLURM_NODELIST", "localhost")
    (tmp_path / "hpc_ckpt_1.ckpt").write_text("of another job")
    config = tiny_config("parity")
    result = train(config)
    assert list(losses(Path(config.run_dir))) == list(range(8))
    assert evaluate(config.run_dir) == result
    of_one_task = build_trainer(config)._accelerator_connector.cluster_environment
    assert isinstance(of_one_task, LightningEnvironment)  # starts a process per device
    for name in ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.setenv(name, "2")
    assert started_by_launcher()
    (of_srun,) = environments()
    assert not of_srun.auto_requeue
    for name, value in {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "torchrun within the job")
    of_torchrun = build_trainer(config)._accelerator_connector.cluster_environment
    assert isinstance(of_torchrun, TorchElasticEnvironment)


@pytest.mark.slow
def test_sigusr1_during_evaluation_ends_the_run(tmp_path):
    with endless_run(tmp_path, "val_every=1000000", "trainer.max_steps=3", "data.eval_batches=1000000") as ended:
        wait_for(ended, tmp_path, f"checkpoints/{LAST}")
        time.sleep(2)
        os.kill(ended.pid, signal.SIGUSR1)
        assert ended.wait(60) == -signal.SIGUSR1


@pytest.mark.slow
def test_second_ctrl_c_stops_immediately(tmp_path):
    with endless_run(tmp_path, "val_every=1000000", "global_batch_size=4000000") as ended:  # one step takes forever
        wait_for(ended, tmp_path, "config.yaml")
        time.sleep(2)
        for _ in range(2):
            os.kill(ended.pid, signal.SIGINT)
            time.sleep(0.5)
        assert ended.wait(60) == 1
        assert "Ctrl-C again" in ended.stderr


@pytest.mark.slow
def test_ctrl_c_during_evaluation_ends_the_run(tmp_path):
    with endless_run(tmp_path, "val_every=1000000", "trainer.max_steps=3", "data.eval_batches=1000000") as ended:
        wait_for(ended, tmp_path, f"checkpoints/{LAST}")
        time.sleep(2)
        os.kill(ended.pid, signal.SIGINT)
        assert ended.wait(60) == 128 + signal.SIGINT
        assert re.search("step 3.*python -m scripts.evaluate ckpt=", ended.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["trainer=h100_8", "trainer=fsdp_8"])
def test_sigterm_ends_all_processes(strategy, tmp_path):
    """They agree on a logged step and save it."""
    two = [strategy, "trainer.devices=2", "trainer.precision=32-true", "data.batch_size=2"]
    with endless_run(tmp_path, *two, "val_every=1000000", "trainer.log_every_n_steps=7") as ended:
        ended_run = wait_for(ended, tmp_path, "metrics.csv")
        os.kill(ended.pid, signal.SIGTERM)
        assert ended.wait(60) == 128 + signal.SIGTERM
        deadline = time.monotonic() + 60
        while _of_group(ended.pid):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert checkpoint.load(checkpoint.find(str(ended_run)))["global_step"] % 7 == 0


def _of_group(leader: int) -> bool:
    """Return whether a process of this group exists."""
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    return True


def test_newest_intact_checkpoint_is_used(tmp_path, capsys):
    folder = tmp_path / "run" / "checkpoints"
    for step in (1, 2):
        AtomicCheckpointIO().save_checkpoint({**CONTENT, "global_step": step}, folder / LAST)
    assert checkpoint.load(checkpoint.find(str(tmp_path / "run")))["global_step"] == 2
    folder.joinpath(LAST).write_bytes(folder.joinpath(LAST).read_bytes()[:-1000])
    assert checkpoint.find(str(tmp_path / "run")).name == PREVIOUS
    assert LAST in capsys.readouterr().err
    folder.joinpath(PREVIOUS).write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "run")):
        checkpoint.find(str(tmp_path / "run"))


def test_full_disk_keeps_the_last_checkpoint(tmp_path):
    file = tmp_path / LAST
    AtomicCheckpointIO().save_checkpoint(CONTENT, file)
    larger = {**CONTENT, "state_dict": {"w": torch.zeros(100_000)}}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"last\.ckpt .*\(.*\).*disk"):
            AtomicCheckpointIO().save_checkpoint(larger, file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == [LAST]
    assert torch.equal(checkpoint.load(file)["state_dict"]["w"], CONTENT["state_dict"]["w"])


def test_error_message_contains_the_checkpoint_to_resume(tiny_config, capsys):
    config = tiny_config(
        "parity", "optim.lr=1e20", "schedule.warmup_steps=7", "trainer.gradient_clip_val=null", "val_every=1"
    )
    with pytest.raises(FloatingPointError):
        train(config)
    assert f"ckpt_path={config.run_dir} " in capsys.readouterr().err
    train(tiny_config("parity", run="next"))  # as in a sweep; signal handlers are restored afterwards
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_error_after_the_last_step_contains_the_evaluation_command(tiny_config, capsys, monkeypatch):
    def fail(*_):
        raise KeyError("a fault of the evaluation")

    monkeypatch.setattr(TrainingModule, "test_step", fail)
    config = tiny_config("parity")
    with pytest.raises(KeyError):
        train(config)
    assert f"python -m scripts.evaluate ckpt={config.run_dir} " in capsys.readouterr().err


class Dying(torch.utils.data.Dataset):
    def __init__(self, way):
        self.way = way

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if self.way == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the shard is damaged")


@pytest.mark.parametrize(
    ("way", "message"), [("dies", r"error: DataLoader worker .* died"), ("raises", r"error: the shard is damaged\n")]
)
def test_failed_data_workers_cause_one_message(way, message):
    with pytest.raises(SystemExit, match=message) as end, one_line_errors():
        next(iter(torch.utils.data.DataLoader(Dying(way), num_workers=1)))
    assert len(str(end.value).splitlines()) <= 2
