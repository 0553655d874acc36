"""Extrapolated accuracy on state-tracking tasks: parity as the paper has it, and every task with a file in configs."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from pandas import DataFrame
from pandas.api.typing import DataFrameGroupBy

import data.tasks
from reproduction.result import Options, Reproduction, Table, known, paper, save
from reproduction.runs import OUTPUTS, Run, collect, failures, made_on, train, trained_by
from training.configuration import CONFIGS

MODELS = ("transformer", "mamba", "mlstm", "elman", "gru", "lstm", "slstm")
TASKS = tuple(
    task for task in (*data.tasks.TASKS, *data.tasks.FAMILIES) if Path(CONFIGS, "data", f"{task}.yaml").is_file()
)
SEEDS = (0, 1, 2)
_NAMES = {"mlstm": "mLSTM", "gru": "GRU", "lstm": "LSTM", "slstm": "sLSTM", "nn_lstm": "nn.LSTM"}
# By experiment. mLSTM, many small operators, wins the time of compiling back, but not in the 250 steps of --quick.
COMPILED = {"parity": (), "parity_paper": ("mlstm",), "state_tracking": ("mlstm",)}
# experiment=state_tracking gives recurrent cells one layer and no MLP; these, which have no such states, keep both.
WITH_LAYERS = ("transformer", "mamba", "mlstm")
LAYERS = ("model.num_blocks=2", "model.mlp=true")
LONG_TASKS, LONG = ("a5", "s5"), ("trainer.max_steps=20000",)  # groups that are not solvable
WIDE = ("model.d_model=256", "optim.lr=2e-3")  # for these: one layer with about as many parameters as the others have
# What recurrent cells take. On even_pairs one sLSTM of three does not extrapolate with the rate of the other tasks.
RECURRENT = {**dict.fromkeys(LONG_TASKS, WIDE), "even_pairs": ("optim.lr=2e-3",)}
QUICK = ("trainer.max_steps=1000", "val_every=500")


def extrapolated(run: dict) -> float:
    """Return the accuracy at the last position for lengths uniform over all ranges of evaluation, which lie beyond
    training."""
    numbers = [high - low + 1 for low, high in (part["lengths"] for part in run["ranges"])]
    accuracies = [part["accuracy"] for part in run["ranges"]]
    return sum(n * a for n, a in zip(numbers, accuracies, strict=True)) / sum(numbers)


def measure(name: str, options: Options, experiment: str, tasks: Sequence[str], seeds: Sequence[int]) -> list[Path]:
    """Train every model on every task, or take the runs below options.runs, and save what they reached."""
    folder = options.runs
    if folder is None:
        folder = OUTPUTS / (f"{name}_quick" if options.quick else name)
        runs = [
            Run(
                folder / task / f"{seed}_{model}",
                (
                    f"experiment={experiment}",
                    f"data={task}",
                    f"model={model}",
                    f"seed={seed}",
                    *_settings(experiment, task, model, options.quick),
                ),
            )
            for seed in seeds  # outermost: what is broken off has every task
            for task in tasks
            for model in MODELS
        ]
        train(runs, options)
    several = len(tasks) > 1  # and then those that a user has added
    rows = [row for row in collect(folder, options.add_to) if row["data"] in tasks or (several and "ranges" in row)]
    if options.runs and not finished([{"runs": rows}]):
        raise ValueError(f"no run below {folder} has accuracies of {', '.join(tasks)}")
    if len({str([part["lengths"] for part in row["ranges"]]) for row in finished([{"runs": rows}])}) > 1:
        raise ValueError(f"runs below {folder} were evaluated at other lengths than others of them")
    _check_alike(finished([{"runs": rows}]))
    if several:  # nine tenths of the bytes, which only the figure of a single task shows
        for row in rows:
            row.pop("accuracy_by_length", None)
    return [save(name, options, {"runs": rows}, made_on(rows))]


def _check_alike(runs: list[dict]) -> None:
    """Raise where the mean over a model's seeds would be one over other settings, or count a seed twice."""
    first: dict[tuple, dict] = {}
    seeds = set()
    for run in runs:
        place, setting = (run["data"], run["model"]), ("parameters", "step", "batch_size", "training_lengths")
        other = first.setdefault(place, run)
        if any(run[key] != other[key] for key in setting) or (*place, run["seed"]) in seeds:
            called = " and ".join(f"`{' '.join(one['overrides'])}`" for one in (other, run))
            raise ValueError(
                f"{run['model']} on {run['data']} was trained by {called}: a row is of runs that differ in their seeds "
                "alone, so move one of them away, or give a model of your own a name, its file in configs/model"
            )
        seeds.add((*place, run["seed"]))


