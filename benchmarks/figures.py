"""Figures of kernel times, drawn from files of results."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks import floors
from benchmarks.cases import FORWARD, MODES, SWEEPS, Job, network
from benchmarks.ours import NAME as OURS
from benchmarks.ours import OTHERS
from benchmarks.results import by_job
from benchmarks.table import print_table, recurrent_peers, times

_COLORED = (
    OURS, "flashrnn_1.0.8", "cudnn_fp16", "cudnn_bf16", "cudnn_fp32", "attention", *OTHERS, "pytorch_loop",
    "compiled_loop",
)  # fmt: skip
_COLORS = {name: f"C{k}" for k, name in enumerate(_COLORED)}
_LABELS = {
    OURS: "this project",
    "ours_cuda": "this project, cuda",
    "ours_triton_fused": "this project, triton_fused",
    "flashrnn_1.0.8": "FlashRNN 1.0.8",
    "flashrnn_1.0.8_cuda": "FlashRNN 1.0.8, cuda",
    "cudnn_fp16": "cuDNN, float16",
    "cudnn_bf16": "cuDNN, bfloat16",
    "cudnn_fp32": "cuDNN, float32",
    "pytorch_loop": "loop in PyTorch",
    "compiled_loop": "compiled loop",
    "graphed_loop": "loop in a CUDA graph",
    "haste_0.5.0": "Haste, float32",
}
_GAP = 0.7  # gap between two groups of bars, relative to the height of a bar
_OTHER = "black"  # because an eleventh colour of the cycle would be the first one again


def label(implementation: str) -> str:
    """Return the name of an implementation in figures."""
    return _LABELS.get(implementation, implementation)


def color(implementation: str) -> str:
    """Return the colour of an implementation, which is the same in all figures."""
    return _COLORS.get(implementation, _OTHER)


def write(path: Path) -> list[Path]:
    """Print the table of a file of `kernels`, and draw its figure next to it; return the path of the figure."""
    content, figure = json.loads(path.read_text()), path.with_suffix(".png")
    print_table(content["rows"])
    draw(content, figure)
    return [figure]


def draw(content: dict, path: Path) -> None:
    """Draw the curves of a sweep, or the ratios to the peers, in the file `path`."""
    suite, jobs, gpu = content["suite"], by_job(content["rows"]), content["runs"][-1]["machine"]["gpu"]
    if suite in SWEEPS:
        figure = _sweep(jobs, *SWEEPS[suite], with_floor=floors.GPU in gpu)
    else:
        figure = _backends(jobs) if suite == "backends" else _ratios(jobs)
    if suite not in SWEEPS:
        _add_legend(figure)
    figure.suptitle(f"{_title(suite, jobs)} ({gpu}, {Counter(job.case.dtype for job in jobs).most_common(1)[0][0]})")
    figure.savefig(path, dpi=150)


def name_curves(axes: Axes, ends: Mapping[str, tuple[float, str]]) -> None:
    """Write the names of curves to the right of a panel, at the heights where the curves end.

    Args:
        axes: a panel whose limits have been set.
        ends: by name, the y coordinate at which a curve ends, and its colour.
    """
    gap = 0.055  # smallest distance between two names, relative to the height of the panel
    to_panel, place = axes.transScale + axes.transLimits, -gap
    right = axes.get_xlim()[1]
    for name, (y, color) in sorted(ends.items(), key=lambda end: end[1][0]):
        place = max(to_panel.transform((right, y))[1], place + gap)
        axes.text(1.02, place, name, color=color, va="center", fontsize=9, transform=axes.transAxes)


def number_log_axis(axis: Axis) -> None:
    """Label the ticks 1, 2 and 5 of each decade of a logarithmic axis as plain numbers."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(lambda x, _: f"{x:,.12g}")
    axis.set_minor_formatter(NullFormatter())


def _title(suite: str, jobs: dict[Job, dict[str, dict]]) -> str:
    """Return the title of a figure: the smallest and the largest ratio of another kernel's time to ours."""
    if suite == "backends":
        found = [times(rows) for rows in jobs.values() if "ms" in rows.get(OURS, {})]
        ratios = [ms[name] / ms[OURS] for ms in found for name in OTHERS if name in ms]
        others, ours = "This project's other backends", "cuda_fused"
    else:
        ratios = [ratio for of_job in _ratios_of(jobs).values() for ratio in of_job.values()]
        others, ours = "Other recurrent kernels", "this project's"
    if not ratios:
        return "Time of this project's kernels"
    return f"{others} take {min(ratios):.1f} to {max(ratios):.1f} times as long as {ours}"


def _sweep(jobs: dict[Job, dict[str, dict]], field: str, label: str, with_floor: bool) -> Figure:
    """Draw the time per step against the size that the suite varies, with a row of panels for each mode."""
    panels: dict[tuple[str, str], dict[Job, dict[str, dict]]] = {}
    for job, rows in jobs.items():
        panels.setdefault((job.mode, network(job.case, field)), {})[job] = rows
    columns = list(dict.fromkeys(name for _, name in panels))
    figure = Figure(figsize=(1 + 5 * len(columns), 8), layout="constrained")
    axes = figure.subplots(len(MODES), len(columns), squeeze=False, sharex=True)
    for (mode, name), panel in panels.items():
        ax = axes[MODES.index(mode)][columns.index(name)]
        ends = _curves(ax, panel, field)
        if with_floor and mode == FORWARD and name.startswith("lstm"):
            ends |= _floor(ax, panel, field)
        name_curves(ax, ends)
        ax.set(title=f"{name}, {mode}", xlabel=label, ylabel="µs per time step")
    return figure


