"""What the CUDA backends require of a machine and of a cell."""

from importlib.util import find_spec

import torch

from flashrnn.cells.trace import untraceable
from flashrnn.problem import Problem


def unavailable(problem: Problem, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Return why kernels for these dtypes cannot run the problem at any size; None if they can."""
    if problem.device.type != "cuda":
        return f"it runs on CUDA GPUs, not on {problem.device.type}"
    if torch.version.hip:
        return "it needs an NVIDIA GPU"
    if reason := problem.dtype_reason(dtypes):
        return reason
    if not (_installed("cuda.core") and _installed("cuda.bindings")):
        return "cuda-core is not installed: pip install '.[cuda]' in a clone of flashrnn-lm"
    return problem.gpu_reason() or untraceable(problem.cell)


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is not installed
        return False
