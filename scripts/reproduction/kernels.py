"""Speed and accuracy of the kernels, from the files of scripts.benchmark."""

from pathlib import Path

from scripts.benchmarks import numerical_error
from scripts.benchmarks.cases import MODES, Job
from scripts.benchmarks.ours import NAME as OURS
from scripts.benchmarks.results import by_job, device_slug
from scripts.benchmarks.table import recurrent_peers, times
from scripts.reproduction.axes import milliseconds_over
from scripts.reproduction.result import Options, Reproduction, Table, benchmark, kernels, known, paper


def _jobs(contents: list[dict]) -> dict[Job, dict[str, dict]]:
    """Rows by job and implementation; of files that share a job, that named first, which is no quick one."""
    jobs: dict[Job, dict[str, dict]] = {}
    for content in contents:
        for job, rows in by_job(content["rows"]).items():
            jobs[job] = rows | jobs.get(job, {})
    return jobs


def _speed_table(contents: list[dict]) -> Table:
    jobs = _jobs(contents)
    names = list(dict.fromkeys(name for rows in jobs.values() for name in times(rows) if name != OURS))
    table = [
        ["cell, heads × size, batch, steps", "mode", OURS, *names, "fastest recurrent peer / ours", "paper, Triton"]
    ]
    for (case, mode), rows in jobs.items():
        ms = times(rows)
        peers = recurrent_peers(ms)
        ratio = f"{min(peers.values()) / ms[OURS]:.1f}" if peers and OURS in ms else ""
        what = f"{case.function}, {case.N} × {case.D}, {case.B}, {case.T}"
        cells = [f"{ms[name]:.2f}" if name in ms else "" for name in (OURS, *names)]
        table.append([what, mode, *cells, ratio, known(paper("kernel_speed").get(case.D), ".1f")])
    return table


def _draw_speed(contents: list[dict], file: Path) -> None:
    """Milliseconds over head size, 16 sequences of 1024 steps; a panel for forward and for training."""
    from matplotlib.figure import Figure

    jobs = _jobs(contents)
    figure = Figure(figsize=(11, 5), layout="constrained")
    for axes, mode in zip(figure.subplots(1, len(MODES)), MODES, strict=True):
        curves: dict[str, list[tuple[int, float]]] = {}
        for (case, its_mode), rows in jobs.items():
            if its_mode == mode and case.function == "lstm" and (case.B, case.T) == (16, 1024):
                for name, ms in times(rows).items():
                    curves.setdefault(name, []).append((case.D, ms))
        for name, points in curves.items():
            axes.plot(*zip(*sorted(points), strict=True), "o-", label=name)
        published = paper("kernel_speed")
        axes.plot(published.keys(), published.values(), "kx:", label="paper's Triton kernels, setting not known")
        milliseconds_over(axes, "head size", (size for points in curves.values() for size, _ in points))
        axes.set_title(f"LSTM, {mode}")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(file, dpi=150)


def _measure_error(options: Options) -> list[Path]:
    benchmark(options, "numerical_error")
    return [options.out / f"numerical_error_{device_slug()}.json"]


def _error_table(contents: list[dict]) -> Table:
    table = [["cell", "dtype", "backend", "first steps", "largest", "last steps", "paper, bfloat16"]]
    for row in contents[0]["rows"]:
        error = row["error"]
        published = f"near {paper('numerical_error')}" if row["dtype"] == "bfloat16" else "not known"
        numbers = [f"{value:.5f}" for value in (error[0], max(error), error[-1])]
        table.append([row["cell"], row["dtype"], row["backend"], *numbers, published])
    return table


KERNEL_SPEED = Reproduction(
    source="kernels_main",
    what="Milliseconds (medians) of h alone, or of h and all gradients. For the paper's Triton kernels the head size "
    "is known here, not the cell, the batch, the length or whether it is forward alone: no ratio is formed with it.",
    measure=lambda options: kernels(options, "main"),
    table=_speed_table,
    draw=_draw_speed,
)
NUMERICAL_ERROR = Reproduction(
    source="numerical_error",
    what="Relative error of h against float64, mean of 128 steps each; the paper finds it bounded, however long the "
    "sequence.",
    measure=_measure_error,
    table=_error_table,
    draw=lambda contents, file: numerical_error.draw(contents[0], file),
)