def _curves(ax: Axes, jobs: dict[Job, dict[str, dict]], field: str) -> dict[str, tuple[float, str]]:
    """Draw a curve for each implementation; return the height at which it ends and its colour, by its name."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for job, rows in jobs.items():
        for name, ms in times(rows).items():
            curves.setdefault(name, []).append((getattr(job.case, field), 1000 * ms / job.case.T))
    for name, points in curves.items():
        ax.plot(*zip(*sorted(points), strict=True), "o-", color=color(name))
    ticks = sorted({getattr(job.case, field) for job in jobs})
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(ticks, labels=map(str, ticks))
    number_log_axis(ax.yaxis)
    ax.grid(alpha=0.3)
    return {label(name): (max(points)[1], color(name)) for name, points in curves.items()}


def _floor(ax: Axes, jobs: dict[Job, dict[str, dict]], field: str) -> dict[str, tuple[float, str]]:
    """Draw the lower bound of a step, labelled with its fraction of our time; return where it ends, by its name."""
    least = sorted((getattr(job.case, field), floors.forward_floor(job.case), job) for job in jobs)
    ax.plot([x for x, *_ in least], [us for _, us, _ in least], "k--")
    for x, us, job in least:
        if ours := times(jobs[job]).get(OURS):
            share = f"{us * job.case.T / (1000 * ours):.0%}"
            ax.annotate(share, (x, us), xytext=(0, -4), textcoords="offset points", ha="center", va="top", fontsize=8)
    return {"bare step (% of ours)": (least[-1][1], "black")}


def _backends(jobs: dict[Job, dict[str, dict]]) -> Figure:
    """Draw the time per step of every implementation that was measured."""
    found = {job: {name: 1000 * ms / job.case.T for name, ms in times(rows).items()} for job, rows in jobs.items()}
    figure = Figure(figsize=(12, _height(found)), layout="constrained")
    names = dict.fromkeys(name for values in found.values() for name in values)
    for ax, mode in zip(figure.subplots(1, len(MODES)), MODES, strict=True):
        _bars(ax, found, mode, {name: color(name) for name in names}, ".2g")
        ax.set(title=mode, xlabel="µs per time step", xscale="log")
        ax.set_xlim(right=1.5 * ax.get_xlim()[1])  # leaves room for the numbers
        number_log_axis(ax.xaxis)
    return figure


def _height(values: Mapping[Job, Mapping[str, float]]) -> float:
    """Return the height in inches at which bars are high enough for their numbers."""
    bars = max(sum(_GAP + len(values[job]) for job in values if job.mode == mode) for mode in MODES)
    return 2 + 0.17 * bars


def _bars(ax: Axes, values: dict[Job, dict[str, float]], mode: str, colors: dict[str, str], form: str) -> None:
    """Draw the values of a mode as a group of bars for each case, labelled with their numbers in the format `form`."""
    shown = {job.case: of_case for job, of_case in values.items() if job.mode == mode}
    top, middles = 0.0, []
    for of_case in shown.values():
        middles.append(top + (len(of_case) - 1) / 2)
        for k, (name, value) in enumerate(of_case.items()):
            ax.barh(top + k, value, 1, color=colors[name])
            ax.text(value, top + k, f" {value:{form}}", va="center", fontsize=7)
        top += len(of_case) + _GAP
    for name, of_name in colors.items():
        ax.barh(0, 0, color=of_name, label=label(name))
    ax.set_yticks(middles, labels=[f"{c.function} {c.N}×{c.D} B={c.B}" for c in shown])
    ax.margins(y=0.01)
    ax.invert_yaxis()


def _add_legend(figure: Figure) -> None:
    """Add one legend for all panels, outside of them, where it does not cover curves and bars."""
    shown = [zip(*ax.get_legend_handles_labels(), strict=True) for ax in figure.axes]
    labels = {label: handle for panel in shown for handle, label in panel}
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=int(figure.get_figwidth() // 2.5))


def _ratios_of(jobs: dict[Job, dict[str, dict]]) -> dict[Job, dict[str, float]]:
    """Return the time of each recurrent peer relative to ours, where both were measured."""
    found = {
        job: {name: ms / times(rows)[OURS] for name, ms in recurrent_peers(times(rows)).items()}
        for job, rows in jobs.items()
        if "ms" in rows.get(OURS, {})
    }
    return {job: ratios for job, ratios in found.items() if ratios}


def _ratios(jobs: dict[Job, dict[str, dict]]) -> Figure:
    """Draw a bar for each peer's time relative to ours."""
    ratios = _ratios_of(jobs)
    peers = dict.fromkeys(name for found in ratios.values() for name in found)
    figure = Figure(figsize=(12, _height(ratios)), layout="constrained")
    for ax, mode in zip(figure.subplots(1, len(MODES)), MODES, strict=True):
        _bars(ax, ratios, mode, {name: color(name) for name in peers}, ".1f")
        ax.axvline(1, color="black", linewidth=1)
        ax.margins(x=0.08, y=0.01)
        ax.spines[["top", "right"]].set_visible(False)
        ax.set(title=mode, xlabel="time of the other kernel / time of this project's (line: equal)")
    return figure
