"""Sweeps that are restarted in their folder: finished jobs are skipped, others resumed, and a table lists all."""

import csv
from pathlib import Path

import pytest

from scripts.train import train
from training import sweep


@pytest.fixture(autouse=True)
def _no_jobs_before(monkeypatch):
    monkeypatch.setattr(sweep, "_rows", [])


def jobs(tiny_config, *more):
    configs = [tiny_config("parity", f"seed={seed}", *more, run=f"seed_{seed}") for seed in (0, 1)]
    for number, config in enumerate(configs):
        config.overrides = [f"seed={number}", "val_every=4"]
    return configs


def folder(config):
    """Return the folder of the sweep."""
    return Path(config.run_dir).parent


@pytest.mark.slow
def test_sweep_is_resumed_in_its_folder(tiny_config, capsys):
    first, second = jobs(tiny_config, "schedule.total_steps=20")
    sweep.train_job(train, first, folder(first))
    second.trainer.max_steps = 4
    train(second)
    file = Path(second.run_dir, "eval.json")
    file.unlink()  # as if interrupted
    again, going_on = jobs(tiny_config, "schedule.total_steps=20")
    sweep._rows.clear()
    sweep.train_job(lambda config: pytest.fail("trained twice"), again, folder(again))
    sweep.train_job(train, going_on, folder(going_on))
    assert f"resuming from {second.run_dir}" in capsys.readouterr().out
    sweep.show()
    assert "seed_1" in capsys.readouterr().out
    table = list(csv.DictReader((file.parents[1] / "results.csv").open()))
    assert [row["job"] for row in table] == ["seed_0", "seed_1"]
    assert all(0 <= float(row["accuracy 9-12"]) <= 1 for row in table)


@pytest.mark.slow
def test_job_of_another_sweep_is_an_error(tiny_config):
    first, _ = jobs(tiny_config)
    sweep.train_job(train, first, folder(first))
    other, _ = jobs(tiny_config)
    other.overrides = ["seed=0", "model=gru"]
    with pytest.raises(FileExistsError, match="seed=0 val_every=4"):
        sweep.train_job(train, other, folder(other))


@pytest.mark.slow
def test_failed_job_has_a_row_with_its_error(tiny_config, capsys):
    first, second = jobs(tiny_config)

    def fail(config):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        sweep.train_job(fail, first, folder(first))
    sweep.train_job(train, second, folder(second))
    sweep.show()
    row, _ = csv.DictReader((Path(first.run_dir).parent / "results.csv").open())
    assert (row["accuracy 9-12"], row["error"]) == ("", "no")


@pytest.mark.parametrize(
    ("arguments", "excluded"),
    [
        (["-m", "model=elman,lstm", "optim.lr=1e-3", "seed=range(3)"], "optim.lr"),
        (["-m", "data.eval_lengths=[6,9],[6,12]", "+callbacks.x._target_=a.B"], "callbacks.x._target_"),
        (["-m", "seed=0,1", "hydra.sweep.dir=outputs/s", "--config-dir", "mine"], ""),
    ],
)
def test_folders_are_named_by_varying_overrides(arguments, excluded):
    option, added, *others = sweep.named_by_what_differs(arguments)
    assert [option, *others] == arguments
    assert added == f"hydra.job.config.override_dirname.exclude_keys=[{excluded}]"


def test_metric_of_an_evaluation():
    result = {"task": "parity", "accuracy": 0.75, "chance": 0.5, "ranges": []}
    assert sweep.metric(result, None) == 0.75
    assert sweep.metric(result, "chance") == 0.5
    assert sweep.metric({}, None) is None
    with pytest.raises(ValueError, match=r"metric=task.* accuracy, chance"):
        sweep.metric(result, "task")
