"""Extrapolated accuracy against training throughput: what a model can do and what it costs."""

from pathlib import Path
from statistics import mean, median

from scripts.benchmarks.results import device_slug
from scripts.reproduction import language_model
from scripts.reproduction.accuracy import MODELS, extrapolated, finished
from scripts.reproduction.result import Options, Reproduction, Table, known, paper


def _measure(options: Options) -> list[Path]:
    """The files of parity and, where it exists, of the trained language models."""
    accuracy, speed = (options.out / f"{name}_{device_slug()}.json" for name in ("parity", language_model.SOURCE))
    if not accuracy.exists():
        raise ValueError(f"there is no {accuracy} with the accuracies: run `python -m scripts.reproduce parity` first")
    return [accuracy, speed] if speed.exists() else [accuracy]


def _in_parity(contents: list[dict], model: str) -> float | None:
    """Tokens per second of the parity runs, padding included."""
    found = [run["tokens_per_second"] for run in finished(contents[:1], model=model) if run["tokens_per_second"]]
    return median(found) if found else None


def _at_160m(contents: list[dict], model: str) -> float | None:
    """Tokens per second and device of the model's fastest row in the table of language models."""
    rows = [row for row in paper("language_model") if row["model"] == model and len(contents) > 1]
    runs = filter(None, (language_model.ours(contents[1:], row) for row in rows))
    return max((run["tokens_per_second"] / run["devices"] for run in runs), default=None)


SPEEDS = {"in the parity runs": _in_parity, "at 160 M parameters, per device": _at_160m}


def _accuracy(contents: list[dict], model: str) -> float | None:
    found = [extrapolated(run) for run in finished(contents[:1], model=model)]
    return mean(found) if found else None


def _table(contents: list[dict]) -> Table:
    table = [["model", "accuracy", "paper", *(f"tokens/s {where}" for where in SPEEDS), "paper"]]
    for model in MODELS:
        accuracy = _accuracy(contents, model)
        if accuracy is not None:
            speeds = [
                "" if value is None else f"{value:,.0f}" for value in (of(contents, model) for of in SPEEDS.values())
            ]
            published = known(paper("parity")[model])
            table.append([model, f"{accuracy:.4f}", published, *speeds, known(paper("extrapolation_throughput"))])
    return table


def _draw(contents: list[dict], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(contents), 4.5), layout="constrained")
    panels = list(SPEEDS.items())[: len(contents)]
    for axes, (where, speed) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for index, model in enumerate(MODELS):
            x, y = speed(contents, model), _accuracy(contents, model)
            if x is not None and y is not None:
                axes.semilogx(x, y, "o", color=f"C{index}", label=model)
                axes.annotate(model, (x, y), xytext=(4, -10 - 9 * (index % 3)), textcoords="offset points", fontsize=8)
        axes.set(xlabel=f"training tokens per second {where}", ylabel="accuracy on parity, 40 to 256", ylim=(0.4, 1.05))
        axes.set_title(contents[0]["machine"]["gpu"] or "CPU")
        axes.grid(alpha=0.3, which="both")
    figure.savefig(file, dpi=150)


EXTRAPOLATION_THROUGHPUT = Reproduction(
    source="parity",
    what="Accuracy on parity beyond the lengths of training, and the tokens per second of training: in those very "
    "runs, with padding, and for language models of 160 M parameters where these have been timed.",
    measure=_measure,
    table=_table,
    draw=_draw,
)
