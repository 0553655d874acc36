"""The growth of the kernels' time with sequence length, batch size and head size."""

from pathlib import Path

import numpy as np

from benchmarks.cases import SWEEPS, TRAINING, network
from benchmarks.figures import color, label, name_curves
from benchmarks.ours import NAME as OURS
from benchmarks.results import by_job
from benchmarks.table import times
from reproduction.axes import milliseconds_over
from reproduction.result import Reproduction, Table, kernels, known, paper

SWEPT = ("length", "batch", "heads")


def _curves(content: dict) -> dict[tuple[str, str, str], list[tuple[int, float]]]:
    """Return sizes and milliseconds by network, mode and implementation."""
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
    """Draw milliseconds of an LSTM against the size that each suite varies.

    There is a colour per implementation, a column of panels per suite and a row per network.
    """
    from matplotlib.figure import Figure

    every = [
        {(kept, name): points for (kept, mode, name), points in _curves(content).items() if _is_drawn(kept, mode)}
        for content in contents
    ]
    rows = max(len({kept for kept, _ in curves}) for curves in every)
    figure = Figure(figsize=(5.5 * len(contents), 1 + 3.8 * rows), layout="constrained")
    panels = figure.subplots(rows, len(contents), squeeze=False)
    for column, content, curves in zip(panels.T, contents, every, strict=True):
        varied = SWEEPS[content["suite"]][1]
        networks = list(dict.fromkeys(kept for kept, _ in curves))
        for axes, kept in zip(column, networks, strict=False):
            shown = {name: points for (of_network, name), points in curves.items() if of_network == kept}
            for name, points in shown.items():
                axes.plot(*zip(*points, strict=True), "o-", color=color(name))
            milliseconds_over(axes, varied, (size for points in shown.values() for size, _ in points))
            name_curves(axes, {label(name): (points[-1][1], color(name)) for name, points in shown.items()})
            axes.set_title(f"{kept}; {_growth(varied, shown.get(OURS, []))}", fontsize=10)
        for axes in column[len(networks) :]:
            axes.set_axis_off()
    figure.suptitle(_finding(every))
    figure.savefig(file, dpi=150)


def _is_drawn(kept: str, mode: str) -> bool:
    return mode == TRAINING and kept.startswith("lstm")


def _growth(varied: str, ours: list[tuple[int, float]]) -> str:
    """Return the growth of our time from the smallest to the largest size."""
    if len(ours) < 2:
        return varied
    (least, first), (most, last) = ours[0], ours[-1]
    return f"{varied} × {most / least:g}: this project's time × {last / first:.1f}"


def _finding(every: list[dict[tuple[str, str], list[tuple[int, float]]]]) -> str:
    """Return the title: whether our time grows less than the size."""
    ours = [points for curves in every for (_, name), points in curves.items() if name == OURS and len(points) > 1]
    slower = ours and all(points[-1][1] / points[0][1] < points[-1][0] / points[0][0] for points in ours)
    grows = "this project's time grows by a smaller factor than the size" if slower else "time over size"
    return f"LSTM, {TRAINING}: {grows}"


COMPLEXITY = Reproduction(
    source="kernels_length",
    what="Milliseconds from the smallest to the largest size, and the exponent of a power law through all sizes; 1 is "
    "linear. Over head size the number of units is constant, so the recurrent product grows linearly with it.",
    measure=lambda options: kernels(options, *SWEPT),
    table=_table,
    draw=_draw,
)
