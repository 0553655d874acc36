"""Parity as in the paper: accuracy by sequence length."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from reproduction import by_length, together
from reproduction.accuracy import MODELS, SEEDS, check_alike, collected, finished, training_notes
from reproduction.result import Options, Reproduction, paper, save
from reproduction.runs import Run, folder_of_runs, made_on, runs_of


def _measure(options: Options) -> list[Path]:
    """Train every model with every seed, or collect the runs below options.runs, and save their results."""

    def runs(folder: Path) -> list[Run]:
        return [_run(folder, model, seed, options.quick) for seed in SEEDS for model in MODELS]

    folder = folder_of_runs("parity", options, runs, _train_together if torch.cuda.is_available() else None)
    rows = collected(options, folder, ["parity"], "parity")
    check_alike(finished(rows))
    return [save("parity", options, {"runs": rows}, made_on(rows))]


def _train_together(runs: Sequence[Run], options: Options) -> None:
    """Train the runs on GPUs, those of `options.jobs` models at the same time."""
    of_models = {model: [run for run in runs if f"model={model}" in run.overrides] for model in MODELS}
    calls = [partial(together.train, of_model, options.overrides, {}) for of_model in of_models.values()]
    together.in_processes(calls, options.jobs)


def _run(folder: Path, model: str, seed: int, quick: bool) -> Run:
    # Compilation saves time for mLSTM, which has many small operators, but not in the 250 steps of quick=true.
    compiled = str(model == "mlstm" and not quick).lower()
    experiment = "parity" if quick else "parity_paper"
    overrides = (f"experiment={experiment}", "data=parity", f"model={model}", f"seed={seed}", f"compile={compiled}")
    tf32 = () if quick else ("matmul_precision=high",)
    return Run(folder / "parity" / f"{seed}_{model}", overrides + tf32)


def _notes(contents: list[dict]) -> list[str]:
    quick = (
        "This is the quick run (`quick=true`: experiment=parity), which a CPU can do; the protocol of the paper "
        "(experiment=parity_paper) is 20,000 steps of 256 sequences."
    )
    return [*training_notes(runs_of(contents)), *([quick] if contents[0]["quick"] else [])]


PARITY = Reproduction(
    source="parity",
    what="Accuracy of the label at the last position by the length of the sequence, mean over seeds, rounded down. The "
    "paper gives one number for lengths 40 to 256.",
    measure=_measure,
    table=partial(by_length.table, models=MODELS, published=paper("parity")),
    draw=partial(by_length.draw, models=MODELS, published=paper("parity")),
    notes=_notes,
)
