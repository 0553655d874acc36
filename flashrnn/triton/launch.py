"""Builds and launches the Triton kernels of a cell."""

import hashlib
import linecache
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType

import torch
import triton
from torch import Tensor
from triton.language import constexpr

from flashrnn.cells import Cell
from flashrnn.cells.gates import class_indices, recurrent_only
from flashrnn.cells.printers.functions import functions
from flashrnn.cells.printers.triton import cell_functions
from flashrnn.cells.trace import trace
from flashrnn.gpu import Gpu, nvidia_gpu
from flashrnn.memory_format import batch_time_strides
from flashrnn.problem import making_kernels
from flashrnn.residual import residual_dtype
from flashrnn.triton.kernels import Constants

_MATH = Path(__file__).with_name("math.py")
SEQUENCES = 16  # sequences per program: the smallest tile that tensor cores of all vendors support


def launch(direction: str, cell: Cell, h: Tensor, *arguments: Tensor | None, d_aux: bool = False) -> None:
    """Launch the kernel "forward" or "backward" on the device of h [B, T, N, D], whose memory format all rows have."""
    B, T, N, D = h.shape
    warp = 64 if torch.version.hip else 32
    stages = prefetch(direction, cell, D, h.dtype, shared_memory(nvidia_gpu(h.device)), d_aux)
    interpret = triton.knobs.runtime.interpret
    constants = kernel_constants(direction, cell, N, D, stages, interpret)
    kernel = getattr(_kernels(interpret), direction)[(N * -(-B // SEQUENCES),)]
    device = torch.cuda.device(h.device) if h.is_cuda else nullcontext()
    with making_kernels(f"the {direction} of cell {cell.name!r} cannot be made by Triton"), device:
        kernel(*arguments, B, T, *batch_time_strides(h), **constants, num_warps=num_warps(padded(D), warp))


def padded(head_dim: int) -> int:
    """Return the head size that a kernel computes with."""
    return max(16, triton.next_power_of_2(head_dim))


def num_warps(size: int, warp: int) -> int:
    """Return the number of warps of `warp` lanes: four elements of the padded tile per lane, at most eight warps."""
    return min(8, max(1, 4 * size // warp))


def shared_memory(gpu: Gpu | None) -> int:
    """Return the bytes on the chip for a program; on ROCm (None), half of a compute unit's registers, which hold R."""
    return gpu.shared_per_block if gpu else 256 * 1024


def prefetch(direction: str, cell: Cell, head_dim: int, dtype: torch.dtype, shared: int, d_aux: bool = True) -> int:
    """Return the number of steps (at most 3) that a kernel loads ahead in `shared` bytes; 0 if R does not fit.

    `d_aux` is whether the backward pass reads gradients of all states.
    """
    size, others = padded(head_dim), len(cell.states) - 1
    if direction == "forward":
        values = len(cell.input_gates) * dtype.itemsize
    else:
        values = len(cell.gates) * residual_dtype(dtype).itemsize + 2 * dtype.itemsize + 4 * others * (1 + d_aux)
    R = len(cell.recurrent_gates) * size**2 * dtype.itemsize
    scratch = 2 * 4 * SEQUENCES * size  # for conversions between register layouts
    return max(0, min(3, 1 + (shared - R - scratch) // (SEQUENCES * size * values)))


@cache
def kernel_constants(
    direction: str, cell: Cell, heads: int, head_dim: int, stages: int, interpret: bool
) -> dict[str, Callable | Constants]:
    """Return the compile-time arguments of a kernel by name: functions of the cell, and `kernels.Constants`."""
    names = {"forward": ("cell_forward",), "backward": ("cell_factors", "cell_backward")}[direction]
    only = recurrent_only(cell)
    values = {
        "INPUT_OF": class_indices(cell.gates, cell.input_gates),
        "RECURRENT_OF": class_indices(cell.gates, cell.recurrent_gates),
        "RECURRENT_ONLY_OF": class_indices(cell.gates, only),
        "GATES": len(cell.gates),
        "GI": len(cell.input_gates),
        "GR": len(cell.recurrent_gates),
        "GU": len(only),
        "STATES": len(cell.states),
        "N": heads,
        "D": head_dim,
        "P": padded(head_dim),
        "ROW": heads * head_dim,
        "SEQS": SEQUENCES,
        "PREFETCH": stages,
    }
    printed = _functions(cell, head_dim if trace(cell).reduces else None, interpret)
    constants = Constants(**{name: constexpr(value) for name, value in values.items()})
    return {name: printed[name] for name in names} | {"C": constants}


@cache
def _kernels(interpret: bool) -> ModuleType:
    """Return the module kernels.py, loaded once to be compiled and once to be interpreted.

    Triton decides between the two when a function is defined.
    """
    spec = find_spec(Constants.__module__)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def _functions(cell: Cell, head_dim: int | None, interpret: bool) -> dict[str, Callable]:
    names = [function.name for function in functions(cell)]
    return dict(zip(names, load(cell_functions(cell, head_dim), cell.name, names), strict=True))


def load(source: str, label: str, names: Sequence[str]) -> list[Callable]:
    """Return the functions `names` of the text of math.py followed by a printed text.

    Triton reads the text through `inspect`, which finds it in linecache.
    """
    source = _MATH.read_text() + "\n\n" + source
    module = f"flashrnn.triton.{label}_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    filename = f"<{module}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    scope: dict = {"__name__": module}
    exec(compile(source, filename, "exec"), scope)
    return [triton.jit(scope[name]) for name in names]
