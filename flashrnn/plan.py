"""The backend, tilings and estimated time for given sizes. Nothing is run, and no GPU is needed."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flashrnn.cells import Cell, get_cell
from flashrnn.cuda.resident import solver, tiling
from flashrnn.cuda.resident.backend import CudaFused
from flashrnn.cuda.spec import KernelSpec
from flashrnn.dispatch import BACKENDS, UnsupportedProblem, choose, units_to_add
from flashrnn.gpu import Gpu
from flashrnn.hoisting import in_parts
from flashrnn.problem import Problem, dtype_name
from flashrnn.recurrence import check_sizes


@dataclass(frozen=True)
class Plan:
    """A tiling of a kernel of backend `cuda_fused`, and its estimated time.

    Attributes:
        blocks: number of thread blocks that share a head.
        grid: the blocks can be anywhere on the GPU and exchange h through L2; otherwise, several blocks are a cluster.
        warps: number of warps per block.
        sequences: number of sequences of the batch that a group of blocks processes together.
        fragments: number of 16 x 16 tiles of R per warp, times three in float32.
        register_fragments: number of these that stay in registers; the others are in shared memory.
        stages: number of time steps whose inputs are loaded ahead.
        cycles: estimated clock cycles per time step of the whole batch.
    """

    blocks: int
    grid: bool
    warps: int
    sequences: int
    fragments: int
    register_fragments: int
    stages: int
    cycles: float

    def __str__(self) -> str:
        group = f"{'grid' if self.grid else 'cluster'} of {self.blocks}" if self.blocks > 1 else "one block"
        held = f"{self.register_fragments} of {self.fragments} fragments of R in registers"
        return f"{group}, {self.warps} warps, {self.sequences} sequences, {held}, {self.stages} steps ahead"


def plans(
    direction: str, function: str | Cell, heads: int, head_dim: int, batch: int, dtype: torch.dtype, gpu: Gpu
) -> Iterator[Plan]:
    """Yield the tilings that fit, with the one that should be fastest first.

    A call uses the first tiling whose compiled kernel does not spill too many registers. Because batch sizes share
    kernels, this may be the first one of another batch size; `explain` shows which one it is.

    Args:
        direction: "forward" or "backward".
        function: a registered cell's name, or a `flashrnn.Cell`.
        heads: number of heads.
        head_dim: size of a head.
        batch: number of sequences.
        dtype: dtype of the inputs.
        gpu: the GPU to plan for; see `flashrnn.gpu`.

    Raises:
        UnsupportedProblem: no tiling fits; the message gives the violated limits.
    """
    _check(heads, head_dim, batch, dtype, gpu)
    spec = KernelSpec(direction, get_cell(function), heads, head_dim, batch, dtype, gpu)
    if reason := solver.infeasible(spec):
        raise UnsupportedProblem(f"{direction} does not fit on the chip: {reason.summary}")
    for cycles, found in solver.estimates(spec):
        yield _as_plan(spec, found, cycles)


def _check(heads: int, head_dim: int, batch: int, dtype: torch.dtype, gpu: Gpu | None) -> None:
    check_sizes(heads=heads, head_dim=head_dim, batch=batch)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype such as torch.bfloat16, got {dtype!r}")
    if not isinstance(gpu, Gpu | None):
        raise TypeError(f"gpu must be a Gpu, as flashrnn.gpu.named_gpu returns it, or None, got {gpu!r}")


def _as_plan(spec: KernelSpec, found: tiling.Tiling, cycles: float) -> Plan:
    fragments = tiling.splits(spec) * tiling.tiles_of_warp(spec, found)
    shape = found.blocks, found.grid, found.warps, found.sequences
    return Plan(*shape, fragments, found.register_fragments, found.stages, cycles)


def auto_backend(
    function: str | Cell,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    gpu: Gpu | None,
    training: bool = True,
    reset: bool = False,
) -> str:
    """Return the name of the backend that "auto" selects on `gpu`, or on a CPU if that is None.

    Args:
        function: a registered cell's name, or a `flashrnn.Cell`.
        heads: number of heads.
        head_dim: size of a head.
        dtype: dtype of the inputs.
        gpu: see `flashrnn.gpu`.
        training: a backward pass follows.
        reset: the call has a `reset` mask.
    """
    device = torch.device("cuda" if gpu else "cpu")
    problem = Problem(get_cell(function), heads, head_dim, dtype, device, training, reset, gpu)
    return choose("auto", problem._replace(head_dim=head_dim + units_to_add(problem))).name


def explain(
    function: str | Cell,
    heads: int,
    head_dim: int,
    batch: int,
    dtype: torch.dtype,
    gpu: Gpu | None,
    training: bool = True,
    reset: bool = False,
    backend: str = "auto",
) -> str:
    """Return a short text on the backend of a call, why no faster one is used, and the tilings of `cuda_fused`.

    The tilings are those for more than 32 time steps; shorter calls may use tilings that load R faster.

    Args:
        function: a registered cell's name, or a `flashrnn.Cell`.
        heads: number of heads.
        head_dim: size of a head.
        batch: number of sequences.
        dtype: dtype of the inputs.
        gpu: see `flashrnn.gpu`.
        training: a backward pass follows.
        reset: the call has a `reset` mask.
        backend: the backend that the call requests.
    """
    _check(heads, head_dim, batch, dtype, gpu)
    cell, device = get_cell(function), torch.device("cuda" if gpu else "cpu")
    problem = Problem(cell, heads, head_dim, dtype, device, training, reset, gpu)
    units = units_to_add(problem) if backend in ("auto", CudaFused.name) else 0
    problem = problem._replace(head_dim=head_dim + units)
    lines = [
        f"{cell.name}, {heads} x {head_dim}, {batch} sequences, {dtype_name(dtype)}, {gpu.name if gpu else 'CPU'}:"
    ]
    for candidate in BACKENDS:
        if backend not in ("auto", candidate.name):
            continue
        reason = candidate.unsupported_reason(problem)
        if reason is None:
            lines.append(f"{candidate.name} runs it" + (f", with heads padded by {units}" if units else ""))
            if candidate.name == CudaFused.name:
                if parts := in_parts(problem):
                    lines.append(
                        f"  {len(parts.gates)} gates are normalised before the time loop, in a kernel of their own"
                    )
                    problem = problem._replace(cell=parts.loop)
                lines += [f"  {way}: {_first_plan(way, problem, batch)}" for way in problem.directions]
            break
        lines.append(f"not {candidate.name}: {reason}")
    return "\n".join(lines)


def _first_plan(direction: str, problem: Problem, batch: int) -> str:
    spec = KernelSpec(direction, problem.cell, problem.heads, problem.head_dim, batch, problem.dtype, problem.gpu)
    found = solver.likely_tiling(spec)
    plan = _as_plan(spec, found, solver.cycles(spec, found))
    return f"{plan}; about {plan.cycles:.0f} cycles per time step"
