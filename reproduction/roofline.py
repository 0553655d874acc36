"""Roofline: the fraction of the GPU's peak arithmetic and memory rates that the kernels reach."""

import shutil
from pathlib import Path

from benchmarks.cases import FORWARD, Case
from benchmarks.figures import color, label
from benchmarks.ours import NAME as OURS
from benchmarks.results import case_of, device_folder
from benchmarks.table import times
from flashrnn import get_cell
from reproduction.accuracy import model_name
from reproduction.kernel_speed import jobs
from reproduction.result import Options, Reproduction, Table, benchmark, kernels, known, paper
from training.peaks import peak_bandwidth, peak_flops

SUITES = ("heads", "batch")
_BATCH = 16  # batch size of the cases that differ in their heads


def operations(case: Case) -> int:
    """Return the operations of the recurrent product in a forward pass; those of element-wise steps are negligible."""
    return 2 * len(get_cell(case.function).recurrent_gates) * case.N * case.D**2 * case.B * case.T


def bytes_moved(case: Case) -> int:
    """Return the bytes that a forward pass must read and write at least, in 16 bit: inputs, h and R once."""
    cell = get_cell(case.function)
    per_step = (len(cell.input_gates) + 1) * case.B * case.N * case.D
    return 2 * (per_step * case.T + len(cell.recurrent_gates) * case.N * case.D**2)


def peaks(contents: list[dict]) -> tuple[str, float, float]:
    """Return name, operations per second and bytes per second of the GPU on which the data were measured."""
    gpu = contents[0]["runs"][-1]["machine"]["gpu"]
    flops, bandwidth = peak_flops(gpu), peak_bandwidth(gpu)
    if flops is None or bandwidth is None:
        raise ValueError(f"the peaks of {gpu} are unknown: add them to training/peaks.py")
    return gpu, flops, bandwidth


def _points(contents: list[dict]) -> list[tuple[Case, str, float, float]]:
    """Return case, implementation, operations per byte and operations per second of each point."""
    found = []
    for (case, mode), rows in jobs([content for content in contents if "suite" in content]).items():
        for name, ms in times(rows).items():
            if mode == FORWARD and name != "attention":
                intensity = operations(case) / bytes_moved(case)
                found.append((case, name, intensity, operations(case) / (ms / 1000)))
    return found


def _counted(contents: list[dict]) -> dict[Case, int]:
    """Return the bytes that our forward passes moved from and to memory, if the GPU's counters were read."""
    return {
        case_of(row): sum(kernel["memory_bytes"] for kernel in row["kernels"])
        for content in contents
        if "suite" not in content
        for row in content["rows"]
        if row["mode"] == FORWARD
    }


def _table(contents: list[dict]) -> Table:
    _, most, bandwidth = peaks(contents)
    counted = _counted(contents)
    table = [
        ["case", "implementation", "operations / byte", "TFLOP/s", "of the roof", "bytes counted / least", "paper"]
    ]
    for case, name, intensity, rate in sorted(_points(contents), key=lambda point: point[2]):
        share = rate / min(most, intensity * bandwidth)
        more = f"{counted[case] / bytes_moved(case):.2f}" if name == OURS and case in counted else ""
        numbers = [f"{intensity:.1f}", f"{rate / 1e12:.2f}", f"{share:.1%}", more, known(paper("roofline"))]
        table.append([case.name, name, *numbers])
    return table


def _draw(contents: list[dict], file: Path) -> None:
    """Draw the reached fraction of the roof for the first cell, against head size, and against batch size for each
    network of the batch suite.
    """
    from matplotlib.figure import Figure

    gpu, most, bandwidth = peaks(contents)
    points = _points(contents)
    cell = points[0][0].function
    shares = {(case, name): rate / min(most, x * bandwidth) for case, name, x, rate in points if case.function == cell}
    swept = sorted({(case.N, case.D) for case, _ in shares if case.B != _BATCH}, reverse=True)
    panels = {f"batch {_BATCH}, over head size": {key: key[0].D for key in shares if key[0].B == _BATCH}}
    for N, D in swept:
        title = f"{N} head{'s' * (N > 1)} of {D}, over batch size"
        panels[title] = {key: key[0].B for key in shares if (key[0].N, key[0].D) == (N, D)}
    figure = Figure(figsize=(4.2 * len(panels) + 2, 4.6), layout="constrained")
    drawn = {}
    for axes, (title, sizes) in zip(figure.subplots(1, len(panels), sharey=True), panels.items(), strict=True):
        for name in dict.fromkeys(name for _, name in sizes):
            found = sorted((size, 100 * shares[key]) for key, size in sizes.items() if key[1] == name)
            (drawn[label(name)],) = axes.loglog(*zip(*found, strict=True), "o-", color=color(name))
        axes.axhline(100, color="black")
        axes.text(0.02, 100, "roof", va="bottom", transform=axes.get_yaxis_transform())
        axes.set_title(title, fontsize=11)
        axes.set_xticks(sorted(set(sizes.values())), labels=map(str, sorted(set(sizes.values()))))
        axes.minorticks_off()
    figure.axes[0].set(ylabel="% of the roof", ylim=(None, 250))
    figure.axes[0].yaxis.set_major_formatter(lambda x, _: f"{x:g}")
    figure.legend(drawn.values(), drawn, loc="outside right center")
    ours = [share for (_, name), share in shares.items() if name == OURS]
    reached = f"{min(ours):.0%} to {max(ours):.0%} of the roof" if ours else "the roof"
    figure.suptitle(f"Forward of an {model_name(cell)}: this project reaches {reached} ({gpu})", fontsize=12)
    figure.savefig(file, dpi=150)


def _measure(options: Options) -> list[Path]:
    """Measure times and, if ncu is installed, bytes by the GPU's counters."""
    timed = kernels(options, *SUITES)
    if shutil.which("ncu") is None:
        return timed
    benchmark(options, "counters")
    return [*timed, options.out / device_folder() / "counters.json"]


ROOFLINE = Reproduction(
    source="kernels_heads",
    what="Operations of the recurrent product per second, and their fraction of the roof, which is the limit by memory "
    "bandwidth and tensor cores. The bytes are the minimum: inputs and h once, R once for all steps. If the GPU's "
    "counters were read, a column compares them with this minimum. Small batches stay far below the roof, because each "
    "step waits for the previous one.",
    measure=_measure,
    table=_table,
    draw=_draw,
)
