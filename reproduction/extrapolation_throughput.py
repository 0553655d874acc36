"""Accuracy on parity beyond the training lengths, compared with the speed of training language models."""

from pathlib import Path
from typing import NamedTuple

from benchmarks import RESULTS
from benchmarks.results import device_folder
from reproduction import text_runs
from reproduction.accuracy import MODELS, mean_extrapolated, model_name, rounded_down
from reproduction.result import Options, Reproduction, Table, known, paper
from reproduction.runs import speed

SOURCES = ("parity", "loss_curves")
_CELL_OF = {"nn_lstm": "lstm"}  # models that have the accuracies of another one


class Row(NamedTuple):
    label: str
    cell: str
    accuracy: float
    tokens_per_second: float | None  # None if no language model of the cell was trained
    device: str


def _measure(options: Options) -> list[Path]:
    """Return the files from which this result is made."""
    files = [options.out / device_folder() / f"{source}.json" for source in SOURCES]
    for file in files:
        if not file.exists():
            measured = ",".join(str(RESULTS / "h200" / f"{source}.json") for source in SOURCES)
            raise ValueError(
                f"there is no {file}. From what was measured on an H200:\n  "
                f"python -m scripts.reproduce extrapolation_throughput files=[{measured}]"
            )
    return files


def rows(contents: list[dict]) -> list[Row]:
    """Return all language models trained with the fastest kernels, then the cells without a language model."""
    if len(contents) != len(SOURCES) or contents[1].get("quick"):
        raise ValueError(
            f"expected data of {', '.join(SOURCES)}, in this order, and none of a quick run of loss_curves"
        )
    parity, trained = (content["runs"] for content in contents)
    first: dict[tuple[str, int], dict] = {}  # the first seed of each model
    for run in sorted(text_runs.finished(trained), key=lambda run: run["seed"]):
        if not any(override.startswith("model.mixer.backend=") for override in run["overrides"]):
            first.setdefault((run["model"], run["num_heads"]), run)
    found = []
    for (model, heads), run in first.items():
        cell = _CELL_OF.get(model, model)
        accuracy = mean_extrapolated(parity, model=cell)
        if accuracy is not None:
            label = f"{model_name(model)}, {heads} head{'s' * (heads > 1)}"
            found.append(Row(label, cell, accuracy, speed(run), run["environment"]["device"]))
    alone = [cell for cell in MODELS if cell not in {row.cell for row in found}]
    accuracies = {cell: mean_extrapolated(parity, model=cell) for cell in alone}
    return [
        *sorted(found, key=lambda row: -row.tokens_per_second),
        *(Row(model_name(cell), cell, value, None, "") for cell, value in accuracies.items() if value is not None),
    ]


def _table(contents: list[dict]) -> Table:
    table = [["model", "parity, 40 to 256", "paper", "tokens/s in training", "device"]]
    for row in rows(contents):
        pace = "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"
        table.append([row.label, rounded_down(row.accuracy, 4), known(paper("parity").get(row.cell)), pace, row.device])
    return table


def _draw(contents: list[dict], file: Path) -> None:
    from matplotlib.figure import Figure

    shown = rows(contents)
    figure = Figure(figsize=(10, 0.42 * len(shown) + 1.6), layout="constrained")
    figure.suptitle(
        "Recurrent networks solve parity beyond the training lengths, and can train as fast as a Transformer"
    )
    accuracy, pace = figure.subplots(1, 2, sharey=True)
    for place, row in enumerate(shown):
        color = "tab:blue" if row.accuracy > 0.9 else "tab:gray"
        accuracy.barh(place, row.accuracy, color=color)
        accuracy.text(max(row.accuracy, 0.5) + 0.01, place, rounded_down(row.accuracy), va="center")
        if row.tokens_per_second is None:
            pace.text(0, place, " not trained as a language model here", va="center", color="gray")
        else:
            pace.barh(place, row.tokens_per_second / 1000, color=color)
            pace.text(row.tokens_per_second / 1000, place, f" {row.tokens_per_second / 1000:.0f}", va="center")
    accuracy.axvline(0.5, color="black", linestyle=":", zorder=0)
    accuracy.text(0.51, len(shown) - 0.4, "chance", va="top", fontsize=9)
    accuracy.set_yticks(range(len(shown)), labels=[row.label for row in shown])
    accuracy.set(
        title="accuracy on parity of 40 to 256 bits, trained on up to 40", xlim=(0, 1.12), ylim=(len(shown), -0.6)
    )
    pace.set(title="training speed on one GPU, thousand tokens per second", xlim=(0, None))
    pace.margins(x=0.1)
    for axes in (accuracy, pace):
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(10)
    figure.savefig(file, dpi=150)


def _notes(contents: list[dict]) -> list[str]:
    models = {run["model"] for run in contents[1]["runs"]}
    own = ["nn.LSTM is cuDNN's LSTM; its accuracy is that of the LSTM."] if _CELL_OF.keys() & models else []
    others = (
        "Elman networks and GRUs were not trained as language models. Mamba and mLSTM were not timed, because their "
        "fast kernels are not used here."
    )
    return [" ".join([*own, others])]


EXTRAPOLATION_THROUGHPUT = Reproduction(
    source="parity",
    what="Accuracy on parity beyond the training lengths, rounded down, and training speed of language models of 160 "
    "to 190 M parameters with the same cells (32 x 1024 tokens per step).",
    measure=_measure,
    table=_table,
    draw=_draw,
    notes=_notes,
)
