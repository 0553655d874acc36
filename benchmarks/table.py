"""A table of kernel times with those of others, and of the targets for ours."""

from dataclasses import replace

from benchmarks.cases import FORWARD, HIDDEN, TRAINING, Job
from benchmarks.ours import NAME as OURS
from benchmarks.ours import is_ours
from benchmarks.results import by_job, milliseconds

FLASHRNN, FASTEST = "flashrnn_1.0.8", "the faster peer"
_RATIO_TARGETS = {
    (12, 64, 16): (6, FLASHRNN),
    (12, 64, 32): (8, FLASHRNN),
    (12, 64, 64): (8, FLASHRNN),
    (48, 16, 16): (4, FLASHRNN),
    (24, 32, 16): (4, FLASHRNN),
    (6, 128, 16): (4, FLASHRNN),
    (3, 256, 16): (4, FLASHRNN),
    (1, HIDDEN, 16): (1.5, FASTEST),
    (1, HIDDEN, 32): (2.5, FASTEST),
    (1, HIDDEN, 64): (2.5, FASTEST),
}
"""LSTM, forward and backward, T = 1024: how many times faster than which peer, by (N, D, B)."""

_NO_KERNELS = ("attention", "pytorch_loop", "compiled_loop", "graphed_loop")  # not recurrent kernels
_STEP_TARGET = 0.40  # µs per time step of an LSTM's forward pass with 12 x 64 and up to 64 sequences
_CELL_TARGET = 1.3  # time of other cells' forward and backward relative to the LSTM's
_MEMORY_TARGET = 1.0  # peak memory relative to that of flashrnn 1.0.8


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
    lines = [["case", "mode", OURS, "µs/step", *peers, "ratio", "targets"]]
    for job, found in jobs.items():
        ms = times(found)
        fastest = fastest_peer(ms)
        step = f"{1000 * ms[OURS] / job.case.T:.3f}" if OURS in ms else ""
        ratio = f"{ms[fastest] / ms[OURS]:.2f}" if fastest and OURS in ms else ""
        cells = [_cell(found, name) for name in (OURS, *peers)]
        lines.append([job.case.name, job.mode, cells[0], step, *cells[1:], ratio, "; ".join(verdicts(job, jobs))])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _cell(rows: dict[str, dict], name: str) -> str:
    if name not in rows:
        return ""
    return "error" if "error" in rows[name] else f"{milliseconds(rows[name]):.3f}"


def verdicts(job: Job, jobs: dict[Job, dict[str, dict]]) -> list[str]:
    """Return, for each target that applies to the job and can be judged, the reached value and whether it suffices."""
    case, ms = job.case, times(jobs[job])
    if OURS not in ms or case.T != 1024:
        return []
    found = []
    target, peer = _RATIO_TARGETS.get((case.N, case.D, case.B), (None, None))
    against = ms.get(fastest_peer(ms) if peer == FASTEST else peer)
    lstm = times(jobs.get(Job(replace(case, function="lstm"), job.mode), {}))
    if case.function == "lstm" and job.mode == TRAINING and against:
        found.append(_verdict(against / ms[OURS], target, f"times as fast as {peer}", at_least=True))
    if case.function != "lstm" and job.mode == TRAINING and OURS in lstm:
        found.append(_verdict(ms[OURS] / lstm[OURS], _CELL_TARGET, "times the LSTM's time"))
    if case.function == "lstm" and job.mode == FORWARD and (case.N, case.D) == (12, 64) and case.B <= 64:
        found.append(_verdict(1000 * ms[OURS] / case.T, _STEP_TARGET, "µs per step"))
    if job.mode == TRAINING and FLASHRNN in ms and (case.N, case.D, case.B) == (12, 64, 64):
        memory = jobs[job][OURS]["peak_mib"] / jobs[job][FLASHRNN]["peak_mib"]
        found.append(_verdict(memory, _MEMORY_TARGET, f"times the memory of {FLASHRNN}"))
    return found


def _verdict(value: float, target: float, what: str, at_least: bool = False) -> str:
    missed = value < target if at_least else value > target
    return f"{value:.2f} {what} (target: at {'least' if at_least else 'most'} {target:g}{', missed' if missed else ''})"
