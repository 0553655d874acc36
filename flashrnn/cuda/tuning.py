"""Tilings chosen by measuring: the best few by estimate are timed on the GPU, and the fastest is kept on disk.

A kept tiling is taken by later processes, for all calls of its sizes on that model of GPU.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from functools import partial
from typing import NamedTuple

import torch

from flashrnn.cells import Cell
from flashrnn.cuda import tiling
from flashrnn.cuda.backend import CudaFused, with_parts
from flashrnn.cuda.kernel import compile_best, compile_tiling
from flashrnn.cuda.source import Tiling, Variant
from flashrnn.cuda.tuned import Sizes, keep
from flashrnn.gpu import device_gpu
from flashrnn.problem import Inputs, Kept, StateGradients, aux_dtype, state_dtype, tf32_allowed

_STEPS, _REPEATS = 256, 7
_LOOKED_AT = 2000  # solutions, among which are many that differ in nothing that matters


class Trial(NamedTuple):
    direction: str
    tiling: Tiling
    us: float  # of a time step, with what stands around the kernel; infinite if it cannot run


def tune(cell: Cell, heads: int, head_dim: int, batch: int, dtype: torch.dtype, count: int = 8) -> Iterator[Trial]:
    """Times `count` tilings of each direction on the current GPU, and keeps the fastest.

    Those of float32 are for PyTorch's present setting for TF32.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    sizes = Sizes(cell, heads, head_dim, batch, dtype, device_gpu(device.index), tf32_allowed(dtype, device))
    inputs = _random_inputs(sizes, device)
    for direction in ("forward", "backward"):
        choices = candidates(direction, sizes, count)
        _compile_all(direction, sizes, choices)
        trials = []
        for choice in choices:
            trials.append(Trial(direction, choice, _measure(direction, sizes, choice, inputs)))
            yield trials[-1]
        best = min(trials, key=lambda trial: trial.us)
        if math.isfinite(best.us):
            keep(direction, sizes, best.tiling, best.us)


def candidates(direction: str, sizes: Sizes, count: int) -> list[Tiling]:
    """The best tilings by estimate that differ in layout, or in registers by what the compiler may need."""
    found: dict[tuple, list[Tiling]] = {}
    order = []
    for choice in itertools.islice(tiling.tilings(direction, *sizes), _LOOKED_AT):
        layout = astuple(replace(choice, stages=0, register_fragments=0))
        same = found.setdefault(layout, [])
        if len(same) < 2 and all(choice.register_fragments < other.register_fragments for other in same):
            same.append(choice)
            order.append(choice)
        if len(order) == count:
            break
    return order


def _compile_all(direction: str, sizes: Sizes, choices: list[Tiling]) -> None:
    cell, heads, head_dim, batch, dtype, gpu, tf32 = sizes
    aux = aux_dtype(cell, dtype, all_states=False) if len(cell.states) > 1 else None
    variant = Variant(reset=False, aux=aux, training=True, d_aux=False, tf32=tf32)
    if direction == "backward":
        shape = batch, _STEPS, heads, head_dim
        variant = with_parts(variant, cell, shape, dtype, torch.cuda.current_device())
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda c: compile_tiling(direction, cell, heads, head_dim, dtype, variant, gpu, c), choices))


def _random_inputs(sizes: Sizes, device: torch.device) -> Inputs:
    cell, N, D, B, dtype = sizes[:5]
    Wx = torch.randn(B, _STEPS, len(cell.input_gates), N, D, device=device).to(dtype)
    R = (torch.randn(len(cell.recurrent_gates), N, D, D, device=device) / D**0.5).to(dtype)
    b = torch.zeros(len(cell.gates), N, D, device=device, dtype=state_dtype(dtype))
    return Inputs(Wx, R, b, None, None)


def _measure(direction: str, sizes: Sizes, choice: Tiling, inputs: Inputs) -> float:
    backend = CudaFused(partial(_take, direction, choice))
    try:
        run = partial(backend.forward, sizes.cell, inputs, all_states=False, training=True)
        states, gates = run()
        if direction == "forward":
            return _us(run)
        kept = Kept(inputs.R, None, None, states.h, states.aux, gates)
        grads = StateGradients(torch.randn_like(states.h), (None,) * (len(sizes.cell.states) - 1), None)
        return _us(partial(backend.backward, sizes.cell, kept, grads))
    except RuntimeError:  # no room for its blocks
        return float("inf")


def _take(of: str, choice: Tiling, direction: str, cell, heads, head_dim, batch, dtype, variant, gpu):
    """As compile_best, but the given tiling for one direction."""
    if direction != of:
        return compile_best(direction, cell, heads, head_dim, batch, dtype, variant, gpu)
    return compile_tiling(direction, cell, heads, head_dim, dtype, variant, gpu, choice), choice


def _us(run: Callable[[], object]) -> float:
    """Microseconds per time step, the median."""
    run()
    times = []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / _STEPS)
    return statistics.median(times)
