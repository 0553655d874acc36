"""The jobs of a sweep (-m), which run in one process. Finished jobs are not repeated, and a table shows all results."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from training.arguments import parsed
from training.command_line import error_message

_rows: list[dict] = []  # one for each job that has ended in this process
_folder: Path | None = None


def named_by_what_differs(arguments: Sequence[str]) -> list[str]:
    """Add an argument to a command line with which Hydra names the folders of jobs only by the overrides that vary."""
    overrides = [override for argument in arguments if (override := parsed(argument)) is not None]
    same = [override.key_or_group for override in overrides if not override.is_sweep_override()]
    named = [key for key in same if not key.startswith("hydra.")]
    added = f"hydra.job.config.override_dirname.exclude_keys=[{','.join(named)}]"
    # Hydra does not accept overrides both before and after an option, so the new one is inserted before the others.
    place = next((k for k, argument in enumerate(arguments) if parsed(argument) is not None), len(arguments))
    return [*arguments[:place], added, *arguments[place:]]


def train_job(train: Callable[[DictConfig], dict], config: DictConfig, sweep: Path) -> dict:
    """Train one job, or continue it if the sweep in this folder was interrupted.

    Args:
        train: trains and evaluates the run of a config, and returns its evaluation.
        config: the config of the job.
        sweep: the folder of the sweep.

    Returns:
        The evaluation of the job.
    """
    from training.checkpoint import of_run

    global _folder
    check_sweep(config.trainer)
    folder, overrides = Path(config.run_dir), list(config.overrides)
    _folder = sweep
    _check_same(folder, overrides)
    file, row = folder / "eval.json", {"job": os.path.relpath(folder, sweep)}
    try:
        if file.exists():
            print(f"{folder} is done")
            result = json.loads(file.read_text())
        else:
            config.ckpt_path = str(folder) if of_run(folder) else config.ckpt_path
            result = train(config)
    except BaseException as error:
        _rows.append(row | {"error": error_message(error) or type(error).__name__})
        raise
    _rows.append(row | _numbers(result))
    return result


def metric(result: dict, name: str | None) -> float | None:
    """Return the number of an evaluation that a sweep optimises.

    Args:
        result: the evaluation.
        name: the key of the number; None means the first number.
    """
    numbers = {key: value for key, value in result.items() if isinstance(value, int | float)}
    if name is None:
        return next(iter(numbers.values()), None)
    if name not in numbers:
        raise ValueError(f"metric={name}: this evaluation has {', '.join(numbers)}")
    return numbers[name]


def check_sweep(trainer: DictConfig) -> None:
    """Raise ValueError if Lightning would start more processes, each of which would run the whole sweep."""
    import torch

    from training.launchers import started_by_launcher

    devices, on_cpu = trainer.devices, trainer.accelerator == "cpu"
    if devices in ("auto", -1, "-1"):
        devices = 1 if on_cpu else torch.accelerator.device_count()
    number = len(devices) if OmegaConf.is_config(devices) else int(devices)
    if number * trainer.num_nodes > 1 and not started_by_launcher():
        raise ValueError(
            f"trainer.devices={trainer.devices} in a sweep (-m): Lightning would start the other processes with the "
            "command of the whole sweep; start the jobs one by one, or set trainer.devices=1"
        )


def _check_same(folder: Path, overrides: list[str]) -> None:
    """Raise FileExistsError if the folder contains a job of another sweep."""
    file = folder / "config.yaml"
    if file.exists() and (before := list(OmegaConf.load(file).overrides)) != overrides:
        raise FileExistsError(f"{folder} contains the job {' '.join(before)}: set another hydra.sweep.dir=...")


def _numbers(result: dict) -> dict[str, float]:
    """Return the numbers of an evaluation that the table shows."""
    if "ranges" in result:
        return {"accuracy {}-{}".format(*part["lengths"]): part["accuracy"] for part in result["ranges"]}
    return {key: value for key, value in result.items() if isinstance(value, int | float)}


def show() -> None:
    """Print a table of the jobs that have ended, if any, and write it to results.csv in the folder of the sweep."""
    if not _rows or int(os.environ.get("RANK", 0)):
        return
    from pandas import DataFrame  # here, because --help and errors do not need it

    table = DataFrame(_rows)
    table = table[sorted(table, key="error".__eq__)]  # the column of errors is the last
    table.to_csv(_folder / "results.csv", index=False)
    print(f"\n{table.to_string(index=False, float_format='{:.4f}'.format, na_rep='')}")
    print(f"sweep: {_folder}")
