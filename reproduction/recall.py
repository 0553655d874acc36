"""Recall combined with state tracking: a task that a hybrid of recurrence and attention learns, but not its parts."""

from functools import partial
from pathlib import Path

from reproduction import by_length
from reproduction.accuracy import SEEDS, check_alike, collected, finished, mean_extrapolated, model_name, training_notes
from reproduction.result import Options, Reproduction, quick_note, save
from reproduction.runs import Run, check_experiment, folder_of_runs, made_on, runs_of

MODELS = ("transformer", "lstm", "hybrid")
EXPERIMENT = "recall"
QUICK = ("trainer.max_steps=100", "val_every=100", "data.eval_batches=1")


def _measure(options: Options) -> list[Path]:
    """Train every model with every seed, or collect the runs below options.runs, and save their results."""

    def runs(folder: Path) -> list[Run]:
        return [_run(folder, model, seed, options.quick) for seed in SEEDS for model in MODELS]

    folder = folder_of_runs("recall", options, runs)
    rows = collected(options, folder, (EXPERIMENT, "recall_group"), "the recall task")
    found = finished(rows)
    check_experiment(found, EXPERIMENT)
    check_alike(found)
    return [save("recall", options, {"runs": rows}, made_on(rows))]


def _run(folder: Path, model: str, seed: int, quick: bool) -> Run:
    overrides = (f"experiment={EXPERIMENT}", f"model={model}", f"seed={seed}", *(QUICK if quick else ()))
    return Run(folder / f"{seed}_{model}", overrides)


def _notes(contents: list[dict]) -> list[str]:
    runs = runs_of(contents)
    learnt = [model_name(model) for model in MODELS if (mean := mean_extrapolated(runs, model=model)) and mean > 0.99]
    return [
        f"Accuracy above 0.99 beyond the training lengths: {', '.join(learnt) or 'none'}. The hybrid has the blocks "
        "lstm, attention, lstm; the other models have three blocks of one kind.",
        *training_notes(runs),
        *quick_note(contents),
    ]


RECALL = Reproduction(
    source="recall",
    what="A sequence binds keys to permutations of three elements and then names keys. The label is the product of the "
    "permutations so far (`data=recall`). The table has the accuracy of the last label by the length of the sequence, "
    "mean over seeds, rounded down.",
    measure=_measure,
    table=partial(by_length.table, models=MODELS),
    draw=partial(by_length.draw, models=MODELS),
    notes=_notes,
)
