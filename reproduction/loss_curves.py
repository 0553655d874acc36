"""Language models trained on the same text: loss against tokens and time, and the final values."""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from pandas import Series

from reproduction.accuracy import model_name
from reproduction.result import Options, Reproduction, Table, quick_note, save
from reproduction.runs import (
    Run,
    check_experiment,
    collect,
    failures,
    folder_of_runs,
    logged,
    made_on,
    runs_of,
    tokens,
    trained_by,
)
from reproduction.text_runs import by_text, check_finished, finished, names, shared_overrides

EXPERIMENT = "python_160m"
# The longest runs first, so that simultaneous runs end at about the same time.
MODELS = (("nn_lstm", 1), ("slstm", 1), ("lstm", 1), ("slstm", 12), ("lstm", 12), ("transformer", 12))
QUICK = (
    "data=text_tiny",
    "data.context_length=128",
    "data.batch_size=8",
    "global_batch_size=8",
    "compile=false",
    "threads=1",
    "model.vocab_size=null",
    "model.d_model=96",
    "model.num_blocks=2",
    "trainer.precision=32-true",
    "trainer.max_steps=60",
    "val_every=60",
    "schedule.warmup_steps=10",
)
# Autocast computes cuDNN's networks in float16 for every precision, so gradients must be scaled.
NN_LSTM = ("trainer.precision=16-mixed",)
_COLUMNS = 4  # columns of panels
_SMOOTHED = 5  # number of logged losses that are averaged for each point


def _measure(options: Options) -> list[Path]:
    folder = folder_of_runs("loss_curves", options, partial(_runs, quick=options.quick))
    rows = collect(folder, options.add_to, lambda run: {"curve": _curve(run)})
    check_finished(options, rows)
    if options.add_to and any("curve" not in row for row in rows):
        raise ValueError(f"{options.add_to} has no losses of its runs: expected a file that loss_curves wrote")
    check_experiment(finished(rows), EXPERIMENT)
    if len(by_text(rows)) > 1:
        raise ValueError(f"runs below {folder} were evaluated on different texts, so they cannot be compared")
    return [save("loss_curves", options, {"runs": rows}, made_on(rows))]


def _runs(folder: Path, quick: bool) -> Iterator[Run]:
    for model, heads in MODELS:
        overrides = (f"experiment={EXPERIMENT}", f"model={model}", f"model.num_heads={heads}")
        own = (*(NN_LSTM if model == "nn_lstm" else ()), *(QUICK if quick else ()))
        yield Run(folder / f"{model}_{heads}", (*overrides, *own))


def _curve(folder: Path) -> list[tuple[int, float]]:
    """Return the logged optimizer steps and training losses."""
    return [(step + 1, loss) for step, loss in logged(folder, "loss").items()]


def _table(contents: list[dict]) -> Table:
    header = [
        "model",
        "parameters (M)",
        "steps",
        "tokens (M)",
        "validation perplexity",
        "ms / step",
        "tokens / s",
        "device",
    ]
    rows, runs = [header], finished(runs_of(contents))
    for name, run in zip(names(runs), runs, strict=True):
        numbers = [
            f"{run['parameters'] / 1e6:.1f}",
            str(run["step"]),
            f"{tokens(run) / 1e6:.1f}",
            f"{run['perplexity']:.2f}",
        ]
        pace = [f"{1e3 * run['step_time']:.1f}", f"{run['tokens_per_second']:,.0f}", run["environment"]["device"]]
        rows.append([name, *numbers, *pace])
    return rows


def _notes(contents: list[dict]) -> list[str]:
    runs = runs_of(contents)
    shared = " ".join(shared_overrides(finished(runs)))
    trained = f"Seed 0 unless said. By {trained_by(runs)}."
    return [*([f"All with `{shared}`."] if shared else []), trained, *quick_note(contents), *failures(runs)]


def _draw(contents: list[dict], file: Path) -> None:
    """Draw a panel for each run, with the others in gray behind it."""
    from matplotlib.figure import Figure

    runs = finished(runs_of(contents))
    curves = [_smoothed(run["curve"]) for run in runs]
    rows = math.ceil(len(runs) / _COLUMNS)
    figure = Figure(figsize=(3.1 * _COLUMNS, 2.3 * rows + 0.6), layout="constrained")
    reached = sorted(zip([run["perplexity"] for run in runs], map(_called, names(runs)), strict=True))
    (least, best), (most, worst) = reached[0], reached[-1]
    figure.suptitle(f"Perplexity after the same tokens: {least:.1f} ({best}) to {most:.1f} ({worst}); gray: other runs")
    panels = figure.subplots(rows, _COLUMNS, sharex=True, sharey=True, squeeze=False).flat
    for name, run, curve, axes in zip(names(runs), runs, curves, panels, strict=False):
        for other in curves:
            axes.plot(other, color="lightgray", linewidth=1)
        axes.plot(curve, color="tab:blue")
        axes.set_title(
            f"{_called(name)}\nperplexity {run['perplexity']:.1f}, {1e3 * run['step_time']:.0f} ms per step", fontsize=8
        )
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8)
    for axes in list(panels):  # panels without a run
        axes.set_axis_off()
    # Earlier losses are outside of the figure.
    beginnings = [curve.iloc[len(curve) // 10] for curve in curves if len(curve)]
    figure.axes[0].set_ylim(top=max(beginnings, default=None))
    figure.supxlabel("optimizer steps", fontsize=9)
    figure.supylabel(f"training loss, mean of {_SMOOTHED} logged", fontsize=9)
    figure.savefig(file, dpi=150)


def _called(name: str) -> str:
    """Return the name of a run, with its model's name as in papers, and without the keys of its overrides."""
    model, _, rest = name.partition(", ")
    return f"{model_name(model)}, {rest.replace('model.mixer.backend=', '').replace('trainer.precision=', '')}"


def _smoothed(points: list[tuple[int, float]]) -> Series:
    """Return losses by step, each averaged with the ones before it."""
    return Series(dict(points), dtype=float).rolling(_SMOOTHED).mean().dropna()


LOSS_CURVES = Reproduction(
    source="loss_curves",
    what="The models of the paper's table, trained on the machine's Python source code (experiment=python_160m). All "
    "see the same blocks in the same order.",
    measure=_measure,
    table=_table,
    draw=_draw,
    notes=_notes,
)
