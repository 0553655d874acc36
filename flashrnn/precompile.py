"""Compilation of kernels ahead of a run, for this machine or for a GPU given by its name."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from flashrnn.cells import Cell, get_cell
from flashrnn.cells.hoisting import Hoisted
from flashrnn.cpu.backend import CpuFused
from flashrnn.cpu.call import Sizes, prepare
from flashrnn.cuda import (
    gather_rows,
    hoisted,
    reset_bits,
    resize_rows,
    short_gradients,
    sum_of_partials,
    weight_gradient,
)
from flashrnn.cuda.buckets import bucket
from flashrnn.cuda.nvrtc import compile_in_subprocess
from flashrnn.cuda.resident import concurrent_gradient, single_step, solver
from flashrnn.cuda.resident.backend import CudaFused
from flashrnn.cuda.resident.calls import producers
from flashrnn.cuda.resident.kernel import compile_best
from flashrnn.cuda.spec import SHORT, KernelSpec, Variant
from flashrnn.cuda.streaming import tiling as streaming
from flashrnn.cuda.streaming.backend import Cuda, compile_kernel
from flashrnn.directions import is_faster
from flashrnn.dispatch import check_backend, choose, units_to_add
from flashrnn.gpu import named_gpu, nvidia_gpu
from flashrnn.hoisting import in_parts
from flashrnn.problem import Problem, aux_dtype, state_dtype, tf32_allowed
from flashrnn.recurrence import check_sizes


class Compiled(NamedTuple):
    """One step of `warmup`."""

    kernel: str  # description of the kernel that was compiled, or found in the cache
    seconds: float
    done: int  # number of kernels so far
    total: int


def warmup(
    function: str | Cell = "lstm",
    *,
    heads: int = 1,
    head_dim: int,
    batch: int | Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    training: bool = True,
    reset: bool = False,
    bidirectional: bool = False,
    backend: str = "auto",
    gpu: str | None = None,
    progress: Callable[[Compiled], None] | None = None,
) -> str:
    """Compile all kernels that calls of these sizes need, and store them in the cache folder.

    Later processes load them in milliseconds. This applies to the backends `cuda_fused`, `cuda` and `cpu_fused`;
    `vanilla` has no kernels, and Triton compiles those of `triton_fused` at the first call.

    Args:
        function: the name of a registered cell, or a `flashrnn.Cell`.
        heads: number of heads.
        head_dim: size of a head.
        batch: batch size of the calls, or a list of batch sizes.
        dtype: dtype of the computation.
        training: backward passes follow.
        reset: calls have a `reset` mask or packed documents.
        bidirectional: calls are those of a bidirectional `FlashRNN`, which may run both directions at once.
        backend: a backend's name, or "auto".
        gpu: a GPU's name from `python -m flashrnn limits`, which need not be in this machine; by default this machine's
            first GPU, or its CPU if it has none.
        progress: called with a `Compiled` after each kernel.

    Returns:
        The name of the backend whose kernels were compiled.

    Raises:
        UnsupportedProblem: the named backend does not support the sizes; the message gives the reason.
        RuntimeError: the kernels cannot be compiled on this machine; the message gives the reason.
        ValueError: there is no such cell, backend or GPU, or a size is below 1.
    """
    check_backend(backend)
    batches = (batch,) if isinstance(batch, int) else tuple(batch)
    for size in batches:
        check_sizes(heads=heads, head_dim=head_dim, batch=size)
    problem = _problem(get_cell(function), heads, head_dim, dtype, training, reset, gpu)
    units = units_to_add(problem) if backend in ("auto", CudaFused.name) else 0
    problem = problem._replace(head_dim=head_dim + units)
    chosen = choose(backend, problem)
    kernels = {}
    for size in batches:
        kernels |= dict(_kernels(chosen.name, problem, size, bidirectional and is_faster(problem, size, backend)))
    if units:
        kernels["padding"] = partial(resize_rows.KERNEL.compile, resize_rows.DTYPE, problem.gpu)
    _run(kernels, progress)
    return chosen.name


def _problem(
    cell: Cell, heads: int, head_dim: int, dtype: torch.dtype, training: bool, reset: bool, gpu: str | None
) -> Problem:
    """Return the problem of these calls on the named GPU, or on this machine."""
    device = torch.device("cuda" if gpu or torch.cuda.is_available() else "cpu")
    assumed, tf32 = named_gpu(gpu) if gpu else nvidia_gpu(device), tf32_allowed(dtype, device)
    return Problem(cell, heads, head_dim, dtype, device, training, reset, assumed, tf32)


def _run(kernels: dict[str, Callable[[], object]], progress: Callable[[Compiled], None] | None) -> None:
    """Compile with one thread per processor; for a GPU, in other processes, because NVRTC compiles in one thread."""
    with ThreadPoolExecutor(min(len(kernels), os.cpu_count() or 1) or 1, initializer=compile_in_subprocess) as pool:
        started = {pool.submit(_timed, compile_): name for name, compile_ in kernels.items()}
        for done, future in enumerate(as_completed(started), 1):
            compiled = Compiled(started[future], future.result(), done, len(kernels))
            if progress:
                progress(compiled)


def _timed(compile_: Callable[[], object]) -> float:
    start = time.perf_counter()
    compile_()
    return time.perf_counter() - start


Kernels = Iterator[tuple[str, Callable[[], object]]]
"""Descriptions of kernels, each with the function that compiles it."""


def _kernels(backend: str, problem: Problem, batch: int, at_once: bool) -> Kernels:
    """Yield the kernels for a batch size; with `at_once`, both directions are the heads of one recurrence."""
    if at_once:
        problem = problem._replace(heads=2 * problem.heads)
    bidirectional = at_once and not problem.reset
    if backend == CpuFused.name:
        yield from _cpu(problem, batch)
    elif backend == CudaFused.name:
        yield from _resident(problem, batch, bidirectional)
        if not at_once:
            yield from _single_step(problem, batch)
        if parts := in_parts(problem):
            yield from _resident(problem._replace(cell=parts.loop), batch, bidirectional, lengths=(0,))
            yield from _first(parts, problem)
    elif backend == Cuda.name:
        yield from _streaming(problem, batch)


def _cpu(problem: Problem, batch: int) -> Kernels:
    calls = [(direction, steps) for direction in problem.directions for steps in (2, 1)]  # one step has its own kernel
    for direction, steps in calls:
        sizes = direction, problem.cell, batch, steps, problem.heads, problem.head_dim, False, problem.dtype
        length = "one step" if steps == 1 else "any number of steps"
        name = f"{direction} of {problem.cell.name}, heads of {problem.head_dim}, {length}, on the CPU"
        yield name, partial(prepare, Sizes(*sizes, torch.get_num_threads()))


def _spec(direction: str, problem: Problem, batch: int, steps: int = 0, **variant) -> KernelSpec:
    cell, dtype = problem.cell, problem.dtype
    aux = aux_dtype(cell, dtype, all_states=False) if problem.training and len(cell.states) > 1 else None
    variant = Variant(reset=problem.reset, aux=aux, training=problem.training, tf32=problem.tf32, **variant)
    return KernelSpec(direction, cell, problem.heads, problem.head_dim, batch, dtype, problem.gpu, variant, steps)


def _resident(
    problem: Problem, batch: int, bidirectional: bool, lengths: Sequence[int] = (0, *SHORT.values())
) -> Kernels:
    if problem.reset:
        yield "resets as bits", partial(reset_bits.KERNEL.compile, reset_bits.DTYPE, problem.gpu)
        yield "sequences of different lengths", partial(gather_rows.KERNEL.compile, gather_rows.DTYPE, problem.gpu)
    for steps in lengths:
        for half_bias in (False, True) if problem.dtype.itemsize == 2 else (False,):
            spec = _spec("forward", problem, batch, steps, half_bias=half_bias, bidirectional=bidirectional)
            name = f"{bucket(spec, solver.SOLVER)}{', half biases' if half_bias else ''}"
            yield name, partial(compile_best, spec)
        if problem.training:
            spec = _spec("backward", problem, batch, steps, bidirectional=bidirectional)
            yield str(bucket(spec, solver.SOLVER)), partial(compile_best, spec)
    if not problem.training:
        return
    spec = _spec("backward", problem, batch, bidirectional=bidirectional)
    yield from _gradients(problem, spec)
    if short_gradients.serves(one := replace(spec, batch=1), 1):
        yield (
            f"gradients of {problem.cell.name}'s weights, few steps",
            partial(short_gradients.compile_kernel, one),
        )
    likely = solver.likely_tiling(spec)  # unless another one is tuned or spills less
    if overlapped := concurrent_gradient.overlapped(spec, producers(spec, likely)):
        yield (
            f"d_R of {problem.cell.name}, batch {batch}, overlapped",
            partial(concurrent_gradient.compile_kernels, spec, overlapped),
        )


def _single_step(problem: Problem, batch: int) -> Kernels:
    cell, N, D = problem.cell, problem.heads, problem.head_dim
    if single_step.serves(cell, N * D, batch, problem.dtype):
        spec = single_step.spec_of(cell, N, D, batch, problem.dtype, problem.gpu)
        yield f"a single step of {cell.name}", partial(single_step.compile_kernel, spec)


def _first(parts: Hoisted, problem: Problem) -> Kernels:
    """Yield the kernels of the part that is hoisted out of the time loop."""
    for direction in problem.directions:
        for bias in sorted({problem.dtype, state_dtype(problem.dtype)}, key=str):
            sizes = problem.heads, problem.head_dim, problem.dtype, bias
            name = f"inputs of {parts.cell.name}, {direction}, biases in {bias}"
            yield name, partial(hoisted.compile_kernel, direction, parts, *sizes, problem.gpu)


def _streaming(problem: Problem, batch: int) -> Kernels:
    for direction in problem.directions:
        spec = _spec(direction, problem, batch)
        yield str(bucket(spec, streaming.SOLVER)), partial(compile_kernel, spec)
        if direction == "backward":
            yield from _gradients(problem, spec)


def _gradients(problem: Problem, spec: KernelSpec) -> Kernels:
    """Yield the kernels that run after the time loop of a backward pass."""
    if weight_gradient.has_kernel(spec):
        yield f"d_R of {problem.cell.name}", partial(weight_gradient.compile_kernel, replace(spec, batch=1))
    for dtype in sorted({problem.dtype, state_dtype(problem.dtype)}, key=str):
        yield f"sums in {dtype}", partial(sum_of_partials.KERNEL.compile, dtype, problem.gpu)
