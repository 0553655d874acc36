"""State tracking: every task with a config, and every model with the best settings of the same small grid."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean

import torch
from pandas import DataFrame, Series
from pandas.api.typing import DataFrameGroupBy

from benchmarks.markdown import markdown
from reproduction import together
from reproduction.accuracy import (
    MODELS,
    SEEDS,
    TASKS,
    check_alike,
    collected,
    extrapolated,
    finished,
    in_order,
    model_name,
    rounded_down,
    seeds_without_mistake,
    training_notes,
    without_mistake,
)
from reproduction.result import Options, Reproduction, Table, save
from reproduction.runs import OUTPUTS, Run, evaluation, made_on, runs_of, train

# The simplest first, because the first of equally good settings is selected.
GRID = tuple(
    (f"model.num_blocks={blocks}", f"model.mlp={mlp}", f"optim.lr={lr}")
    for blocks, mlp, lr in product((1, 2), ("false", "true"), ("5e-4", "1e-3", "2e-3", "5e-3"))
)
OPTIONS = frozenset(override for setting in GRID for override in setting)
QUICK_GRID = tuple(setting for setting in GRID if setting[2] == "optim.lr=2e-3")
SELECTION_SEED = 100  # different from the seeds that are reported
BATCH = 64
STEPS, QUICK_STEPS = 5000, 1000
LONGER = dict.fromkeys(("a5", "s5"), 10000)  # groups that are not solvable: products of few elements come first
SHORTER = 5  # factor by which the selection has fewer steps
SHARED = (f"data.batch_size={BATCH}", "data.eval_batches=16", "matmul_precision=high")
OWN = {"transformer": ("model.num_heads=4",)}  # as in language models, heads of 32; a cell has one of 128
MOST_TELLING = ("parity", "flip_flop", "s3", "a5", "group", "s5")
FITTED = 0.99  # accuracy at training lengths from which a model fits its task
REFUSED = (
    "Gated DeltaNet and DeltaProduct are missing. Their package, flash-linear-attention, does not compute their "
    "gradients on Hopper GPUs with Triton 3.4 to 3.7.0, where they would be wrong (its issue 640); PyTorch 2.11 "
    "comes with Triton 3.6."
)


def _measure(options: Options) -> list[Path]:
    """Select the settings of every model for every task, train it with every seed, and save the results.

    With options.runs, collect these runs instead.
    """
    folder = options.runs
    if folder is None:
        folder = OUTPUTS / ("state_tracking_quick" if options.quick else "state_tracking")
        make = _train_together if torch.cuda.is_available() else _train_each
        make(folder, sorted(product(TASKS, MODELS), key=_telling), options)
    rows = [_without_details(row) for row in collected(options, folder, TASKS, "state-tracking tasks")]
    check_alike(finished(rows))
    return [save("state_tracking", options, {"runs": rows}, made_on(rows))]


def _telling(place: tuple[str, str]) -> int:
    """Return a sort key for tasks and models, with the most informative tasks first in case of an interruption."""
    task, _ = place
    return MOST_TELLING.index(task) if task in MOST_TELLING else len(MOST_TELLING)


def _train_each(folder: Path, places: Sequence[tuple[str, str]], options: Options) -> None:
    """Train the models of (task, model) pairs with scripts.train."""
    candidates = {place: list(_candidates(folder, *place, options.quick)) for place in places}
    train([run for place in places for run in candidates[place]], options)
    train([run for place in places for run in _chosen(folder, *place, candidates[place], options.quick)], options)


def _train_together(folder: Path, places: Sequence[tuple[str, str]], options: Options) -> None:
    """Train them on GPUs, the models of `options.jobs` tasks at a time."""
    models: dict[str, list[str]] = {}
    for task, model in places:
        models.setdefault(task, []).append(model)
    calls = [partial(_train_task, folder, task, of_task, options) for task, of_task in models.items()]
    together.in_processes(calls, options.jobs)


def _train_task(folder: Path, task: str, models: Sequence[str], options: Options) -> None:
    drawn: dict = {}
    candidates = {model: list(_candidates(folder, task, model, options.quick)) for model in models}
    for of_model in candidates.values():
        together.train(of_model, options.overrides, drawn, beyond=False)
    chosen = [_chosen(folder, task, model, of_model, options.quick) for model, of_model in candidates.items()]
    together.train([run for of_model in chosen for run in of_model], options.overrides, drawn)


def _chosen(folder: Path, task: str, model: str, candidates: Sequence[Run], quick: bool) -> list[Run]:
    """Return the runs to report: every seed with the selected settings."""
    setting = selected(candidates)
    seeds, steps = SEEDS[:1] if quick else SEEDS, _steps(task, quick)
    return [_run(folder, task, model, setting, seed, steps) for seed in seeds] if setting else []


def _candidates(folder: Path, task: str, model: str, quick: bool) -> Iterator[Run]:
    steps = QUICK_STEPS if quick else _steps(task, quick) // SHORTER
    for setting in QUICK_GRID if quick else GRID:
        yield _run(folder / "selection", task, model, setting, SELECTION_SEED, steps)


def _steps(task: str, quick: bool) -> int:
    return QUICK_STEPS if quick else LONGER.get(task, STEPS)


def _run(folder: Path, task: str, model: str, setting: tuple[str, ...], seed: int, steps: int) -> Run:
    name = "_".join([str(seed), model, *(override.partition("=")[2] for override in setting if seed == SELECTION_SEED)])
    return Run(
        folder / task / name,
        (
            "experiment=state_tracking",
            f"data={task}",
            f"model={model}",
            f"seed={seed}",
            f"compile={str(model == 'mlstm').lower()}",  # many small operators
            *SHARED,
            *OWN.get(model, ()),
            *setting,
            f"trainer.max_steps={steps}",
            *((f"data.curriculum={steps * BATCH // 2}",) if task in LONGER else ()),
        ),
    )


def selected(candidates: Sequence[Run]) -> tuple[str, ...] | None:
    """Return the settings with the best accuracy at training lengths; None if no run has finished."""
    done = [run for run in candidates if run.finished]
    best = max(done, key=lambda run: evaluation(run.folder)["in_distribution"]["accuracy"], default=None)
    return best and tuple(override for override in best.overrides if override in OPTIONS)


def _without_details(row: dict) -> dict:
    """Return only what the page needs: for runs of the selection, settings and accuracy at training lengths."""
    if row.get("seed") != SELECTION_SEED:
        return {key: value for key, value in row.items() if key != "accuracy_by_length"}
    kept = ("experiment", "data", "model", "overrides", "seed", "step", "in_distribution", "environment")
    return {key: row[key] for key in kept if key in row}


def _table(contents: list[dict]) -> Table:
    runs = finished(runs_of(contents))
    seeds = _by_task_and_model(runs)
    accuracy, solved, number = seeds["accuracy"].mean(), seeds["solved"].sum(), seeds.size()
    cells = accuracy.map(rounded_down) + _marks(seeds) + " (" + solved.map(str) + "/" + number.map(str) + ")"
    cells = _arranged(cells.unstack(), runs).fillna("")
    chance = _chance(runs)
    return [
        ["task", *cells.columns, "chance"],
        *([task, *row, f"{chance[task]:.3f}"] for task, row in zip(cells.index, cells.values, strict=True)),
    ]


def _by_task_and_model(runs: list[dict]) -> DataFrameGroupBy:
    """Return the results of finished runs, as a group for each task and model with its seeds as rows."""
    table = DataFrame({key: [run[key] for run in runs] for key in ("data", "model")})
    reached = {
        "accuracy": [extrapolated(run) for run in runs],
        "solved": [without_mistake(run) for run in runs],
        "fitted": [run.get("in_distribution", {}).get("accuracy") for run in runs],
    }
    return table.assign(**reached).groupby(["data", "model"])


def _marks(seeds: DataFrameGroupBy) -> Series:
    """Return * for a model that does not fit its task; nothing if the training lengths were not tested."""
    return (seeds["fitted"].mean() < FITTED).map({True: "*", False: ""})


def _chance(runs: list[dict]) -> dict[str, float]:
    return {run["data"]: run["chance"] for run in runs}


def _arranged(table: DataFrame, runs: list[dict]) -> DataFrame:
    """Return a table of tasks by models in the order of the paper."""
    return table.reindex(index=in_order(runs, "data", TASKS), columns=in_order(runs, "model", MODELS))


def _notes(contents: list[dict]) -> list[str]:
    """Return paragraphs on how the runs were trained, and the selected settings and their results."""
    runs = runs_of(contents)
    selections = [run for run in runs if run.get("seed") == SELECTION_SEED]
    if not selections:
        return training_notes(runs)
    told = OPTIONS.union(*OWN.values())
    notes = training_notes([run | {"overrides": [o for o in run["overrides"] if o not in told]} for run in runs])
    steps = sorted({run["step"] for run in selections if "step" in run})
    rule = (
        f"Every model has the best of the same {len(GRID)} settings for each task: learning rates 5e-4, 1e-3, 2e-3 and "
        "5e-3, one and two blocks, with and without MLP. They are selected by the accuracy at training lengths after "
        f"{' or '.join(f'{number:,}' for number in steps)} steps with another seed ({len(selections)} runs). Attention "
        f"has four heads, a cell has one. * marks an accuracy below {FITTED} at training lengths: the model does not "
        "fit the task."
    )
    guessed = ", ".join(not_learnt(selections, _chance(finished(runs))))
    guess = f"For {guessed}, the selection is arbitrary, because no setting of any model had begun to learn."
    refused = {"gated_deltanet", "deltaproduct"}.isdisjoint(run["model"] for run in runs)
    added = [text for text, holds in ((guess, guessed), (REFUSED, refused)) if holds]
    return [*notes, rule, *added, markdown(_settings_table(finished(runs), selections))]


def not_learnt(selections: list[dict], chance: dict[str, float]) -> list[str]:
    """Return the tasks on which no run of the selection is better than a guess by 0.1."""
    best: dict[str, float] = {}
    for run in selections:
        best[run["data"]] = max(run["in_distribution"]["accuracy"], best.get(run["data"], 0))
    return [task for task in in_order(selections, "data", TASKS) if task in chance and best[task] < chance[task] + 0.1]


def _settings_table(runs: list[dict], selections: list[dict]) -> Table:
    """Return a table of settings for each model on each task, with the accuracies in the selection and of the seeds."""
    header = ["task", "model", "blocks", "MLP", "rate", "in the selection", "at training lengths", "beyond"]
    rows = [[*header, "seeds without a mistake"]]
    for task, model in product(in_order(runs, "data", TASKS), in_order(runs, "model", MODELS)):
        if of_place := finished(runs, data=task, model=model):
            setting = dict(override.partition("=")[::2] for override in of_place[0]["overrides"])
            selected = [setting.get(key, "") for key in ("model.num_blocks", "model.mlp", "optim.lr")]
            before = [run for run in selections if _has_settings_of(of_place[0], run)]
            accuracies = [_in_distribution(of_place), mean(map(extrapolated, of_place))]
            in_selection = rounded_down(_in_distribution(before)) if before else ""
            seeds = seeds_without_mistake(runs, data=task, model=model)
            rows.append([task, model, *selected, in_selection, *map(rounded_down, accuracies), seeds])
    return rows


def _has_settings_of(run: dict, other: dict) -> bool:
    """Return whether two runs have the same task, model and settings."""
    same = all(run[key] == other[key] for key in ("data", "model"))
    return same and OPTIONS.intersection(run["overrides"]) == OPTIONS.intersection(other["overrides"])


def _in_distribution(runs: list[dict]) -> float:
    return mean(run["in_distribution"]["accuracy"] for run in runs)


def _draw(contents: list[dict], file: Path) -> None:
    """Draw the accuracy of every model on every task, coloured from chance level to 1."""
    import numpy as np
    from matplotlib.figure import Figure

    runs = finished(runs_of(contents))
    groups = _by_task_and_model(runs)
    accuracies = _arranged(groups["accuracy"].mean().unstack(), runs)
    marks = _arranged(_marks(groups).unstack(), runs)
    chance = accuracies.index.map(_chance(runs)).to_series(accuracies.index)
    above_chance = accuracies.sub(chance, axis=0).div(1 - chance, axis=0).to_numpy()
    rows, columns = accuracies.shape
    figure = Figure(figsize=(max(8.2, 1.1 * columns + 3), max(2.6, 0.5 * rows + 1.4)), layout="constrained")
    learnt = ", ".join(f"{model_name(model)} {number}" for model, number in (accuracies > 0.99).sum().items())
    figure.suptitle(
        f"Tasks with an accuracy above 0.99 beyond the training lengths: {learnt}\n"
        "In each field: mean accuracy (* does not fit the training lengths either), and seeds without a mistake",
        fontsize=10,
    )
    axes = figure.subplots()
    for i, j in np.argwhere(~np.isnan(above_chance)):
        seeds = seeds_without_mistake(runs, data=accuracies.index[i], model=accuracies.columns[j])
        text = f"{rounded_down(accuracies.iat[i, j])}{marks.iat[i, j]}\n{seeds}"
        color = "white" if above_chance[i, j] > 0.6 else "black"
        axes.text(j, i, text, ha="center", va="center", color=color, fontsize=8)
    image = axes.imshow(above_chance, vmin=0, vmax=1, cmap="Blues", aspect="auto")
    axes.set_xticks(range(columns), labels=map(model_name, accuracies.columns))
    axes.set_yticks(range(rows), labels=[task.replace("_", " ") for task in accuracies.index])
    figure.colorbar(image, label="0: chance, 1: all correct")
    figure.savefig(file, dpi=150)


STATE_TRACKING = Reproduction(
    source="state_tracking",
    what="Accuracy of the last label of sequences that are longer than in training, with uniform lengths: mean over "
    "seeds, rounded down, and in brackets the number of seeds without a mistake. `data/tasks.py` describes the tasks "
    "and their sources.",
    measure=_measure,
    table=_table,
    draw=_draw,
    notes=_notes,
)
