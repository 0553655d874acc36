"""Axes of figures over sizes and over tokens."""

from collections.abc import Iterable

from matplotlib.axes import Axes

from benchmarks.figures import number_log_axis


def milliseconds_over(axes: Axes, label: str, sizes: Iterable[int]) -> None:
    """Make both axes logarithmic, with the sizes as ticks."""
    ticks = sorted(set(sizes))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, labels=map(str, ticks))
    number_log_axis(axes.yaxis)
    axes.set(xlabel=label, ylabel="ms")
    axes.grid(alpha=0.3)


def over_tokens(axes: Axes) -> None:
    """Make the horizontal axis logarithmic, with units of tokens."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}")
    axes.grid(alpha=0.3)
