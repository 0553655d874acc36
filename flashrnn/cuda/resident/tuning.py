"""Tilings chosen by measurement: the best by estimate are timed on the GPU, and the fastest is saved on disk.

Later processes use a saved tiling for all calls of its sizes on the same GPU model.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from flashrnn.cells import Cell
from flashrnn.cells.hoisting import hoisted
from flashrnn.cuda.build import Binary
from flashrnn.cuda.resident import solver
from flashrnn.cuda.resident.backend import CudaFused
from flashrnn.cuda.resident.kernel import compile_best, compile_tiling
from flashrnn.cuda.resident.tiling import Tiling
from flashrnn.cuda.resident.tuned import save_tiling
from flashrnn.cuda.spec import KernelSpec, Variant
from flashrnn.gpu import device_gpu
from flashrnn.problem import Inputs, StateGradients, aux_dtype, state_dtype, tf32_allowed
from flashrnn.residual import Residual

_STEPS, _REPEATS = 256, 7
_CONSIDERED = 2000  # solutions, many of which are equivalent


class Trial(NamedTuple):
    """A tiling and its measured time."""

    direction: str
    tiling: Tiling
    us: float  # per time step, including what runs before and after the kernel; infinite if the tiling cannot run


def tune(cell: Cell, heads: int, head_dim: int, batch: int, dtype: torch.dtype, count: int = 8) -> Iterator[Trial]:
    """Time `count` tilings of each direction on the current GPU, and save the fastest.

    In float32, they are tuned for PyTorch's current TF32 setting. For a cell that runs in two parts, the loop is tuned.
    """
    parts = hoisted(cell)
    cell = parts.loop if parts else cell
    device = torch.device("cuda", torch.cuda.current_device())
    aux = aux_dtype(cell, dtype, all_states=False) if len(cell.states) > 1 else None
    variant = Variant(aux=aux, training=True, tf32=tf32_allowed(dtype, device))
    inputs = _random_inputs(cell, heads, head_dim, batch, dtype, device)
    for direction in ("forward", "backward"):
        spec = KernelSpec(direction, cell, heads, head_dim, batch, dtype, device_gpu(device.index), variant)
        choices = candidates(spec, count)
        _compile_all(spec, choices)
        trials = []
        for choice in choices:
            trials.append(Trial(direction, choice, _measure(spec, choice, inputs)))
            yield trials[-1]
        best = min(trials, key=lambda trial: trial.us)
        if math.isfinite(best.us):
            save_tiling(spec, best.tiling, best.us)


def candidates(spec: KernelSpec, count: int) -> list[Tiling]:
    """Return the best tilings by estimate. At most two of them differ only in stages or registers."""
    found: dict[Tiling, list[Tiling]] = {}
    order = []
    for choice in itertools.islice(solver.tilings(spec), _CONSIDERED):
        same = found.setdefault(choice.distribution, [])
        if len(same) < 2 and all(choice.register_fragments < other.register_fragments for other in same):
            same.append(choice)
            order.append(choice)
        if len(order) == count:
            break
    return order


def _compile_all(spec: KernelSpec, choices: list[Tiling]) -> None:
    with ThreadPoolExecutor() as pool:
        list(pool.map(partial(compile_tiling, spec), choices))


def _random_inputs(cell: Cell, N: int, D: int, B: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    Wx = torch.randn(B, _STEPS, len(cell.input_gates), N, D, device=device).to(dtype)
    R = (torch.randn(len(cell.recurrent_gates), N, D, D, device=device) / D**0.5).to(dtype)
    b = torch.zeros(len(cell.gates), N, D, device=device, dtype=state_dtype(dtype))
    return Inputs(Wx, R, b, None, None)


def _measure(spec: KernelSpec, choice: Tiling, inputs: Inputs) -> float:
    """Return the time of a tiling in microseconds per time step; infinite if its blocks do not fit on the GPU."""
    cell, backend = spec.cell, CudaFused(partial(_take, spec.direction, choice))
    try:
        run = partial(backend.forward, cell, inputs, all_states=False, training=True)
        states, gates = run()
        if spec.direction == "forward":
            return _us(run)
        gate_format = backend.gate_format(cell, spec.heads, spec.head_dim, spec.dtype)
        residual = Residual(inputs.R, None, None, states.h, states.aux, gates, gate_format, b=inputs.b)
        grads = StateGradients(torch.randn_like(states.h), (None,) * (len(cell.states) - 1), None)
        return _us(partial(backend.backward, cell, residual, grads))
    except RuntimeError:  # its blocks do not fit on the GPU
        return float("inf")


def _take(direction: str, choice: Tiling, spec: KernelSpec) -> tuple[Binary, Tiling]:
    """Return `choice` with its kernel for `direction`; for the other direction, what compile_best returns."""
    return (compile_tiling(spec, choice), choice) if spec.direction == direction else compile_best(spec)


def _us(run: Callable[[], object]) -> float:
    """Return the median time in microseconds per time step."""
    run()
    busy, times = torch.zeros(8192, 8192, dtype=torch.bfloat16, device="cuda"), []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        busy @ busy  # two milliseconds in which the host, which may be slower than the GPU, gets ahead
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / _STEPS)
    return statistics.median(times)
