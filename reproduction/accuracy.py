"""Code shared by the pages of accuracies: runs with several seeds, how they were trained, and what they reached."""

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import mean

import numpy as np

import data.tasks
from reproduction.result import Options
from reproduction.runs import collect, failures, trained_by
from training.configuration import CONFIGS

OF_FLA = ("gated_deltanet", "deltaproduct") if find_spec("fla") else ()
MODELS = ("transformer", "mamba", "mamba2", *OF_FLA, "mlstm", "elman", "gru", "lstm", "slstm")
TASKS = tuple(
    task for task in (*data.tasks.TASKS, *data.tasks.FAMILIES) if Path(CONFIGS, "data", f"{task}.yaml").is_file()
)
SEEDS = (0, 1, 2)
_LINEAR = {"mamba2": "Mamba-2", "gated_deltanet": "Gated DeltaNet", "deltaproduct": "DeltaProduct"}
_NAMES = _LINEAR | {"mlstm": "mLSTM", "gru": "GRU", "lstm": "LSTM", "slstm": "sLSTM", "nn_lstm": "nn.LSTM"}


def extrapolated(run: dict) -> float:
    """Return the accuracy at the last position, for lengths uniform over all evaluation ranges beyond training."""
    numbers = [high - low + 1 for low, high in (part["lengths"] for part in run["ranges"])]
    return float(np.average([part["accuracy"] for part in run["ranges"]], weights=numbers))


def finished(runs: list[dict], **kept: str) -> list[dict]:
    """Return the finished runs with these values."""
    return [run for run in runs if "ranges" in run and all(run[key] == value for key, value in kept.items())]


def mean_extrapolated(runs: list[dict], **kept: str) -> float | None:
    """Return the mean over the finished runs with these values; None if there is none."""
    each = [extrapolated(run) for run in finished(runs, **kept)]
    return mean(each) if each else None


def model_name(model: str) -> str:
    """Return the name of a model as it is written in papers."""
    return _NAMES.get(model, model.capitalize() if model in MODELS else model)


def solved(runs: list[dict], **kept: str) -> int:
    """Return how many of the finished runs with these values made no mistake."""
    return sum(map(without_mistake, finished(runs, **kept)))


def without_mistake(run: dict) -> bool:
    """Return whether a run made no mistake at any length of the evaluation."""
    return all(part["accuracy"] == 1 for part in run["ranges"])


def rounded_down(accuracy: float, digits: int = 3) -> str:
    """Format an accuracy, rounded down, so that it is only shown as 1.000 if there was no mistake."""
    return f"{math.floor(accuracy * 10**digits + 1e-9) / 10**digits:.{digits}f}"


def in_order(runs: list[dict], key: str, order: Sequence[str]) -> list[str]:
    return sorted({run[key] for run in runs}, key=lambda name: (order.index(name) if name in order else 99, name))


def seeds_without_mistake(runs: list[dict], **kept: str) -> str:
    return f"{solved(runs, **kept)} of {len(finished(runs, **kept))}"


def collected(options: Options, folder: Path, tasks: Sequence[str], what: str) -> list[dict]:
    """Return the rows of runs on some tasks, from a folder and from `options.add_to`.

    With several tasks, rows of all tasks are returned, because users add their own. `what` names the runs in errors.

    Raises:
        ValueError: there are no such runs, or they are not comparable.
    """
    rows = [
        row
        for row in collect(folder, options.add_to)
        if row["data"] in tasks or (len(tasks) > 1 and not {"in_distribution", "ranges"}.isdisjoint(row))
    ]
    runs = finished(rows)
    if options.runs and not runs:
        raise ValueError(f"no run below {folder} has accuracies of {what}")
    if len({str([part["lengths"] for part in run["ranges"]]) for run in runs}) > 1:
        raise ValueError(f"not all runs below {folder} were evaluated at the same lengths")
    return rows


def check_alike(runs: list[dict]) -> None:
    """Raise ValueError if runs of a model on a task differ in more than their seeds, or if a seed occurs twice."""
    first: dict[tuple, dict] = {}
    seeds = set()
    for run in runs:
        place, setting = (run["data"], run["model"]), ("parameters", "step", "batch_size", "training_lengths")
        other = first.setdefault(place, run)
        if any(run[key] != other[key] for key in setting) or (*place, run["seed"]) in seeds:
            called = " and ".join(f"`{' '.join(one['overrides'])}`" for one in (other, run))
            raise ValueError(
                f"{run['model']} on {run['data']} was trained by {called}: runs of a row may differ only in their "
                "seeds, so move one of them away, or name a model of your own by a file in configs/model"
            )
        seeds.add((*place, run["seed"]))


def training_notes(runs: list[dict]) -> list[str]:
    """Return paragraphs on how the runs were trained, and on which of them failed."""
    by_setting: dict[tuple, list[dict]] = {}
    for run in finished(runs):
        seeds = len({other["seed"] for other in finished(runs, data=run["data"], model=run["model"])})
        chosen = " ".join(o for o in run["overrides"] if o.startswith(("model.", "optim.")))
        setting = (run["step"], run["batch_size"], *run["training_lengths"], seeds, chosen)
        by_setting.setdefault(setting, []).append(run)
    said = "; ".join(_setting(*setting, by_setting[setting]) for setting in sorted(by_setting))
    by, sequences = trained_by(runs), finished(runs)[0]["ranges"][0]["sequences"]
    tf32 = all("matmul_precision=high" in run["overrides"] for run in runs)
    where = f"By {by}{', with float32 products in TF32' * tf32}; {sequences} sequences per range and seed."
    return [f"Trained for {said}. {where}", *failures(runs)]


def _setting(steps: int, batch: int, low: int, high: int, seeds: int, chosen: str, runs: list[dict]) -> str:
    """Return a sentence on the models that were trained in this way with the overrides `chosen`, grouped by tasks."""
    models_of: dict[str, list[str]] = {}
    for model in in_order(runs, "model", MODELS):
        tasks = ", ".join(in_order([run for run in runs if run["model"] == model], "data", TASKS))
        models_of.setdefault(tasks, []).append(model)
    what = "; ".join(f"{', '.join(models)} on {tasks}" for tasks, models in models_of.items())
    how = f"{steps:,} steps of {batch} sequences of {low}-{high}, {seeds} seed{'s' * (seeds > 1)}"
    return f"{how}{f', `{chosen}`' if chosen else ''} ({what})"
