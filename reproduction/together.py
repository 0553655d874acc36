"""Runs of small models on GPUs with training.together: a few processes that train many models each."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from multiprocessing.queues import Queue
from pathlib import Path

import torch
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, open_dict
from tqdm import tqdm

from reproduction.runs import LOG, Run
from training.configuration import CONFIGS, with_values

AT_ONCE = 16  # number of models that a process trains at the same time


def in_processes(calls: Sequence[Callable[[], None]], number: int) -> None:
    """Make the calls in this order in `number` processes that share the GPUs. The calls must support pickling.

    Exceptions are printed, and do not stop the other calls.
    """
    context = get_context("spawn")
    gpus = context.Queue()
    for process in range(number):
        gpus.put(process % torch.cuda.device_count())
    with (
        ProcessPoolExecutor(number, context, _begin, (gpus, max(1, len(os.sched_getaffinity(0)) // number))) as pool,
        tqdm(total=len(calls), unit="task") as progress,
    ):
        for future in as_completed([pool.submit(call) for call in calls]):
            progress.update()
            if error := future.exception():
                progress.write(f"failed: {error}")


def _begin(gpus: Queue, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.cuda.set_device(gpus.get())


def train(runs: Sequence[Run], overrides: Sequence[str], drawn: dict, beyond: bool = True) -> None:
    """Train the unfinished runs on this process's GPU with training.together.train_together.

    `drawn` is its cache of data, and `beyond` whether to test lengths beyond those of training. The reason why a run
    failed is written to its log.
    """
    from training.together import train_together

    device = torch.device("cuda", torch.cuda.current_device())
    missing = [run for run in runs if not run.finished]
    for first in range(0, len(missing), AT_ONCE):
        configs = _configs(missing[first : first + AT_ONCE], overrides)
        for folder, error in train_together(configs, device, drawn, beyond).items():
            (folder / LOG).write_text(f"{error}\n")


def _configs(runs: Sequence[Run], overrides: Sequence[str]) -> dict[Path, DictConfig]:
    """Return the configs of runs by their folders, after writing the same files there as scripts.train.

    Runs that choose the same config files share a composition, which takes as long as hundreds of training steps.
    """
    alike: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        alike.setdefault(tuple(filter(_chooses_file, run.overrides)), []).append(run)
    decided = {_key(override) for override in overrides}
    configs = {}
    for files, same in alike.items():
        base, choices = _composed([*files, *overrides, "run_dir=''"])
        for run in same:
            own = [o for o in run.overrides if o not in files and _key(o) not in decided]
            configs[run.folder] = config = with_values(base, own)
            config.run_dir, config.overrides = str(run.folder), [*run.overrides, *overrides]
            record = run.folder / ".hydra"
            record.mkdir(parents=True, exist_ok=True)
            (record / "hydra.yaml").write_text(yaml.safe_dump({"hydra": {"runtime": {"choices": choices}}}))
            (record / "overrides.yaml").write_text(yaml.safe_dump([*run.overrides, *overrides]))
    return configs


def _composed(overrides: Sequence[str]) -> tuple[DictConfig, dict[str, str]]:
    """Return the config of scripts.train with these overrides, and the config files that they choose, by group."""
    with initialize_config_dir(CONFIGS, version_base="1.3"):
        config = compose("train", list(overrides), return_hydra_config=True)
    choices = dict(config.hydra.runtime.choices)
    with open_dict(config):
        del config["hydra"]
    return config, choices


def _chooses_file(override: str) -> bool:
    return Path(CONFIGS, _key(override)).is_dir()


def _key(override: str) -> str:
    return override.partition("=")[0]
