"""Page and figure of `layers`, made from its file of results."""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from matplotlib.figure import Figure

from benchmarks.cases import MODES
from benchmarks.figures import number_log_axis
from benchmarks.layer_cases import LayerCase
from benchmarks.layers import OURS, case_of
from benchmarks.markdown import markdown, write_page


def write(path: Path) -> list[Path]:
    """Write the page and the figure of a file of `layers` next to it; return their paths."""
    content = json.loads(path.read_text())
    machine, found = content["machine"], [row for row in content["rows"] if "ratio" in row]
    device = machine["gpu"] or f"{machine['processor']}, {machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    figure = path.with_suffix(".png")
    draw(found, device, figure)
    precisions = list(dict.fromkeys(row["precision"] for row in found))
    paragraphs = [
        f"# Layers compared with PyTorch's: {device}",
        content["what"],
        "A ratio above 1 says how many times faster FlashRNN is.",
        _summary(found, precisions),
        f"![ratios]({figure.name})",
        *(text for name in precisions for text in (f"## {name}", _table(found, name))),
    ]
    return [write_page(path, paragraphs), figure]


def ratios(rows: list[dict], precision: str, mode: str) -> dict[LayerCase, float]:
    """Return PyTorch's time relative to ours, by network."""
    chosen = [row for row in rows if (row["precision"], row["mode"]) == (precision, mode)]
    return {case_of(row): row["ratio"] for row in chosen}


def _summary(rows: list[dict], precisions: list[str]) -> str:
    lines = [["precision", "mode", "networks", "median", "worst", "slower than PyTorch's by over 3 %"]]
    for name in precisions:
        for mode in MODES:
            found = ratios(rows, name, mode)
            if found:
                worst = min(found, key=found.get)
                slower = sum(ratio < 0.97 for ratio in found.values())
                values = f"{median(found.values()):.2f}", f"{found[worst]:.2f} ({_title(worst)})", str(slower)
                lines.append([name, mode, str(len(found)), *values])
    return markdown(lines)


def _table(rows: list[dict], precision: str) -> str:
    header = ["network", *(f"{mode}, {what}" for mode in MODES for what in ("ms", "ratio"))]
    return markdown([header, *_lines(rows, precision)])


def _lines(rows: list[dict], precision: str) -> Iterator[list[str]]:
    by_case: dict[LayerCase, dict[str, dict]] = {}
    for row in rows:
        if row["precision"] == precision:
            by_case.setdefault(case_of(row), {})[row["mode"]] = row
    for case, modes in by_case.items():
        cells = [
            text
            for row in (modes.get(mode) for mode in MODES)
            for text in ((f"{row['ms'][OURS]['p50']:.3f}", f"{row['ratio']:.2f}") if row else ("", ""))
        ]
        yield [_title(case), *cells]


def _title(case: LayerCase) -> str:
    kinds = [f"{case.num_layers} layers"] * (case.num_layers > 1) + ["bidirectional"] * case.bidirectional
    sizes = f"B = {case.B}, T = {case.T}, H = {case.H}"
    return ", ".join([f"{case.family}: {case.cell}", sizes, *kinds, *["resets"] * case.reset])


def _finding(rows: list[dict]) -> str:
    """Return the title: the median ratio of PyTorch's time to FlashRNN's for each cell."""
    by_cell: dict[str, list[float]] = {}
    for row in rows:
        by_cell.setdefault(row["cell"], []).append(row["ratio"])
    return "Median speed-up over PyTorch: " + ", ".join(f"{cell} {median(r):.2f}" for cell, r in by_cell.items())


def draw(rows: list[dict], device: str, path: Path) -> None:
    """Draw a panel for every mode, with a point for every network, by family, cell and precision."""
    families = list(dict.fromkeys(row["family"] for row in rows))
    groups = list(dict.fromkeys((row["precision"], row["cell"]) for row in rows))
    figure = Figure(figsize=(12, 5), layout="constrained")
    for axes, mode in zip(figure.subplots(1, len(MODES), sharey=True), MODES, strict=True):
        found = {name: ratios(rows, name, mode) for name, _ in groups}
        for shift, (name, cell) in enumerate(groups):
            points = {case: ratio for case, ratio in found[name].items() if case.cell == cell}
            places = [families.index(case.family) + 0.2 * (shift - (len(groups) - 1) / 2) for case in points]
            axes.plot(list(points.values()), places, "o", alpha=0.6, markersize=5, label=f"{cell}, {name}")
        axes.axvline(1, color="black", linewidth=1)
        middle = median(ratio for of_precision in found.values() for ratio in of_precision.values())
        axes.set(xscale="log", title=f"{mode}: median {middle:.2f}", xlabel="time of PyTorch / time of FlashRNN")
        number_log_axis(axes.xaxis)
        axes.set_yticks(range(len(families)), families)
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(groups))
    figure.suptitle(f"{_finding(rows)} ({device}; right of the line FlashRNN is faster)")
    figure.savefig(path, dpi=120)
