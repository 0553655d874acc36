"""A table of kernel times of all implementations."""

from benchmarks.ours import NAME as OURS
from benchmarks.ours import is_ours
from benchmarks.results import by_job, milliseconds

_NO_KERNELS = ("attention", "pytorch_loop", "compiled_loop", "graphed_loop")  # not recurrent kernels


def times(rows: dict[str, dict]) -> dict[str, float]:
    """Return the milliseconds of each implementation that was measured, by its name."""
    return {name: milliseconds(row) for name, row in rows.items() if "ms" in row}


def recurrent_peers(ms: dict[str, float]) -> dict[str, float]:
    """Return only the recurrent kernels of others, without attention and loops in PyTorch."""
    return {name: value for name, value in ms.items() if not is_ours(name) and name not in _NO_KERNELS}


def fastest_peer(ms: dict[str, float]) -> str | None:
    return min(recurrent_peers(ms), key=ms.get, default=None)


def print_table(rows: list[dict]) -> None:
    """Print the milliseconds of every implementation, ours also in µs per step, and the ratio to the fastest peer."""
    jobs = by_job(rows)
    peers = list(dict.fromkeys(name for found in jobs.values() for name in found if name != OURS))
    lines = [["case", "mode", OURS, "µs/step", *peers, "ratio"]]
    for job, found in jobs.items():
        ms = times(found)
        fastest = fastest_peer(ms)
        step = f"{1000 * ms[OURS] / job.case.T:.3f}" if OURS in ms else ""
        ratio = f"{ms[fastest] / ms[OURS]:.2f}" if fastest and OURS in ms else ""
        cells = [_cell(found, name) for name in (OURS, *peers)]
        lines.append([job.case.name, job.mode, cells[0], step, *cells[1:], ratio])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _cell(rows: dict[str, dict], name: str) -> str:
    if name not in rows:
        return ""
    return "error" if "error" in rows[name] else f"{milliseconds(rows[name]):.3f}"
