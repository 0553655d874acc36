"""How the time of the kernels grows with length, batch and head size."""

from pathlib import Path

import numpy as np

from benchmarks.cases import SWEEPS, TRAINING, network
from benchmarks.figures import label
from benchmarks.ours import NAME as OURS
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
    """Draw milliseconds of an LSTM over what each suite varies: a colour per implementation, a line style per
    network."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(contents), 5), layout="constrained")
    figure.suptitle(f"LSTM, {TRAINING}: time over length, batch size and head size")
    every = [
        {(kept, name): points for (kept, mode, name), points in _curves(content).items() if _is_drawn(kept, mode)}
        for content in contents
    ]
    names, networks = (list(dict.fromkeys(key[k] for curves in every for key in curves)) for k in (1, 0))
    styles = {network: ("-", "--", ":")[k % 3] for k, network in enumerate(networks)}
    shown = {}
    for axes, content, curves in zip(figure.subplots(1, len(contents), squeeze=False)[0], contents, every, strict=True):
        for (kept, name), points in curves.items():
            style = {"color": f"C{names.index(name)}", "linestyle": styles[kept], "marker": "o", "markersize": 4}
            (shown[f"{label(name)}, {kept}"],) = axes.plot(*zip(*points, strict=True), **style)
        varied = SWEEPS[content["suite"]][1]
        milliseconds_over(axes, varied, (size for points in curves.values() for size, _ in points))
        axes.set_title(_growth(varied, curves), fontsize=10)
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=5, fontsize=8)
    figure.savefig(file, dpi=150)


def _is_drawn(kept: str, mode: str) -> bool:
    return mode == TRAINING and kept.startswith("lstm")


def _growth(varied: str, curves: dict[tuple[str, str], list[tuple[int, float]]]) -> str:
    """Return how our time grows from the smallest to the largest size."""
    ours = [points for (_, name), points in curves.items() if name == OURS and len(points) > 1]
    if not ours:
        return varied
    growth = sorted(points[-1][1] / points[0][1] for points in ours)
    reached = " to ".join(dict.fromkeys(f"{factor:.1f}" for factor in (growth[0], growth[-1])))
    return f"{varied} × {ours[0][-1][0] / ours[0][0][0]:g}: this project's time × {reached}"


COMPLEXITY = Reproduction(
    source="kernels_length",
    what="Milliseconds from the smallest to the largest size, and the exponent of a power law through all sizes; 1 is "
    "linear. Over head size the number of units is constant, so the recurrent product grows linearly with it.",
    measure=lambda options: kernels(options, *SWEPT),
    table=_table,
    draw=_draw,
)
