"""Accuracy on parity beyond the lengths of training, against the speed of training language models."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks import RESULTS
from benchmarks.cases import HIDDEN, TRAINING, Case, Job
from benchmarks.ours import NAME as OURS
from benchmarks.results import by_job, device_slug
from benchmarks.table import FLASHRNN, times
from reproduction import text_runs
from reproduction.accuracy import mean_extrapolated
from reproduction.result import Options, Reproduction, Table, known, paper
from reproduction.runs import speed

SOURCES = ("parity", "loss_curves", "kernels_main")
_BLOCKS = 12  # of the language models
_COMPUTED = "computed from kernel times"
_CELL_OF = {"nn_lstm": "lstm"}  # whose accuracies a model has
_IN_PYTORCH = ("mamba", "mlstm")  # which transformers computes without kernels of their own


class Point(NamedTuple):
    label: str
    cell: str
    accuracy: float
    tokens_per_second: float
    where: str  # the device, or how the speed was found


def _measure(options: Options) -> list[Path]:
    """The files that this is made of."""
    files = [options.out / f"{source}_{device_slug()}.json" for source in SOURCES]
    for file in files:
        if not file.exists():
            measured = (
                next(iter(sorted(RESULTS.glob(f"{source}_*h?00*.json"))), f"{source}_*.json") for source in SOURCES
            )
            raise ValueError(
                f"there is no {file}. From what was measured on GPUs:\n  "
                f"python -m scripts.reproduce extrapolation_throughput --data {' '.join(map(str, measured))}"
            )
    return files


def points(contents: list[dict]) -> list[Point]:
    """Every language model that was trained, LSTMs as they would be with FlashRNN 1.0.8's kernels, and the models of
    which a training step was timed."""
    if len(contents) < len(SOURCES) or "suite" not in contents[2] or contents[1].get("quick"):
        raise ValueError(
            f"expected data of {', '.join(SOURCES)}, in this order, and none of a quick run of loss_curves; "
            "behind it may be files of scripts.benchmark language_model"
        )
    parity, trained, kernels, *timed = contents
    first = {}  # of each model's seeds
    for run in sorted(text_runs.finished([trained]), key=lambda run: run["seed"]):
        if not any(override.startswith("model.mixer.backend=") for override in run["overrides"]):  # the best there is
            first.setdefault((run["model"], run["num_heads"]), run)
    found = []
    for label, run in zip(text_runs.names([*first.values()]), first.values(), strict=True):
        cell = _CELL_OF.get(run["model"], run["model"])
        accuracy = mean_extrapolated([parity], model=cell)
        if accuracy is None:
            continue
        found.append(Point(label, cell, accuracy, speed(run), run["environment"]["device"]))
        if more := _more_by_flashrnn(run, kernels):
            slower = speed(run) * run["step_time"] / (run["step_time"] + more)
            found.append(Point(f"{label}, FlashRNN 1.0.8", cell, accuracy, slower, _COMPUTED))
    return [*found, *_timed(timed, parity)]


def _timed(contents: list[dict], parity: dict) -> Iterator[Point]:
    for content in contents:
        for row in content["rows"]:
            model = row["model"].split()[0].removeprefix("model=")
            accuracy = mean_extrapolated([parity], model=model)
            if accuracy is not None and "tokens_per_s" in row:
                of_one = row["tokens_per_s"] / row["devices"]
                where = f"{content['machine']['gpu']}, steps alone, of {row['batch_size']} sequences"
                label = f"{model}, PyTorch code" if model in _IN_PYTORCH else model
                yield Point(label, model, accuracy, of_one, where)


def _more_by_flashrnn(run: dict, kernels: dict) -> float | None:
    """Seconds that a step would take more if its recurrences took FlashRNN's time; None where that is not known."""
    heads = run["num_heads"]
    job = Job(Case(run["model"], heads, HIDDEN // heads, run["batch_size"]), TRAINING)
    ms = times(by_job(kernels["rows"]).get(job, {}))
    return _BLOCKS * (ms[FLASHRNN] - ms[OURS]) / 1000 if {FLASHRNN, OURS} <= ms.keys() else None


def _table(contents: list[dict]) -> Table:
    rows = [["model", "parity, 40 to 256", "paper", "tokens/s in training, 160 to 190 M parameters", "device"]]
    for point in points(contents):
        published = known(paper("parity").get(point.cell))
        rows.append([point.label, f"{point.accuracy:.4f}", published, f"{point.tokens_per_second:,.0f}", point.where])
    return rows


def _draw(contents: list[dict], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    for index, point in enumerate(points(contents)):
        filled = "none" if point.where == _COMPUTED else "full"
        x = point.tokens_per_second / 1000
        axes.plot(x, point.accuracy, "o", color=f"C{index}", markersize=10, fillstyle=filled, label=point.label)
    axes.axhline(0.5, color="gray", linestyle="--")
    axes.set(xlabel=f"thousand tokens per second of training, one GPU (open: {_COMPUTED})", xlim=(0, None))
    axes.set(ylabel="accuracy on parity, lengths 40 to 256", ylim=(0.4, 1.05))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(file, dpi=150)


def _notes(contents: list[dict]) -> list[str]:
    in_pytorch = (
        "Mamba and mLSTM are the PyTorch code of transformers (Mamba's scan is that of mambapy): the kernels of "
        "mamba_ssm and xlstm are faster."
    )
    return [
        "An LSTM with FlashRNN 1.0.8's kernels is computed: our step, and for each of 12 blocks the difference of the "
        "kernels' times. nn.LSTM (cuDNN) is the LSTM with one head; its accuracy is the LSTM's.",
        *([in_pytorch] if contents[len(SOURCES) :] else []),
    ]


EXTRAPOLATION_THROUGHPUT = Reproduction(
    source="parity",
    what="Accuracy on parity beyond the lengths of training, of networks trained for that, and the tokens per second "
    "at which language models with the same cells train (batches of 32 x 1024 tokens).",
    measure=_measure,
    table=_table,
    draw=_draw,
    notes=_notes,
)
