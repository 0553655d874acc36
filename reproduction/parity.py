"""Parity as the paper has it: accuracy by the length of the sequence."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from reproduction.accuracy import (
    MODELS,
    SEEDS,
    check_alike,
    collected,
    extrapolated,
    finished,
    in_order,
    mean_extrapolated,
    model_name,
    rounded_down,
    seeds_without_mistake,
    training_notes,
)
from reproduction.result import Options, Reproduction, Table, known, paper, save
from reproduction.runs import OUTPUTS, Run, made_on, train


def _measure(options: Options) -> list[Path]:
    """Train every model with every seed, or take the runs below options.runs, and save what they reached."""
    folder = options.runs
    if folder is None:
        folder = OUTPUTS / ("parity_quick" if options.quick else "parity")
        train([_run(folder, model, seed, options.quick) for seed in SEEDS for model in MODELS], options)
    rows = collected(options, folder, ["parity"], "parity")
    check_alike(finished([{"runs": rows}]))
    return [save("parity", options, {"runs": rows}, made_on(rows))]


def _run(folder: Path, model: str, seed: int, quick: bool) -> Run:
    # mLSTM, many small operators, wins the time of compiling back, but not in the 250 steps of --quick.
    compiled = str(model == "mlstm" and not quick).lower()
    experiment = "parity" if quick else "parity_paper"
    overrides = (f"experiment={experiment}", "data=parity", f"model={model}", f"seed={seed}", f"compile={compiled}")
    return Run(folder / "parity" / f"{seed}_{model}", overrides)


def _table(contents: list[dict]) -> Table:
    runs = finished(contents)
    ranges = [part["lengths"] for part in runs[0]["ranges"]]
    rows = [
        ["model", "parameters", *(f"{a}-{b}" for a, b in ranges), "all lengths", "seeds without a mistake", "paper"]
    ]
    for model in in_order(runs, "model", MODELS):
        of_model = sorted(finished(contents, model=model), key=lambda run: run["seed"])
        parts = [mean(run["ranges"][k]["accuracy"] for run in of_model) for k in range(len(ranges))]
        all_lengths = mean(map(extrapolated, of_model))
        cells = [
            *(rounded_down(part, 4) for part in (*parts, all_lengths)),
            seeds_without_mistake(contents, model=model),
        ]
        rows.append([model, f"{of_model[0]['parameters']:,}", *cells, known(paper("parity").get(model))])
    return rows


def _notes(contents: list[dict]) -> list[str]:
    quick = (
        "This is the quick run (`--quick`: experiment=parity), which a CPU can do; the protocol of the paper "
        "(experiment=parity_paper) is 20,000 steps of 256 sequences."
    )
    return [*training_notes(contents), *([quick] if contents[0]["quick"] else [])]


_GROUPED = 8  # lengths, of which a point of the figure is the mean


def _draw(contents: list[dict], file: Path) -> None:
    """Draw accuracy over length, a panel per model, seeds together."""
    from matplotlib.figure import Figure

    runs = finished(contents)
    models, chance = in_order(runs, "model", MODELS), runs[0]["chance"]
    columns = min(4, len(models))
    figure = Figure(figsize=(2.7 * columns, 2.4 * math.ceil(len(models) / columns) + 0.5), layout="constrained")
    figure.suptitle(_extrapolates(contents, models))
    panels = figure.subplots(math.ceil(len(models) / columns), columns, sharex=True, sharey=True, squeeze=False).flat
    for model, axes in zip(models, panels, strict=False):
        points = _grouped(finished(contents, model=model))
        accuracy = mean_extrapolated(contents, model=model)
        axes.axvspan(*runs[0]["training_lengths"], color="tab:green", alpha=0.15)
        axes.axhline(chance, color="gray", linestyle=":")
        axes.plot(*zip(*points, strict=True), color="tab:blue" if accuracy > 0.9 else "tab:gray")
        axes.set_title(f"{model_name(model)}: {rounded_down(accuracy)}, paper {known(paper('parity').get(model))}")
        axes.title.set_fontsize(9)
        axes.set(ylim=(min(0.3, chance - 0.1), 1.05), xlim=(0, None))
    for axes in list(panels):  # those that no model is left for
        axes.set_axis_off()
    figure.supxlabel("length of the sequence (green: seen in training; dotted: chance)", fontsize=9)
    figure.supylabel("accuracy at the last position", fontsize=9)
    figure.savefig(file, dpi=150)


def _extrapolates(contents: list[dict], models: Sequence[str]) -> str:
    """Return what the figure shows, as a title."""
    right = [model_name(m) for m in models if mean_extrapolated(contents, model=m) > 0.99]
    low, high = (f(run["ranges"][k]["lengths"][k] for run in finished(contents)) for f, k in ((min, 0), (max, -1)))
    return f"Beyond the lengths of training, at {low} to {high}: right are {', '.join(right) or 'none'}"


def _grouped(runs: list[dict]) -> list[tuple[float, float]]:
    """Return lengths and accuracies, means of groups of neighbouring lengths; a rest joins the last whole group."""
    by_length: dict[int, list[float]] = {}
    for run in runs:
        for length, accuracy in run["accuracy_by_length"].items():
            by_length.setdefault(int(length), []).append(accuracy)
    lengths = sorted(by_length)
    last = max(1, len(lengths) // _GROUPED) - 1
    groups: dict[int, list[int]] = {}
    for place, length in enumerate(lengths):
        groups.setdefault(min(place // _GROUPED, last), []).append(length)
    return [(mean(group), mean(mean(by_length[length]) for length in group)) for group in groups.values()]


PARITY = Reproduction(
    source="parity",
    what="Accuracy of the label at the last position, by the length of the sequence, mean over seeds, rounded down. "
    "The paper gives one number for lengths 40 to 256.",
    measure=_measure,
    table=_table,
    draw=_draw,
    notes=_notes,
)
