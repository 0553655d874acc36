"""Speed of the kernels, from files of scripts.benchmark."""

from collections import Counter
from pathlib import Path

from benchmarks.cases import FORWARD, HIDDEN, MODES, TRAINING, Case, Job
from benchmarks.figures import color, label, name_curves
from benchmarks.markdown import markdown
from benchmarks.ours import NAME as OURS
from benchmarks.results import by_job
from benchmarks.table import fastest_peer, times
from reproduction.axes import milliseconds_over
from reproduction.result import Reproduction, Table, kernels, paper


def jobs(contents: list[dict]) -> dict[Job, dict[str, dict]]:
    """Return the rows by job and implementation, with their runs as (file, run).

    If several files contain a job, the first full run counts, or otherwise the first one; the other files only add
    implementations that it lacks.
    """

    def quick(rows: dict[str, dict]) -> bool:
        runs = (contents[file]["runs"][run] for file, run in (row["run"] for row in rows.values()))
        # Earlier files contain only the command.
        return any(run.get("quick", "--quick" in run["command"]) for run in runs)

    found: dict[Job, list[dict[str, dict]]] = {}
    for file, content in enumerate(contents):
        for job, rows in by_job(content["rows"]).items():
            found.setdefault(job, []).append({name: row | {"run": (file, row["run"])} for name, row in rows.items()})
    return {
        job: {name: row for rows in sorted(reversed(parts), key=quick, reverse=True) for name, row in rows.items()}
        for job, parts in found.items()
    }


_SHORT = {FORWARD: "forward", TRAINING: "training"}


def _table(contents: list[dict]) -> Table:
    measured = jobs(contents)
    names = list(dict.fromkeys(name for rows in measured.values() for name in times(rows) if name != OURS))
    header = ["cell, heads × size, batch, steps", "mode", *map(label, (OURS, *names)), "fastest recurrent peer / ours"]
    table = [header]
    for (case, mode), rows in measured.items():
        ms = times(rows)
        fastest = fastest_peer(ms)
        ratio = f"{ms[fastest] / ms[OURS]:.1f}" if fastest and OURS in ms else ""
        if ratio and rows[fastest]["run"] != rows[OURS]["run"]:
            ratio += " †"
        what = f"{case.function}, {case.N} × {case.D}, {case.B}, {case.T}"
        cells = [f"{ms[name]:.2f}" if name in ms else "" for name in (OURS, *names)]
        table.append([what, _SHORT[mode], *cells, ratio])
    return table


def _beside_paper(contents: list[dict]) -> list[str]:
    """Return a table of the sizes of the paper that were measured, with the paper's values."""
    published = paper("kernel_speed")
    measured = jobs(contents)
    shown = {D: measured.get(Job(Case("lstm", HIDDEN // D, D, 16), TRAINING), {}) for D in published["CUDA fused"]}
    if not any(shown.values()):
        return []
    here: dict[str, dict[int, float]] = {}
    for size, rows in shown.items():
        for name, ms in times(rows).items():
            here.setdefault(f"here, {label(name)}", {})[size] = ms
    table = [["head size", *map(str, shown)]]
    for name, bars in ({f"paper, {name}": bars for name, bars in published.items()} | here).items():
        table.append([name, *(f"{bars[size]:.2f}" if size in bars else "" for size in shown)])
    said = (
        "The table compares the paper's times on an H100 with the times measured here: milliseconds for forward and "
        f"backward of an LSTM with {HIDDEN} units, batch 16 and 1024 steps. The paper's nn.LSTM runs in float16 and "
        "batch first, and its time includes the product with the inputs (`speed_experiments` in "
        "github.com/NX-AI/flashrnn). Here it runs time first, which is faster, and the times exclude that product. "
        "Timed as in the paper it takes 6.7 to 6.9 ms with cuDNN 9.19, on an H100 and on an H200. No dtype, memory "
        "format, set of gradients or way of timing that was tried makes this 5.19 ms (`benchmark nn_lstm`, "
        "docs/dev/log.md). The likely cause is the version: the paper's environment has PyTorch 2.4, which comes with "
        "cuDNN 9.1."
    )
    return [said, markdown(table)]


def attention_kernels(contents: list[dict]) -> Counter[str]:
    """Return how often each attention kernel was the fastest, in files that record it."""
    return Counter(
        row["kernel"]
        for rows in jobs(contents).values()
        for name, row in rows.items()
        if name == "attention" and "kernel" in row
    )


def _notes(contents: list[dict]) -> list[str]:
    found = attention_kernels(contents).most_common()
    by = ", ".join(f"{name} ({number} times)" for name, number in found)
    said = (
        [f"Attention is timed with all kernels that PyTorch has for it, and the fastest counts: {by}."] if found else []
    )
    return [*said, *_beside_paper(contents)]


def _draw(contents: list[dict], file: Path) -> None:
    """Draw milliseconds against head size for 16 sequences of 1024 steps, with a row of panels per mode."""
    from matplotlib.figure import Figure

    measured = {job: rows for job, rows in jobs(contents).items() if (job.case.B, job.case.T) == (16, 1024)}
    cells = list(dict.fromkeys(row["function"] for row in contents[0]["rows"]))
    figure = Figure(figsize=(max(7, 6 * len(cells)), 9), layout="constrained")
    for row, mode in zip(figure.subplots(len(MODES), len(cells), squeeze=False), MODES, strict=True):
        for axes, cell in zip(row, cells, strict=True):
            here = {
                job.case.D: times(rows)
                for job, rows in measured.items()
                if job.mode == mode and job.case.function == cell
            }
            ends = {}
            for name in dict.fromkeys(name for ms in here.values() for name in ms):
                points = sorted((size, ms[name]) for size, ms in here.items() if name in ms)
                axes.plot(*zip(*points, strict=True), "o-", color=color(name))
                ends[label(name)] = points[-1][1], color(name)
            milliseconds_over(axes, "head size", here)
            name_curves(axes, ends)
            axes.set_title(f"{cell}, {mode}")
    figure.suptitle(f"{_finding(measured)} (768 units, batch 16, 1024 steps, bfloat16)")
    figure.savefig(file, dpi=150)


def _finding(measured: dict[Job, dict[str, dict]]) -> str:
    """Return the title: the smallest and the largest ratio of the fastest recurrent peer's time to ours."""
    found = [times(rows) for rows in measured.values()]
    ratios = [ms[fastest_peer(ms)] / ms[OURS] for ms in found if OURS in ms and fastest_peer(ms)]
    if not ratios:
        return "Time over head size"
    return f"The fastest other recurrent kernel takes {min(ratios):.1f} to {max(ratios):.1f} times as long"


KERNEL_SPEED = Reproduction(
    source="kernels_heads",
    what="Median times in milliseconds: forward computes h, training computes h and all gradients. † means that the "
    "peer was timed in another run.",
    measure=lambda options: kernels(options, "heads", "batch", "length", "short"),
    table=_table,
    draw=_draw,
    notes=_notes,
)
