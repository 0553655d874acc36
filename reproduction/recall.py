"""Recall and a state at once: what a hybrid of recurrence and attention learns, and its parts alone do not."""

from functools import partial
from pathlib import Path

from reproduction import by_length
from reproduction.accuracy import (
    SEEDS,
    check_alike,
    collected,
    finished,
    mean_extrapolated,
    model_name,
    training_notes,
)
from reproduction.result import Options, Reproduction, save
from reproduction.runs import OUTPUTS, Run, made_on, train

MODELS = ("transformer", "lstm", "hybrid")
EXPERIMENT = "recall"
QUICK = ("trainer.max_steps=100", "val_every=100", "data.eval_batches=1")


def _measure(options: Options) -> list[Path]:
    """Train every model with every seed, or take the runs below options.runs, and save what they reached."""
    folder = options.runs
    if folder is None:
        folder = OUTPUTS / ("recall_quick" if options.quick else "recall")
        train([_run(folder, model, seed, options.quick) for seed in SEEDS for model in MODELS], options)
    rows = collected(options, folder, (EXPERIMENT, "recall_group"), "the recall task")
    runs = finished([{"runs": rows}])
    if others := {run["experiment"] for run in runs} - {EXPERIMENT}:
        raise ValueError(f"{folder} has runs of {', '.join(sorted(others))}: these are of experiment={EXPERIMENT}")
    check_alike(runs)
    return [save("recall", options, {"runs": rows}, made_on(rows))]


def _run(folder: Path, model: str, seed: int, quick: bool) -> Run:
    overrides = (f"experiment={EXPERIMENT}", f"model={model}", f"seed={seed}", *(QUICK if quick else ()))
    return Run(folder / f"{seed}_{model}", overrides)


def _notes(contents: list[dict]) -> list[str]:
    quick = ["This is the quick run (`quick=true`): it shows that all of it works."] if contents[0].get("quick") else []
    learnt = [
        model_name(model) for model in MODELS if (mean := mean_extrapolated(contents, model=model)) and mean > 0.99
    ]
    return [
        f"Right at lengths beyond those of training (above 0.99): {', '.join(learnt) or 'none'}. The hybrid has the "
        "blocks lstm, attention, lstm; the others have as many of one kind.",
        *training_notes(contents),
        *quick,
    ]


RECALL = Reproduction(
    source="recall",
    what="A sequence binds keys to permutations of three things, then names such keys; the label at each is the "
    "product so far of what they stand for (`data=recall`). Accuracy of the last label by the length of the sequence, "
    "mean over seeds, rounded down.",
    measure=_measure,
    table=partial(by_length.table, models=MODELS),
    draw=partial(by_length.draw, models=MODELS),
    notes=_notes,
)
