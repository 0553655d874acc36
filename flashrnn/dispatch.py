"""The choice of a backend for a problem, and the reasons if there is none."""

import logging
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache

import torch
from torch import Tensor

from flashrnn._torch_private import constant_when_compiled
from flashrnn.cells import Cell, cell_of_key
from flashrnn.cpu.backend import NUMBA_IS_MISSING, CpuFused
from flashrnn.cuda.resident.backend import CudaFused
from flashrnn.cuda.streaming.backend import Cuda
from flashrnn.memory_format import in_format
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
from flashrnn.residual import GateFormat, Residual, turned
from flashrnn.triton.backend import TritonFused

logger = logging.getLogger("flashrnn")

CPU_FUSED, VANILLA = CpuFused(), Reference()
BACKENDS: tuple[Backend, ...] = (CudaFused(), TritonFused(), Cuda(), CPU_FUSED, VANILLA)
"""All backends, the one that `auto` prefers first."""


class UnsupportedProblem(ValueError):
    """Error of a named backend that does not support a call; the message gives the reason."""


def backends() -> tuple[str, ...]:
    """Return the names of all backends in the order in which "auto" tries them, the fastest first."""
    return tuple(backend.name for backend in BACKENDS)


def check_backend(name: str) -> str:
    """Return `name` if it is "auto" or a backend's name; raise ValueError otherwise."""
    if name != "auto" and name not in backends():
        raise ValueError(f"unknown backend {name!r}; allowed: auto, {', '.join(backends())}")
    return name


def choose(name: str, problem: Problem) -> Backend:
    """Return the named backend or, for "auto", the first one that supports the problem.

    Raises UnsupportedProblem, with the backend's reason, if the named backend does not support the problem.
    """
    return _choose(BACKENDS, name, problem)


@lru_cache(maxsize=4096)  # computing the answer can take as long as a short kernel
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
    """Run the forward pass with the named backend; return the backend, the states and the gates.

    "auto" selects the first backend that supports the problem and whose kernels can be compiled, and warns with the
    reason if it skips one.

    Raises KernelUnavailable if the kernels of a named backend cannot be compiled.
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


def backend_of(name: str, cell: Cell, inputs: Inputs, training: bool) -> Backend:
    """Return the backend that `run_forward` has selected for a call without `all_states`, after it has run."""
    Wx = inputs.Wx
    problem, aux = _problem(cell, Wx, inputs.reset, training), aux_dtype(cell, Wx.dtype, all_states=False)
    return _choose_for(name, problem, Wx, aux)


def run_backward(
    name: str, cell: Cell, residual: Residual, grads: StateGradients, taken: Backend | None = None
) -> Gradients:
    """Return the gradients, computed by the backend `taken` that ran the forward pass.

    The backend is chosen again, as for a forward pass of backend `name`, in two cases: an operator does not know which
    backend ran its forward, and `taken` may no longer support the problem if PyTorch's setting of TF32 has changed.
    """
    if taken is None or not _still_serves(taken, cell, residual):
        problem = _problem(cell, residual.h, residual.reset, training=True)
        taken = _choose_for(name, problem, residual.h, residual.aux.dtype)
    if residual.bidirectional and not isinstance(taken, CudaFused):
        return by_one_way(taken.backward, cell, residual, grads)
    return taken.backward(cell, residual, grads)


def by_one_way(
    run: Callable[[Cell, Residual, StateGradients], Gradients], cell: Cell, residual: Residual, grads: StateGradients
) -> Gradients:
    """Return the gradients of a bidirectional call; `run` is a function for residuals whose heads all go forwards."""
    d_h = None if grads.h is None else turned(grads.h, 2)
    found = run(cell, residual.one_way(cell), grads._replace(h=d_h))
    return found._replace(Wx=in_format(turned(found.Wx, 3), residual.h))


def _still_serves(taken: Backend, cell: Cell, residual: Residual) -> bool:
    if residual.h.dtype != torch.float32:
        return True
    return _refusal(taken, _problem(cell, residual.h, residual.reset, training=True)) is None


def operator_gate_format(
    name: str, cell: str, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> GateFormat:
    """Return the format in which the operator's forward returns gates, for any backend that "auto" may select.

    A compiler must know it before the call runs. It is the format of the backend that "auto" prefers on this kind of
    device; the gates of other backends are converted.
    """
    if name != "auto":
        backend = next(backend for backend in BACKENDS if backend.name == name)
    elif device.type == "cuda":
        backend = TritonFused() if torch.version.hip else CudaFused()
    else:
        backend = CPU_FUSED
    return backend.gate_format(cell_of_key(cell), heads, head_dim, dtype)


def _problem(cell: Cell, rows: Tensor, reset: Tensor | None, training: bool) -> Problem:
    """Return the problem of a call with `rows` [B, T, ..., N, D]."""
    tf32, (N, D) = tf32_allowed(rows.dtype, rows.device), rows.shape[-2:]
    return Problem(cell, N, D, rows.dtype, rows.device, training, reset is not None, tf32=tf32)


def _choose_for(name: str, problem: Problem, rows: Tensor, aux: torch.dtype) -> Backend:
    if _FAILED and name == "auto" and (failed := _FAILED.get(_kernels_key(problem, rows, aux))):
        return _choose(tuple(backend for backend in BACKENDS if backend not in failed), name, problem)
    return choose(name, problem)


_FAILED: dict[tuple, set[Backend]] = {}  # for each `_kernels_key`, the backends whose kernels could not be compiled


def _kernels_key(problem: Problem, rows: Tensor, aux: torch.dtype) -> tuple:
    """Return a key that is common to the forward and backward pass of a call, whose TF32 settings may differ."""
    return problem._replace(tf32=False), rows.shape[0], aux


@cache
def _warn_of_fallback(backend: str, reason: str) -> None:
    warnings.warn(
        f"backend {backend!r} is not available; 'auto' uses the next one, which may be slower: {reason}",
        RuntimeWarning,
        stacklevel=4,
    )


def _warn_if_slow(problem: Problem) -> None:
    """Warn once if a missing package is the only reason for a slow backend."""
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
    """Return the units to add to each head so that `cuda_fused` supports an odd head size; 0 if that does not help."""
    if torch.compiler.is_dynamo_compiling():  # this PyTorch version does not take the result as a constant
        return 0
    if head_dim % 2 == 0 or device.type != "cuda" or name not in ("auto", CudaFused.name):
        return 0
    tf32 = tf32_allowed(dtype, device)
    return units_to_add(Problem(cell_of_key(cell), heads, head_dim, dtype, device, training, reset=False, tf32=tf32))


@lru_cache(maxsize=4096)
def units_to_add(problem: Problem) -> int:
    """Return `padding` for backend "auto" on the problem's GPU."""
    return CudaFused().padding(problem) if problem.head_dim % 2 else 0


def no_autocast(x: Tensor) -> AbstractContextManager:
    """Return a context without autocast, because inputs already have the dtypes of the computation."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


@cache
def _log_choice(backend: str, problem: Problem) -> None:
    logger.info(
        "%s %d x %d, %s on %s, by backend %s",
        problem.cell.name, problem.heads, problem.head_dim, problem.dtype, problem.device, backend,
    )  # fmt: skip
