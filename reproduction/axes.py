"""Axes of times over sizes."""

from collections.abc import Iterable

from matplotlib.axes import Axes

from benchmarks.figures import number_log_axis


def milliseconds_over(axes: Axes, label: str, sizes: Iterable[int]) -> None:
    """Make both axes logarithmic, with the sizes themselves as ticks."""
    ticks = sorted(set(sizes))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, labels=map(str, ticks))
    number_log_axis(axes.yaxis)
    axes.set(xlabel=label, ylabel="ms")
    axes.grid(alpha=0.3)