def _settings(experiment: str, task: str, model: str, quick: bool) -> tuple[str, ...]:
    """Return what a model takes for a task in an experiment, beside what the experiment says."""
    compiled = f"compile={str(model in COMPILED[experiment]).lower()}"
    if experiment != "state_tracking":
        return (compiled,)
    own = LAYERS if model in WITH_LAYERS else RECURRENT.get(task, ())
    return (compiled, *own, *(QUICK if quick else LONG if task in LONG_TASKS else ()))


def _parity(options: Options) -> list[Path]:
    return measure("parity", options, "parity" if options.quick else "parity_paper", ["parity"], SEEDS)


def _state_tracking(options: Options) -> list[Path]:
    return measure("state_tracking", options, "state_tracking", TASKS, SEEDS[:1] if options.quick else SEEDS)


def finished(contents: list[dict], **kept: str) -> list[dict]:
    """Return the runs that have an evaluation and these values."""
    runs = [run for content in contents for run in content["runs"]]
    return [run for run in runs if "ranges" in run and all(run[key] == value for key, value in kept.items())]


def mean_extrapolated(contents: list[dict], **kept: str) -> float | None:
    """Return the mean over the finished runs that have these values; None if there is none."""
    each = [extrapolated(run) for run in finished(contents, **kept)]
    return mean(each) if each else None


def model_name(model: str) -> str:
    """Return a model's name as papers write it."""
    return _NAMES.get(model, model.capitalize() if model in MODELS else model)


def solved(contents: list[dict], **kept: str) -> int:
    """Return how many of the finished runs that have these values made no mistake."""
    return sum(map(_without_mistake, finished(contents, **kept)))


def _without_mistake(run: dict) -> bool:
    """Return whether a run was right at every length of the evaluation."""
    return all(part["accuracy"] == 1 for part in run["ranges"])


def rounded_down(accuracy: float, digits: int = 3) -> str:
    """Return digits of an accuracy, rounded down, so that what is not all right is not shown as 1.000."""
    return f"{math.floor(accuracy * 10**digits + 1e-9) / 10**digits:.{digits}f}"


def _in_order(runs: list[dict], key: str, order: Sequence[str]) -> list[str]:
    return sorted({run[key] for run in runs}, key=lambda name: (order.index(name) if name in order else 99, name))


def _parity_table(contents: list[dict]) -> Table:
    runs = finished(contents)
    ranges = [part["lengths"] for part in runs[0]["ranges"]]
    rows = [
        ["model", "parameters", *(f"{a}-{b}" for a, b in ranges), "all lengths", "seeds without a mistake", "paper"]
    ]
    for model in _in_order(runs, "model", MODELS):
        of_model = sorted(finished(contents, model=model), key=lambda run: run["seed"])
        parts = [mean(run["ranges"][k]["accuracy"] for run in of_model) for k in range(len(ranges))]
        all_lengths = mean(map(extrapolated, of_model))
        cells = [*(rounded_down(part, 4) for part in (*parts, all_lengths)), _seeds(contents, model=model)]
        rows.append([model, f"{of_model[0]['parameters']:,}", *cells, known(paper("parity").get(model))])
    return rows


def _seeds(contents: list[dict], **kept: str) -> str:
    return f"{solved(contents, **kept)} of {len(finished(contents, **kept))}"


def _tasks_table(contents: list[dict]) -> Table:
    seeds = _by_task_and_model(contents)
    accuracy, without_mistake, number = seeds["accuracy"].mean(), seeds["solved"].sum(), seeds.size()
    cells = accuracy.map(rounded_down) + " (" + without_mistake.map(str) + "/" + number.map(str) + ")"
    cells = _arranged(cells.unstack(), contents).fillna("")
    chance = _chance(contents)
    return [
        ["task", *cells.columns, "chance"],
        *([task, *row, f"{chance[task]:.3f}"] for task, row in zip(cells.index, cells.values, strict=True)),
    ]


def _by_task_and_model(contents: list[dict]) -> DataFrameGroupBy:
    """Return what the finished runs reached, a group for each task and model with its seeds as rows."""
    runs = finished(contents)
    table = DataFrame({key: [run[key] for run in runs] for key in ("data", "model")})
    reached = {"accuracy": [extrapolated(run) for run in runs], "solved": [_without_mistake(run) for run in runs]}
    return table.assign(**reached).groupby(["data", "model"])


def _chance(contents: list[dict]) -> dict[str, float]:
    return {run["data"]: run["chance"] for run in finished(contents)}


def _arranged(table: DataFrame, contents: list[dict]) -> DataFrame:
    """Return a table of tasks by models in the order of the paper."""
    runs = finished(contents)
    return table.reindex(index=_in_order(runs, "data", TASKS), columns=_in_order(runs, "model", MODELS))


