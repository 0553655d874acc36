"""From a problem to the backend that serves it, or to the reasons why none does."""

import logging
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache

import torch
from torch import Tensor

from flashrnn._torch_private import constant_when_compiled
from flashrnn.cells import Cell, cell_of_key
from flashrnn.cpu.backend import NUMBA_IS_MISSING, CpuFused
from flashrnn.cuda.resident.backend import CudaFused
from flashrnn.cuda.streaming.backend import Cuda
from flashrnn.problem import (
    Backend,
    Gradients,
    Inputs,
    KernelUnavailable,
    Problem,
    StateGradients,
    States,
    aux_dtype,
    tf32_allowed,
)
from flashrnn.reference import Reference
from flashrnn.residual import GateFormat, Residual
from flashrnn.triton.backend import TritonFused

logger = logging.getLogger("flashrnn")

CPU_FUSED, VANILLA = CpuFused(), Reference()
BACKENDS: tuple[Backend, ...] = (CudaFused(), TritonFused(), Cuda(), CPU_FUSED, VANILLA)
"""All backends, the one that `auto` prefers first."""


class UnsupportedProblem(ValueError):
    """The named backend cannot serve the problem; the message says why."""


def backends() -> tuple[str, ...]:
    """Return the names of all backends, the one that `auto` prefers first."""
    return tuple(backend.name for backend in BACKENDS)


def check_backend(name: str) -> str:
    """Return `name` if it is `auto` or a backend's name; raises ValueError otherwise."""
    if name != "auto" and name not in backends():
        raise ValueError(f"unknown backend {name!r}; allowed: auto, {', '.join(backends())}")
    return name


def choose(name: str, problem: Problem) -> Backend:
    """Return the backend of that name, or for `auto` the first that serves the problem.

    Raises UnsupportedProblem with the backend's own reason if a backend was named that does not serve the problem.
    """
    return _choose(BACKENDS, name, problem)


@lru_cache(maxsize=4096)  # an answer can take as long as a short kernel
def _refusal(backend: Backend, problem: Problem) -> str | None:
    return backend.unsupported_reason(problem)


@lru_cache(maxsize=4096)
def _choose(candidates: tuple[Backend, ...], name: str, problem: Problem) -> Backend:
    reasons = {}
    for backend in candidates:
        if name in ("auto", backend.name):
            reason = _refusal(backend, problem)
            if reason is None:
                if name == "auto":
                    _log_choice(backend.name, problem)
                return backend
            reasons[backend.name] = reason
    raise UnsupportedProblem("; ".join(f"backend {b!r}: {reason}" for b, reason in reasons.items()))


def run_forward(
    name: str, cell: Cell, inputs: Inputs, all_states: bool, training: bool
) -> tuple[Backend, States, Tensor]:
    """Run the forward of the backend of that name; return the backend and the results.

    "auto" is the first that serves the problem and whose kernels can be made: a warning says why others are not taken.

    Raises KernelUnavailable if the backend was named.
    """
    problem, aux = _problem(cell, inputs.Wx, inputs.reset, training), aux_dtype(cell, inputs.Wx.dtype, all_states)
    while True:
        chosen = _choose_for(name, problem, inputs.Wx, aux)
        if name == "auto" and chosen is VANILLA:
            _warn_if_slow(problem)
        try:
            return chosen, *chosen.forward(cell, inputs, all_states, training)
        except KernelUnavailable as reason:
            if name != "auto":
                raise
            _FAILED.setdefault(_kernels_key(problem, inputs.Wx, aux), set()).add(chosen)
            _warn_of_fallback(chosen.name, str(reason))


def run_backward(
    name: str, cell: Cell, residual: Residual, grads: StateGradients, taken: Backend | None = None
) -> Gradients:
    """Return the gradients by the backend that the forward of a call of backend `name` has `taken`.

    An operator is not told of it. There, and where PyTorch's setting for TF32 has changed since so that `taken` does
    not serve the problem any more, the backend is chosen as for a forward.
    """
    if taken is None or not _still_serves(taken, cell, residual):
        problem = _problem(cell, residual.h, residual.reset, training=True)
        taken = _choose_for(name, problem, residual.h, residual.aux.dtype)
    return taken.backward(cell, residual, grads)


def _still_serves(taken: Backend, cell: Cell, residual: Residual) -> bool:
    if residual.h.dtype != torch.float32:
        return True
    return _refusal(taken, _problem(cell, residual.h, residual.reset, training=True)) is None


def operator_gate_format(name: str, cell: str, head_dim: int, dtype: torch.dtype, device: torch.device) -> GateFormat:
    """Return the format in which the operator's forward has to return gates, whichever backend `auto` takes.

    A compiler must know it before the call runs. It is the format of the backend that `auto` prefers on such a device.
    The gates of others are converted.
    """
    if name != "auto":
        backend = next(backend for backend in BACKENDS if backend.name == name)
    elif device.type == "cuda":
        backend = TritonFused() if torch.version.hip else CudaFused()
    else:
        backend = CPU_FUSED
    return backend.gate_format(cell_of_key(cell), head_dim, dtype)


def _problem(cell: Cell, rows: Tensor, reset: Tensor | None, training: bool) -> Problem:
    """Return the problem of a call with such `rows` [B, T, ..., N, D]."""
    tf32, (N, D) = tf32_allowed(rows.dtype, rows.device), rows.shape[-2:]
    return Problem(cell, N, D, rows.dtype, rows.device, training, reset is not None, tf32=tf32)


def _choose_for(name: str, problem: Problem, rows: Tensor, aux: torch.dtype) -> Backend:
    if _FAILED and name == "auto" and (failed := _FAILED.get(_kernels_key(problem, rows, aux))):
        return _choose(tuple(backend for backend in BACKENDS if backend not in failed), name, problem)
    return choose(name, problem)


_FAILED: dict[tuple, set[Backend]] = {}  # by `_kernels_key`, backends whose kernels could not be made


def _kernels_key(problem: Problem, rows: Tensor, aux: torch.dtype) -> tuple:
    """Return what the forward and the backward of a call have in common; their settings for TF32 may differ."""
    return problem._replace(tf32=False), rows.shape[0], aux


@cache
def _warn_of_fallback(backend: str, reason: str) -> None:
    warnings.warn(
        f"backend {backend!r} is not available, so that 'auto' takes the next one, which may be slower: {reason}",
        RuntimeWarning,
        stacklevel=4,
    )


def _warn_if_slow(problem: Problem) -> None:
    """Say once what to install where a package is all that is missing for a faster backend."""
    if _refusal(CPU_FUSED, problem) == NUMBA_IS_MISSING:
        _warn_of_missing_numba()


@cache
def _warn_of_missing_numba() -> None:
    warnings.warn(
        "flashrnn runs several times faster on the CPU with numba: pip install numba", RuntimeWarning, stacklevel=4
    )


@constant_when_compiled
def padding(
    name: str, cell: str, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, training: bool
) -> int:
    """Return the units to add to every head so that the fastest backend of that name serves the problem; mostly 0."""
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
    """Return a context without autocast: inputs are already in the dtypes of the computation."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


@cache
def _log_choice(backend: str, problem: Problem) -> None:
    logger.info(
        "%s %d x %d, %s on %s, by backend %s",
        problem.cell.name, problem.heads, problem.head_dim, problem.dtype, problem.device, backend,
    )  # fmt: skip
