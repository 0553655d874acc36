"""Time over head size and over batch size, compared with the solver's estimate: many sizes, few calls of each."""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks import ours, sweep_page
from benchmarks.cases import MODES, TRAINING, Case, Job, matching
from benchmarks.kernels import InProcess, measure
from benchmarks.results import KernelResults, gpu_folder, head
from benchmarks.sweep_cases import CASES
from benchmarks.timing import QUICK, measure_in_a_row, random_inputs
from flashrnn import flashrnn
from flashrnn.gpu import device_gpu
from flashrnn.plan import auto_backend, plans

WHAT = """Milliseconds to compute h without gradients (forward), or with those of Wx, R and b (forward+backward):
consecutive calls, measured by events on the device, with the host ahead. estimate_ms: the solver's estimate for the
time loops of its best tilings, at 1.98 GHz; cuda_fused uses the next tilings if these spill registers. errors:
relative errors against float64 over the first steps."""

_CYCLES_PER_MS = 1.98e6  # clock of an H200 that is not at its power limit


def run(case: Sequence[str], out: Path, commit: str) -> None:
    """Measure the cases that are missing in the file of the sweep, and write its page and figure."""
    cases = matching(CASES, case, "the sweep")
    path = out / gpu_folder() / "sweep.json"
    results = KernelResults(path, {"what": " ".join(WHAT.split()), "suite": "sweep"}, head(commit))
    missing = [case for case in cases if any(results.missing(Job(case, mode), ours.NAME) for mode in MODES)]
    compile_ahead(missing)
    measure(missing, [InProcess(ours.NAME, lambda job, effort: row(job))], results, QUICK)
    print(path, *sweep_page.write(path), sep="\n")


def compile_ahead(cases: Sequence[Case]) -> None:
    """Compile the kernels of the cases into the cache folder, with one process per core.

    Errors are ignored here, because they occur again in the measurement, where they are results.
    """
    if not cases:
        return
    with ProcessPoolExecutor(min(os.cpu_count() or 1, len(cases)), get_context("spawn")) as pool:
        wait([pool.submit(_first_calls, case) for case in cases])


def _first_calls(case: Case) -> None:
    case = replace(case, T=ours.CHECKED_STEPS)
    inputs = random_inputs(case.shapes(), getattr(torch, case.dtype))
    d_h = torch.zeros(case.B, case.T, case.N, case.D, device="cuda")
    for mode in MODES:
        ours.results(case, mode, inputs, d_h, "auto")


def row(job: Job) -> dict:
    """Measure the backend that "auto" selects; return it with its estimate, errors and time."""
    case = job.case
    expected = expectation(job)
    errors = ours.check(job, "auto", "cuda")
    inputs = random_inputs(case.shapes(), getattr(torch, case.dtype))
    timed = measure_in_a_row(lambda: flashrnn(*inputs, function=case.function)[0], inputs, job.mode == TRAINING)
    return expected | {"errors": errors} | timed


def expectation(job: Job) -> dict:
    """Return the backend that runs the job and, if it is cuda_fused, the tilings and the estimated time."""
    case, gpu = job.case, device_gpu(torch.cuda.current_device())
    sizes, dtype = (case.function, case.N, case.D), getattr(torch, case.dtype)
    backend = auto_backend(*sizes, dtype, gpu, training=job.mode == TRAINING)
    if backend != ours.BACKEND:
        return {"backend": backend}
    directions = ("forward", "backward") if job.mode == TRAINING else ("forward",)
    first = {direction: next(plans(direction, *sizes, case.B, dtype, gpu)) for direction in directions}
    cycles = case.T * sum(plan.cycles for plan in first.values())
    tilings = {direction: str(plan) for direction, plan in first.items()}
    return {"backend": backend, "tilings": tilings, "estimate_ms": round(cycles / _CYCLES_PER_MS, 4)}
