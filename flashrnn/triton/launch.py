"""Turns a cell into Triton kernels and launches them."""

import hashlib
import linecache
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache

import torch
import triton
from torch import Tensor

from flashrnn.cells import Cell
from flashrnn.codegen.functions import functions
from flashrnn.codegen.triton_source import cell_functions
from flashrnn.gpu import Gpu, nvidia_gpu
from flashrnn.products import places, recurrent_only, row_strides
from flashrnn.triton import kernels

SEQUENCES = 16  # of a program: the least that tensor cores of all vendors multiply at once
SIZES = ("B", "T", "row_b", "row_t")  # not compiled into a kernel


def launch(direction: str, cell: Cell, Wx: Tensor, *arguments: Tensor | None, d_aux: bool = False) -> None:
    """Runs the kernel "forward" or "backward" on the device of Wx [B, T, Gi, N, D]."""
    B, T, _, N, D = Wx.shape
    warp = 64 if torch.version.hip else 32
    stages = prefetch(direction, cell, D, Wx.dtype, room(nvidia_gpu(Wx.device)), d_aux)
    constants = kernel_constants(direction, cell, N, D, stages)
    kernel = jit(getattr(kernels, direction))[(N * -(-B // SEQUENCES),)]
    with torch.cuda.device(Wx.device) if Wx.is_cuda else nullcontext():
        kernel(*arguments, B, T, *row_strides(Wx), **constants, num_warps=num_warps(padded(D), warp))


def padded(head_dim: int) -> int:
    """The head size that a kernel computes with."""
    return max(16, triton.next_power_of_2(head_dim))


def num_warps(size: int, warp: int) -> int:
    """Warps, of `warp` lanes, for a padded head size: four cells of the tile per lane, up to eight warps."""
    return min(8, max(1, 4 * size // warp))


def room(gpu: Gpu | None) -> int:
    """Bytes of a program's shared memory. ROCm (None) keeps R in registers: there it is half of a compute unit's."""
    return gpu.shared_per_block if gpu else 256 * 1024


def prefetch(direction: str, cell: Cell, head_dim: int, dtype: torch.dtype, room: int, d_aux: bool = True) -> int:
    """The steps that a kernel loads or computes at once, at most 3, beside R; 0 if R alone does not fit the room.

    d_aux: whether the backward reads gradients of all states.
    """
    size, others = padded(head_dim), len(cell.states) - 1
    values = len(cell.input_gates) * dtype.itemsize
    if direction == "backward":
        values += (len(cell.recurrent_gates) + 2) * dtype.itemsize + 4 * others * (1 + d_aux)
    R = len(cell.recurrent_gates) * size**2 * dtype.itemsize
    scratch = 2 * 4 * SEQUENCES * size  # in which a block changes its layout
    return max(0, min(3, 1 + (room - R - scratch) // (SEQUENCES * size * values)))


def kernel_constants(direction: str, cell: Cell, heads: int, head_dim: int, stages: int) -> dict:
    """The arguments of a kernel that it is compiled for, by name."""
    names = {"forward": ("cell_forward",), "backward": ("cell_factors", "cell_backward")}[direction]
    only = recurrent_only(cell)
    constants = {name: jit(_functions(cell)[name]) for name in names}
    constants |= {
        "INPUT_OF": places(cell, cell.input_gates),
        "RECURRENT_OF": places(cell, cell.recurrent_gates),
        "GATES": len(cell.gates),
        "GI": len(cell.input_gates),
        "GR": len(cell.recurrent_gates),
        "STATES": len(cell.states),
        "N": heads,
        "D": head_dim,
        "P": padded(head_dim),
        "SEQS": SEQUENCES,
        "PREFETCH": stages,
    }
    if direction == "backward":
        constants |= {"ONLY_OF": places(cell, only), "GU": len(only)}
    return constants


def jit(function: Callable) -> Callable:
    """`function` for Triton to compile, or under TRITON_INTERPRET=1 to interpret."""
    return _jit(function, triton.knobs.runtime.interpret)


@cache
def _jit(function: Callable, interpret: bool) -> Callable:
    return triton.jit(function, do_not_specialize=[name for name in SIZES if name in function.__code__.co_varnames])


@cache
def _functions(cell: Cell) -> dict[str, Callable]:
    names = [function.name for function in functions(cell)]
    return dict(zip(names, load(cell_functions(cell), cell.name, names), strict=True))


def load(source: str, label: str, names: Sequence[str]) -> list[Callable]:
    """The functions `names` of a module's text. Triton reads it again, through `inspect`, which asks linecache."""
    module = f"flashrnn.triton.{label}_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    filename = f"<{module}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    scope: dict = {"__name__": module}
    exec(compile(source, filename, "exec"), scope)
    return [scope[name] for name in names]
