"""Runs of small models on GPUs by training.together: many in each of a few processes."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from multiprocessing.queues import Queue

import torch
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, open_dict
from tqdm import tqdm

from reproduction.runs import LOG, Run
from training.configuration import CONFIGS

AT_ONCE = 16  # models of a process that train side by side


def in_processes(calls: Sequence[Callable[[], None]], number: int) -> None:
    """Make the calls, which can be pickled, in this order, in `number` processes that share the GPUs. Exceptions are
    printed, and the other calls go on."""
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


def train(runs: Sequence[Run], overrides: Sequence[str], drawn: dict) -> None:
    """Train the runs that have not finished on this process's GPU, by training.together, which keeps its data in
    `drawn`. The reason why a run failed is in its log."""
    from training.together import train_together

    device = torch.device("cuda", torch.cuda.current_device())
    missing = [run for run in runs if not run.finished]
    for first in range(0, len(missing), AT_ONCE):
        configs = {run.folder: _config(run, overrides) for run in missing[first : first + AT_ONCE]}
        for folder, error in train_together(configs, device, drawn).items():
            (folder / LOG).write_text(f"{error}\n")


def _config(run: Run, overrides: Sequence[str]) -> DictConfig:
    """Return the config of a run, after writing its overrides to its folder, as scripts.train does."""
    called = [*run.overrides, *overrides]
    with initialize_config_dir(CONFIGS, version_base="1.3"):
        config = compose("train", [*called, f"run_dir={run.folder}"], return_hydra_config=True)
    choices = dict(config.hydra.runtime.choices)
    with open_dict(config):
        del config["hydra"]
    config.overrides = called
    record = run.folder / ".hydra"
    record.mkdir(parents=True, exist_ok=True)
    (record / "hydra.yaml").write_text(yaml.safe_dump({"hydra": {"runtime": {"choices": choices}}}))
    (record / "overrides.yaml").write_text(yaml.safe_dump(called))
    return config
