"""This project's kernels, which are only timed if their results are correct."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.cases import TRAINING, Case, Job
from benchmarks.timing import Effort, measure, random_inputs
from flashrnn import flashrnn
from flashrnn.accuracy import BOUNDS, relative_error

NAME, BACKEND = "ours", "cuda_fused"
OTHERS = {f"{NAME}_{backend}": backend for backend in ("cuda", "triton_fused")}
"""This project's other backends, by the names of their implementations."""

CHECKED_STEPS = 128
"""Number of time steps of the check: enough that the backward pass runs the same kernels as for long sequences."""


def is_ours(implementation: str) -> bool:
    return implementation == NAME or implementation in OTHERS


def run(job: Job, effort: Effort, backend: str = BACKEND) -> dict:
    """Return the errors, time and memory of computing h, or h and the gradients."""
    checked = check(job, backend, "cuda")
    case = job.case
    inputs = random_inputs(case.shapes(), getattr(torch, case.dtype))

    def forward() -> Tensor:
        return flashrnn(*inputs, function=case.function, backend=backend)[0]

    return {"errors": checked} | measure(forward, inputs, job.mode == TRAINING, effort)


def check(job: Job, backend: str, device: str) -> dict[str, float]:
    """Return the relative errors of the job's results over a few steps.

    The batch size is that of the case, because tilings, and thus kernels, depend on it.
    """
    case = replace(job.case, T=min(job.case.T, CHECKED_STEPS))
    dtype = getattr(torch, case.dtype)
    inputs = random_inputs(case.shapes(), dtype, device)
    d_h = torch.randn(case.B, case.T, case.N, case.D, device=device).to(dtype)

    def run(dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
        return results(case, job.mode, [x.detach().to(dtype).requires_grad_() for x in inputs], d_h, backend)

    return errors(run, dtype, backend)


def errors(run: Callable[[torch.dtype, str], dict[str, Tensor]], dtype: torch.dtype, backend: str) -> dict[str, float]:
    """Return the relative errors of the results of `run` for a dtype and a backend, against the float64 reference.

    They must not exceed the bound of the dtype, or three times the errors of the reference in this dtype if those are
    larger.
    """
    exact = run(torch.float64, "vanilla")
    found = _relative_errors(run(dtype, backend), exact)
    if not all(error <= BOUNDS[dtype] for error in found.values()):  # also catches NaN
        rounded = _relative_errors(run(dtype, "vanilla"), exact)
        bounds = {name: max(BOUNDS[dtype], 3 * rounded[name]) for name in found}
        if not all(found[name] <= bounds[name] for name in found):
            said = ", ".join(f"{name} {found[name]:.1e} (bound {bounds[name]:.1e})" for name in found)
            raise ArithmeticError(f"relative errors against the float64 reference: {said}")
    return {name: float(f"{error:.2e}") for name, error in found.items()}


def _relative_errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {name: relative_error(result, exact[name]) for name, result in found.items()}


def results(case: Case, mode: str, inputs: Sequence[Tensor], d_h: Tensor, backend: str) -> dict[str, Tensor]:
    """Return h and, in mode TRAINING, the gradients of the inputs."""
    with torch.set_grad_enabled(mode == TRAINING):
        h, _ = flashrnn(*inputs, function=case.function, backend=backend)
    if mode != TRAINING:
        return {"h": h}
    gradients = torch.autograd.grad(h, inputs, d_h.to(h.dtype))
    return {"h": h.detach()} | dict(zip(("d_Wx", "d_R", "d_b"), gradients, strict=True))
