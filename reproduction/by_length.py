"""A table and a figure of the accuracy of several models on one task, by sequence length, with a panel per model."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import numpy as np
from pandas import DataFrame

from reproduction.accuracy import (
    extrapolated,
    finished,
    in_order,
    mean_extrapolated,
    model_name,
    rounded_down,
    seeds_without_mistake,
)
from reproduction.result import Table, known
from reproduction.runs import runs_of

_GROUPED = 8  # number of lengths that are averaged for a point of the figure


def table(contents: list[dict], models: Sequence[str], published: dict[str, float] | None = None) -> Table:
    """Return a table of the accuracies for each range of lengths, with published ones if there are any."""
    runs = finished(runs_of(contents))
    ranges = [part["lengths"] for part in runs[0]["ranges"]]
    beside = [] if published is None else ["paper"]
    rows = [
        ["model", "parameters", *(f"{a}-{b}" for a, b in ranges), "all lengths", "seeds without a mistake", *beside]
    ]
    for model in in_order(runs, "model", models):
        of_model = sorted(finished(runs, model=model), key=lambda run: run["seed"])
        parts = [mean(run["ranges"][k]["accuracy"] for run in of_model) for k in range(len(ranges))]
        all_lengths = mean(map(extrapolated, of_model))
        cells = [*(rounded_down(part, 4) for part in (*parts, all_lengths)), seeds_without_mistake(runs, model=model)]
        beside = [] if published is None else [known(published.get(model))]
        rows.append([model, f"{of_model[0]['parameters']:,}", *cells, *beside])
    return rows


def draw(contents: list[dict], file: Path, models: Sequence[str], published: dict[str, float] | None = None) -> None:
    """Draw accuracy against length, with a panel per model that contains all seeds."""
    from matplotlib.figure import Figure

    runs = finished(runs_of(contents))
    models, chance = in_order(runs, "model", models), runs[0]["chance"]
    columns = min(4, len(models))
    figure = Figure(figsize=(2.7 * columns, 2.4 * math.ceil(len(models) / columns) + 0.5), layout="constrained")
    figure.suptitle(_extrapolates(runs, models))
    panels = figure.subplots(math.ceil(len(models) / columns), columns, sharex=True, sharey=True, squeeze=False).flat
    curves = {model: _grouped(finished(runs, model=model)) for model in models}
    lowest = min(0.3, chance - 0.1, *(points["accuracy"].min() - 0.03 for points in curves.values()))
    for (model, points), axes in zip(curves.items(), panels, strict=False):
        accuracy = mean_extrapolated(runs, model=model)
        axes.axvspan(*runs[0]["training_lengths"], color="tab:green", alpha=0.15)
        axes.axhline(chance, color="gray", linestyle=":")
        axes.plot("length", "accuracy", data=points, color="tab:blue" if accuracy > 0.9 else "tab:gray")
        beside = "" if published is None else f", paper {known(published.get(model))}"
        axes.set_title(f"{model_name(model)}: {rounded_down(accuracy)}{beside}")
        axes.title.set_fontsize(9)
        axes.set(ylim=(max(lowest, -0.05), 1.05), xlim=(0, None))
    for axes in list(panels):  # panels without a model
        axes.set_axis_off()
    figure.supxlabel("length of the sequence (green: training lengths; dotted: chance)", fontsize=9)
    figure.supylabel("accuracy at the last position", fontsize=9)
    figure.savefig(file, dpi=150)


def _extrapolates(runs: list[dict], models: Sequence[str]) -> str:
    """Return the title: the models that extrapolate."""
    right = [model_name(m) for m in models if mean_extrapolated(runs, model=m) > 0.99]
    low, high = (f(run["ranges"][k]["lengths"][k] for run in runs) for f, k in ((min, 0), (max, -1)))
    shortest, longest = runs[0]["training_lengths"]
    who = " and ".join(filter(None, [", ".join(right[:-1]), *right[-1:]])) or "No model"
    who = who.capitalize() if who.islower() else who
    verb = "extrapolate" if len(right) > 1 else "extrapolates"
    return f"{who} {verb} from lengths of {shortest} to {longest} to lengths of {low} to {high}"


def _grouped(runs: list[dict]) -> DataFrame:
    """Return means of `length` and `accuracy` over groups of neighbouring lengths; the last group takes the rest."""
    by_length = DataFrame([run["accuracy_by_length"] for run in runs]).mean().rename(int).sort_index()
    last = max(1, len(by_length) // _GROUPED) - 1
    groups = np.minimum(np.arange(len(by_length)) // _GROUPED, last)
    return by_length.rename_axis("length").reset_index(name="accuracy").groupby(groups).mean()
