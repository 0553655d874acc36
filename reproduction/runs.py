"""Many runs of scripts.train, of which missing ones are started and interrupted ones resumed."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import pandas
import yaml
from tqdm import tqdm

from benchmarks import ROOT
from benchmarks.results import device_folder, gpu_folder
from reproduction.result import Options
from training import checkpoint, config_checks
from training.arguments import quoted
from training.configuration import check_overrides, composed, config_groups
from training.provenance import short

OUTPUTS = ROOT / "outputs" / "reproduce"
LOG = "log.txt"


@dataclass(frozen=True)
class Run:
    """One call of scripts.train."""

    folder: Path
    overrides: tuple[str, ...]

    @property
    def finished(self) -> bool:
        return evaluation(self.folder) is not None


def folder_of_runs(
    name: str,
    options: Options,
    make: Callable[[Path], Iterable[Run]],
    trained: Callable[[Sequence[Run], Options], None] | None = None,
) -> Path:
    """Return the folder of runs to collect: options.runs, or one of this name after training `make(folder)` in it.

    `trained` trains the runs; None means scripts.train.
    """
    if options.runs is not None:
        return options.runs
    folder = OUTPUTS / (f"{name}_quick" if options.quick else name)
    (trained or train)(list(make(folder)), options)
    return folder


def check_experiment(runs: Sequence[dict], experiment: str) -> None:
    """Raise ValueError if one of the runs belongs to another experiment."""
    if others := {run["experiment"] for run in runs} - {experiment}:
        raise ValueError(f"there are runs of experiment={', '.join(sorted(others))}: expected experiment={experiment}")


def train(runs: Sequence[Run], options: Options) -> None:
    """Train the unfinished runs, `options.jobs` at a time. Failures are printed, and retried by the next call.

    Raises:
        ValueError: no run has finished, and the settings of the first cannot work.
    """
    for run in runs:
        _check_same(run, options.overrides)
    missing = [run for run in runs if not run.finished]
    if missing and len(missing) == len(runs):  # raise errors of the settings and the machine now, and not once per run
        _check_settings([*runs[0].overrides, *options.overrides])
    places: SimpleQueue[dict[str, str]] = SimpleQueue()
    for place in environments(options.jobs, _gpus(), os.environ):
        places.put(place)

    def begin(run: Run) -> str | None:
        place = places.get()
        try:
            return _train(run, options.overrides, place)
        finally:
            places.put(place)

    with (
        ThreadPoolExecutor(options.jobs) as pool,
        tqdm(total=len(runs), initial=len(runs) - len(missing), unit="run") as progress,
    ):
        futures = {pool.submit(begin, run): run for run in missing}
        try:
            for future in as_completed(futures):
                progress.update()
                progress.set_postfix_str("/".join(futures[future].folder.parts[-2:]))
                if error := future.result():
                    progress.write(f"{' '.join(futures[future].overrides)} failed: {error}")
        except BaseException:  # Ctrl-C ends the current runs; waiting ones must not start
            pool.shutdown(cancel_futures=True)
            raise


def _check_settings(overrides: Sequence[str]) -> None:
    """Raise the errors of scripts.train with these overrides that it raises before it looks at the data."""
    check_overrides(overrides, config_groups())
    config_checks.check(composed([*overrides, "run_dir=''"]))


def _check_same(run: Run, overrides: Sequence[str]) -> None:
    """Raise ValueError if the folder contains a run with other overrides. One that wrote no checkpoint is replaced."""
    if not run.finished and not checkpoint.of_run(run.folder):
        return
    called, asked = _overrides(run.folder), [*run.overrides, *overrides]
    if called and set(called) != set(asked):
        raise ValueError(
            f"{run.folder} holds a run of `{' '.join(called)}`, asked for is `{' '.join(asked)}`: "
            "move the folder away, or collect it with runs=FOLDER"
        )


def _overrides(folder: Path) -> list[str]:
    """Return the overrides of the run in a folder, without those of a single call; empty if there is no run."""
    file = folder / ".hydra" / "overrides.yaml"
    overrides = yaml.safe_load(file.read_text()) if file.exists() else []
    return [o for o in overrides if not o.startswith(("ckpt_path=", "trainer.enable_progress"))]


def environments(jobs: int, gpus: Sequence[str], ours: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the environments of `jobs` concurrent runs, each with one of the GPUs and its share of the cores."""
    if jobs == 1:
        return [dict(ours)]
    threads = str(max(1, len(os.sched_getaffinity(0)) // jobs))
    shared = {"OMP_NUM_THREADS": threads, **ours}
    return [shared | ({"CUDA_VISIBLE_DEVICES": gpus[job % len(gpus)]} if gpus else {}) for job in range(jobs)]


def _gpus() -> list[str]:
    """Return the names of the visible GPUs as in CUDA_VISIBLE_DEVICES."""
    import torch

    number = torch.cuda.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return names[:number] if names != [""] else [str(index) for index in range(number)]


def _train(run: Run, overrides: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Run scripts.train; return the error if it fails, otherwise None."""
    run.folder.mkdir(parents=True, exist_ok=True)
    where = [f"hydra.run.dir={quoted(run.folder)}", "trainer.enable_progress_bar=false"]
    if checkpoint.of_run(run.folder):
        where.append(f"ckpt_path={quoted(run.folder)}")
    command = [sys.executable, "-m", "scripts.train", *run.overrides, *overrides, *where]
    with (run.folder / LOG).open("w") as log:
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode
    return failure(run.folder) if code else None


def failure(folder: Path) -> str:
    """Return the reason why a run has no results."""
    # The log of scripts.train, and what it printed.
    logs = [log for log in (folder / "train.log", folder / LOG) if log.exists()]
    lines = [line for log in logs for line in log.read_text().splitlines()]
    errors = [line for line in lines if "Error" in line or line.startswith("error:")]
    return errors[-1] if errors else "it did not finish"


def runs_of(contents: list[dict]) -> list[dict]:
    """Return the runs of all files."""
    return [run for content in contents for run in content["runs"]]


def failures(runs: list[dict]) -> list[str]:
    """Return a paragraph for each error, with the runs that failed with it."""
    of_error: dict[str, list[str]] = {}
    for run in (run for run in runs if "error" in run):
        of_error.setdefault(run["error"], []).append(f"`{' '.join(run['overrides'])}`")
    return [
        f"No result, {len(called)} x, {error}: {', '.join(called[:3])}{', ...' * (len(called) > 3)}"
        for error, called in of_error.items()
    ]


def trained_by(runs: list[dict]) -> str:
    """Return the commits and devices of the runs with results."""
    made = {(run["environment"]["commit"], run["environment"]["device"]) for run in _results(runs)}
    return "; ".join(
        f"commit {short(commit) if commit else 'not known'} on {device}" for commit, device in sorted(made, key=str)
    )


def made_on(runs: list[dict]) -> str:
    """Return the folder for results of the device on which most of these runs were trained."""
    devices = Counter(run["environment"]["device"] for run in _results(runs))
    if not devices:
        return device_folder()
    device = max(sorted(devices), key=devices.get)
    return gpu_folder(device) if device.startswith("NVIDIA") else "cpu"


def _results(runs: list[dict]) -> list[dict]:
    return [run for run in runs if "environment" in run]


def evaluation(folder: Path) -> dict | None:
    """Return the evaluation of a finished run of scripts.train; None if it has not finished."""
    file = folder / "eval.json"
    return json.loads(file.read_text()) if file.exists() else None


def collect(folder: Path, add_to: Path | None = None, more: Callable[[Path], dict] = lambda run: {}) -> list[dict]:
    """Return a row for each run below `folder` that was made by `train` or `scripts.train -m`.

    A row contains the overrides of the run, and either its evaluation, seconds per step and tokens per second
    (medians), or an error. Of two runs with the same overrides, such as one that was resumed in another folder, only
    the later is kept, unless it failed and the other did not.

    Args:
        folder: the folder of the runs.
        add_to: a file with earlier rows, which come first.
        more: returns further values of a row, given the folder of the run.
    """
    found = sorted(file.parent.parent for file in folder.glob("**/.hydra/hydra.yaml"))
    if not found:
        raise FileNotFoundError(f"there are no runs of scripts.train below {folder}")
    rows = [_row(run) | more(run) for run in found]
    rows = [row for row in rows if not any(_alike(row, other) and not _replaces(row, other) for other in rows)]
    if not _results(rows):
        raise ValueError("\n".join([f"no run below {folder} has finished.", *failures(rows)]))
    kept = [old for old in _rows_of(add_to) if not any(_alike(old, new) and _replaces(new, old) for new in rows)]
    return kept + [new for new in rows if not any(_alike(old, new) for old in kept)]


def _alike(run: dict, other: dict) -> bool:
    return set(run["overrides"]) == set(other["overrides"])


def _replaces(new: dict, old: dict) -> bool:
    return "error" not in new or "error" in old


def _rows_of(file: Path | None) -> list[dict]:
    if file is None:
        return []
    content = json.loads(file.read_text())
    if "runs" not in content or "suite" in content:
        raise ValueError(f"{file} holds no training runs to add to: expected what scripts.reproduce has written")
    return content["runs"]


def _row(folder: Path) -> dict:
    choices = yaml.safe_load((folder / ".hydra" / "hydra.yaml").read_text())["hydra"]["runtime"]["choices"]
    row = {key: choices[key] for key in ("experiment", "data", "model")} | {"overrides": _overrides(folder)}
    result = evaluation(folder)
    if result is None:
        return row | {"error": failure(folder)}
    config = result.pop("config")
    row["data"] = result.get("task", row["data"])
    together = config["data"]["batch_size"] * result["devices"] * config["trainer"]["accumulate_grad_batches"]
    row |= {"seed": config["seed"], "batch_size": config["global_batch_size"] or together}
    row["num_heads"] = config["model"]["num_heads"]
    found = {name: logged(folder, name) for name in ("step_time", "tokens_per_second")}
    return row | {name: None if of_run.empty else of_run.median() for name, of_run in found.items()} | result


def tokens(run: dict) -> float:
    """Return the number of training tokens of a run."""
    return run["step"] * run["step_time"] * run["tokens_per_second"]


def speed(run: dict) -> float:
    """Return the tokens per second and device of a run."""
    return run["tokens_per_second"] / run["devices"]


def logged(folder: Path, name: str) -> pandas.Series:
    """Return the values that a run has logged as train/<name>, by step; empty without a metrics.csv."""
    file, column = folder / "metrics.csv", f"train/{name}"
    table = pandas.read_csv(file, index_col="step") if file.exists() else pandas.DataFrame()
    return table[column].dropna() if column in table else pandas.Series(dtype=float)
