"""How the time of the kernels grows with length, batch and head size."""

from pathlib import Path

import numpy as np

from benchmarks.cases import SWEEPS, TRAINING, network
from benchmarks.figures import label
from benchmarks.results import by_job
from benchmarks.table import times
from reproduction.axes import milliseconds_over
from reproduction.result import Reproduction, Table, kernels, known, paper

SWEPT = ("length", "batch", "heads")


def _curves(content: dict) -> dict[tuple[str, str, str], list[tuple[int, float]]]:
    """Return size and milliseconds, by network, mode and implementation."""
    field, _ = SWEEPS[content["suite"]]
    curves: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
    for (case, mode), rows in by_job(content["rows"]).items():
        for name, ms in times(rows).items():
            curves.setdefault((network(case, field), mode, name), []).append((getattr(case, field), ms))
    return {key: sorted(points) for key, points in curves.items()}


def _table(contents: list[dict]) -> Table:
    table = [["over", "network", "mode", "implementation", "from", "to", "ms", "exponent", "paper"]]
    for content in contents:
        _, label = SWEEPS[content["suite"]]
        for (kept, mode, name), points in _curves(content).items():
            if len(points) < 2:
                continue
            sizes, ms = np.array(points).T
            exponent = np.polyfit(np.log(sizes), np.log(ms), 1)[0]
            span = [f"{sizes[0]:.0f}", f"{sizes[-1]:.0f}", f"{ms[0]:.2f} to {ms[-1]:.2f}"]
            table.append([label, kept, mode, name, *span, f"{exponent:.2f}", known(paper("complexity"))])
    return table


def _draw(contents: list[dict], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(contents), 4.5), layout="constrained")
    for axes, content in zip(figure.subplots(1, len(contents), squeeze=False)[0], contents, strict=True):
        curves = _curves(content)
        for (kept, mode, name), points in curves.items():
            if mode == TRAINING and kept.startswith("lstm"):
                axes.plot(*zip(*points, strict=True), "o-", label=f"{label(name)}, {kept}")
        milliseconds_over(axes, SWEEPS[content["suite"]][1], (size for points in curves.values() for size, _ in points))
        axes.set_title(f"LSTM, {TRAINING}")
        axes.legend(fontsize=7)
    figure.savefig(file, dpi=150)


COMPLEXITY = Reproduction(
    source="kernels_length",
    what="Milliseconds over the smallest to the largest size, and the exponent of the power law through all sizes: 1 "
    "is linear. Over head size the number of units stays, so that the product grows linearly with it.",
    measure=lambda options: kernels(options, *SWEPT),
    table=_table,
    draw=_draw,
)
