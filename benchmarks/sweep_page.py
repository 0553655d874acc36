"""Page and figure of the sweep, made from its file of results: time and estimate over sizes, and the cliffs."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.cases import MODES, Job
from benchmarks.cliffs import Cliff, Misranked, cliffs, misranked
from benchmarks.markdown import Table, markdown, write_page
from benchmarks.ours import NAME
from benchmarks.results import by_job, milliseconds
from benchmarks.sweep_cases import SERIES, Series

WHAT = """LSTM, bfloat16, 512 time steps, backend "auto": milliseconds over head size and over batch size. A cliff is a
size that takes more than 1.08 times (over batch size 1.05 times) as long as a larger one. The estimate is the solver's
for the time loops at 1.98 GHz; it excludes what is computed outside of them, such as the gradient of R."""

Curves = Mapping[int, float]


def write(path: Path) -> list[Path]:
    """Write the page and the figure of a file of the sweep next to it; return their paths."""
    content = json.loads(path.read_text())
    jobs = by_job(content["rows"])
    figure = path.with_suffix(".png")
    draw(jobs, content["runs"][-1]["machine"]["gpu"], figure)
    paragraphs = [
        "# Time over head size and batch size",
        WHAT,
        f"![time over sizes]({figure.name})",
        "## Cliffs",
        _table(["over", "network", "mode", "size", "ms", "larger size", "its ms", "ratio"], _cliff_rows(jobs)),
        "## Neighbours that the estimate ranks wrongly",
        _table(["over", "network", "mode", "sizes", "ratio by estimate", "measured"], _misranked_rows(jobs)),
    ]
    return [write_page(path, paragraphs), figure]


def _table(header: list[str], rows: Iterator[list[str]]) -> str:
    table: Table = [header, *rows]
    return markdown(table) if len(table) > 1 else "None."


def panels(jobs: dict[Job, dict[str, dict]]) -> Iterator[tuple[Series, str, dict[int, dict]]]:
    """Yield each series and mode with its timed rows by size."""
    for series in SERIES:
        for mode in MODES:
            rows = {getattr(case, series.field): jobs.get(Job(case, mode), {}).get(NAME, {}) for case in series.cases}
            yield series, mode, {size: row for size, row in rows.items() if "ms" in row}


def measured_ms(rows: Mapping[int, dict]) -> Curves:
    return {size: milliseconds(row) for size, row in rows.items()}


def estimated_ms(rows: Mapping[int, dict]) -> Curves:
    return {size: row["estimate_ms"] for size, row in rows.items() if "estimate_ms" in row}


def cliffs_of(series: Series, rows: Mapping[int, dict]) -> list[Cliff]:
    return cliffs(measured_ms(rows), series.tolerance)


def _cliff_rows(jobs: dict[Job, dict[str, dict]]) -> Iterator[list[str]]:
    for series, mode, rows in panels(jobs):
        for cliff in cliffs_of(series, rows):
            times = [str(cliff.size), f"{cliff.ms:.3f}", str(cliff.faster), f"{cliff.faster_ms:.3f}"]
            yield [series.label, series.title, mode, *times, f"{cliff.ratio:.2f}"]


def _misranked_rows(jobs: dict[Job, dict[str, dict]]) -> Iterator[list[str]]:
    for series, mode, rows in panels(jobs):
        for pair in misranked(estimated_ms(rows), measured_ms(rows)):
            yield [series.label, series.title, mode, *_of_pair(pair)]


def _of_pair(pair: Misranked) -> list[str]:
    return [f"{pair.smaller}, {pair.larger}", f"{pair.estimated:.2f}", f"{pair.measured:.2f}"]


def draw(jobs: dict[Job, dict[str, dict]], gpu: str, path: Path) -> None:
    """Draw a row of panels for every series, and a column for every mode."""
    figure = Figure(figsize=(15, 4 * len(SERIES)), layout="constrained")
    grid = figure.subplots(len(SERIES), len(MODES))
    for axes, (series, mode, rows) in zip(grid.flat, panels(jobs), strict=True):
        _curves(axes, series, rows)
        axes.set(title=f"{series.title}, {mode}", xlabel=series.label, ylabel="ms", ylim=(0, None))
        axes.grid(alpha=0.3)
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle(f"{_finding(jobs)} (LSTM, bfloat16, 512 time steps, {gpu})")
    figure.savefig(path, dpi=120)


def _finding(jobs: dict[Job, dict[str, dict]]) -> str:
    """Return the title: how many sizes take longer than a larger one."""
    sizes, found = 0, []
    for series, _, rows in panels(jobs):
        sizes += len(rows)
        found += cliffs_of(series, rows)
    if not found:
        return f"None of {sizes} sizes takes longer than a larger one"
    worst = max(cliff.ratio for cliff in found)
    return f"{len(found)} of {sizes} sizes take longer than a larger one, at most {worst:.2f} times as long"


def _curves(axes: Axes, series: Series, rows: Mapping[int, dict]) -> None:
    curves = {"measured": (measured_ms(rows), "o-"), "solver's estimate of the time loop": (estimated_ms(rows), "k:")}
    for label, (curve, style) in curves.items():
        points = sorted(curve.items())
        axes.plot([x for x, _ in points], [y for _, y in points], style, markersize=4, label=label)
    found = cliffs_of(series, rows)
    axes.plot([cliff.size for cliff in found], [cliff.ms for cliff in found], "rx", markersize=5)
    axes.margins(y=0.15)
    if worst := max(found, key=lambda cliff: cliff.ratio, default=None):
        text = f"{worst.size}: {worst.ratio:.2f} times {worst.faster}"
        place = {"xytext": (-4, 5), "textcoords": "offset points", "ha": "right" if worst.size > 100 else "left"}
        axes.annotate(text, (worst.size, worst.ms), color="r", fontsize=8, **place)
