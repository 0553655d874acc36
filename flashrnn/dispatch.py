"""From a problem to the backend that serves it, or to the reasons why none does."""

import logging
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache

import torch
from torch import Tensor

from flashrnn._torch_private import constant_when_compiled
from flashrnn.cells import Cell, cell_of_key
from flashrnn.cpu.backend import CpuFused
from flashrnn.cuda.backend import CudaFused
from flashrnn.cuda.streaming import CudaStreaming
from flashrnn.problem import Backend, Problem, tf32_allowed
from flashrnn.reference import Reference
from flashrnn.triton.backend import TritonFused

logger = logging.getLogger("flashrnn")

BACKENDS: tuple[Backend, ...] = (CudaFused(), TritonFused(), CudaStreaming(), CpuFused(), Reference())
"""All backends, the one that `auto` prefers first."""


class UnsupportedProblem(ValueError):
    """The backend that was asked for cannot serve the problem."""


def backends() -> tuple[str, ...]:
    """The names of all backends."""
    return tuple(backend.name for backend in BACKENDS)


def check_backend(name: str) -> str:
    """`name` if it is `auto` or a backend's name; raises ValueError otherwise."""
    if name != "auto" and name not in backends():
        raise ValueError(f"unknown backend {name!r}; allowed: auto, {', '.join(backends())}")
    return name


def choose(name: str, problem: Problem) -> Backend:
    """The backend of that name, or for `auto` the first that serves the problem.

    Raises UnsupportedProblem with the backend's own reason if a backend was named that does not serve the problem.
    """
    return _choose(BACKENDS, name, problem)


@lru_cache(maxsize=4096)  # a call asks twice, and an answer can take as long as a short kernel
def _choose(candidates: tuple[Backend, ...], name: str, problem: Problem) -> Backend:
    reasons = {}
    for backend in candidates:
        if name in ("auto", backend.name):
            reason = backend.supports(problem)
            if reason is None:
                if name == "auto":
                    _log_choice(backend.name, problem)
                return backend
            reasons[backend.name] = reason
    raise UnsupportedProblem("; ".join(f"backend {b!r}: {reason}" for b, reason in reasons.items()))


def choose_for(name: str, cell: Cell, rows: Tensor, reset: Tensor | None, training: bool) -> Backend:
    """The backend of that name for a call with such `rows` [B, T, ..., N, D].

    For the backward the same as for the forward before it, or, where PyTorch's setting for TF32 has changed since, one
    that reads what the other has kept.
    """
    tf32 = tf32_allowed(rows.dtype, rows.device)
    sizes = cell, *rows.shape[-2:]
    return choose(name, Problem(*sizes, rows.dtype, rows.device, training, reset is not None, tf32=tf32))


@constant_when_compiled
def padding(
    name: str, cell: str, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, training: bool
) -> int:
    """Units to add to every head so that the fastest backend of that name serves the problem, mostly none."""
    if torch.compiler.is_dynamo_compiling():  # which has not taken this for a constant
        return 0
    if head_dim % 2 == 0 or device.type != "cuda" or name not in ("auto", CudaFused.name):
        return 0
    tf32 = tf32_allowed(dtype, device)
    return units_to_add(Problem(cell_of_key(cell), heads, head_dim, dtype, device, training, reset=False, tf32=tf32))


@lru_cache(maxsize=4096)
def units_to_add(problem: Problem) -> int:
    """Return `padding` for "auto" on the problem's GPU."""
    return CudaFused().padding(problem) if problem.head_dim % 2 else 0


def no_autocast(x: Tensor) -> AbstractContextManager:
    """Inputs come in the dtypes that they are to be computed in."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


@cache
def _log_choice(backend: str, problem: Problem) -> None:
    logger.info(
        "%s %d x %d, %s on %s, by backend %s",
        problem.cell.name, problem.heads, problem.head_dim, problem.dtype, problem.device, backend,
    )  # fmt: skip