def _notes(contents: list[dict]) -> list[str]:
    """Return how the runs were trained, and which of them failed."""
    runs = finished(contents)
    by_setting: dict[tuple, list[dict]] = {}
    for run in runs:
        seeds = len({other["seed"] for other in finished(contents, data=run["data"], model=run["model"])})
        chosen = " ".join(o for o in run["overrides"] if o.startswith(("model.", "optim.")))
        setting = (run["step"], run["batch_size"], *run["training_lengths"], seeds, chosen)
        by_setting.setdefault(setting, []).append(run)
    said = "; ".join(_setting(*setting, by_setting[setting]) for setting in sorted(by_setting))
    by, sequences = trained_by(contents), runs[0]["ranges"][0]["sequences"]
    return [f"Trained for {said}. By {by}; {sequences} sequences per range and seed.", *failures(contents)]


def _setting(steps: int, batch: int, low: int, high: int, seeds: int, chosen: str, runs: list[dict]) -> str:
    """Return what was trained in this way, with overrides `chosen`: models with the same tasks together."""
    models_of: dict[str, list[str]] = {}
    for model in _in_order(runs, "model", MODELS):
        tasks = ", ".join(_in_order([run for run in runs if run["model"] == model], "data", TASKS))
        models_of.setdefault(tasks, []).append(model)
    what = "; ".join(f"{', '.join(models)} on {tasks}" for tasks, models in models_of.items())
    how = f"{steps:,} steps of {batch} sequences of {low}-{high}, {seeds} seed{'s' * (seeds > 1)}"
    return f"{how}{f', `{chosen}`' if chosen else ''} ({what})"


def _parity_notes(contents: list[dict]) -> list[str]:
    quick = (
        "This is the quick run (`--quick`: experiment=parity), which a CPU can do; the protocol of the paper "
        "(experiment=parity_paper) is 20,000 steps of 256 sequences."
    )
    return [*_notes(contents), *([quick] if contents[0]["quick"] else [])]


_GROUPED = 8  # lengths, of which a point of the figure is the mean


def _draw_parity(contents: list[dict], file: Path) -> None:
    """Draw accuracy over length, a panel per model, seeds together."""
    from matplotlib.figure import Figure

    runs = finished(contents)
    models, chance = _in_order(runs, "model", MODELS), runs[0]["chance"]
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


def _draw_tasks(contents: list[dict], file: Path) -> None:
    """Draw the accuracy of every model on every task, coloured from chance to right."""
    import numpy as np
    from matplotlib.figure import Figure

    accuracies = _arranged(_by_task_and_model(contents)["accuracy"].mean().unstack(), contents)
    chance = accuracies.index.map(_chance(contents)).to_series(accuracies.index)
    above_chance = accuracies.sub(chance, axis=0).div(1 - chance, axis=0).to_numpy()
    rows, columns = accuracies.shape
    figure = Figure(figsize=(1.1 * columns + 3, 0.5 * rows + 1.4), layout="constrained")
    learnt = ", ".join(f"{model_name(model)} {number}" for model, number in (accuracies > 0.99).sum().items())
    figure.suptitle(
        f"Accuracy beyond the lengths of training, and seeds without a mistake\nTasks above 0.99: {learnt}", fontsize=11
    )
    axes = figure.subplots()
    for i, j in np.argwhere(~np.isnan(above_chance)):
        seeds = _seeds(contents, data=accuracies.index[i], model=accuracies.columns[j])
        text = f"{rounded_down(accuracies.iat[i, j])}\n{seeds}"
        colour = "white" if above_chance[i, j] > 0.6 else "black"
        axes.text(j, i, text, ha="center", va="center", color=colour, fontsize=8)
    image = axes.imshow(above_chance, vmin=0, vmax=1, cmap="Blues", aspect="auto")
    axes.set_xticks(range(columns), labels=map(model_name, accuracies.columns))
    axes.set_yticks(range(rows), labels=[task.replace("_", " ") for task in accuracies.index])
    figure.colorbar(image, label="from chance (0) to all right (1)")
    figure.savefig(file, dpi=150)


PARITY = Reproduction(
    source="parity",
    what="Accuracy of the label at the last position, by the length of the sequence, mean over seeds, rounded down. "
    "The paper gives one number for lengths 40 to 256.",
    measure=_parity,
    table=_parity_table,
    draw=_draw_parity,
    notes=_parity_notes,
)
STATE_TRACKING = Reproduction(
    source="state_tracking",
    what="Accuracy of the last label of sequences longer than those of training, lengths uniform: mean over seeds, "
    "rounded down, and in brackets how many of them made no mistake at all. The tasks and their sources are described "
    "in `data/tasks.py`.",
    measure=_state_tracking,
    table=_tasks_table,
    draw=_draw_tasks,
    notes=_notes,
)
