"""Builds the CPU kernels: prints their parts into the cache folder, where numba also stores the compiled code.

A kernel consists of three parts that are compiled separately, so that a new cell or a new head size compiles little:
the time loop (one per dtype), the matrix product (one per dtype and matrix width) and the step of the cell (one per
dtype; if it reduces over units, also one per head size).
"""

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

import torch

from flashrnn.cache import cache_folder, one_at_a_time, store, warn_not_kept
from flashrnn.cells import Cell
from flashrnn.cells.printers.numba import cell_loop, cell_rows
from flashrnn.cells.trace import trace
from flashrnn.cpu import registers
from flashrnn.forking import lock_that_forks_wait_for
from flashrnn.problem import dtype_name, making_kernels, state_dtype

_KERNELS = Path(__file__).parent / "kernels"
_ELEMENTS = 2048  # elements per gate in a tile: all gates and states then fit the L2 cache
_CHUNK = 8192  # elements per gate in a chunk of steps, which share one product with a weight of the layer
_LARGE = 384  # head size; larger heads read their matrices from the L3 cache and multiply by kernels/rows.py
_ELEMENTS_OF_LARGE = 16384  # as many as the L2 cache holds: the more rows, the less often the matrices are read


class Tile(NamedTuple):
    """The tile of a gate or state in the workspace of a thread (kernels/loop.py)."""

    width: int  # columns: the units of a head, and padding
    rows: int  # sequences
    chunk: int  # rows in the workspace: steps times sequences
    stride: int  # elements from one gate to the next
    row: int  # elements from one row of a matrix to the next


def is_large(head_dim: int) -> bool:
    return head_dim > _LARGE


@cache
def tile(head_dim: int) -> Tile:
    """Return the tile for a head size. There are few different widths, because each width is compiled."""
    width = whole_vectors(head_dim)
    if is_large(head_dim):
        width = head_dim + -head_dim % 16
        rows = max(8, _ELEMENTS_OF_LARGE // width // 4 * 4)
        return Tile(width, rows, rows, max(_ELEMENTS_OF_LARGE, rows * width) + 16, width)
    rows = max(16, _ELEMENTS // width) if width <= 192 else 32
    chunk = max(64, _CHUNK // width)
    row = width + 16 if width % 256 == 0 else width  # 16: so that rows do not map to the same cache sets; gates too
    return Tile(width, rows, chunk, max(_CHUNK, chunk * width) + 16, row)


def whole_vectors(columns: int) -> int:
    """Return the number of columns, rounded up to whole vectors; from 64 columns on, by less than a quarter."""
    unit = 16
    while columns > 8 * unit:
        unit *= 2
    return columns + -columns % unit


class Part(NamedTuple):
    """A compiled C function."""

    address: int
    module: ModuleType  # keeps the function alive


class Step(NamedTuple):
    """A cell's compiled step."""

    part: Part
    scratch: int  # elements that it needs in the workspace, after the states or their gradients


@cache
def time_loop(direction: str, dtype: torch.dtype) -> Part:
    """Return the function of kernels/tasks.py that runs the time loop of kernels/`direction`.py."""
    return _compiled(direction, dtype, ("loop",), *map(_template, (direction, "tasks")))


@cache
def matrix_product(width: int, dtype: torch.dtype) -> Part:
    """Return the function of kernels/product.py for matrices of `width` columns."""
    with _making():
        many, few, _ = registers.tiles()
        names = f"WIDTH, LANES, MANY, FEW = {width}, {_lanes(dtype)}, {many}, {few}"
        return _compiled("product", dtype, (), names, _template("product"))


@cache
def row_product_of(dtype: torch.dtype) -> Part:
    """Return the function of kernels/rows.py, which multiplies by matrices of any width."""
    with _making():
        names = f"LANES, DOTS = {_lanes(dtype)}, {registers.tiles().dots}"
        return _compiled("rows", dtype, (), names, _template("rows"))


def _lanes(dtype: torch.dtype) -> int:
    """Return the number of elements in a vector register."""
    return registers.registers().bytes // dtype.itemsize


@cache
def cell_step(direction: str, cell: Cell, head_dim: int, dtype: torch.dtype) -> Step:
    """Return the cell's step or its gradient (see `cell_loop`), in the state dtype that belongs to h's `dtype`."""
    sizes, real = tile(head_dim), state_dtype(dtype)
    mathematics = "any_float", dtype_name(real)
    stride = f"STRIDE = {sizes.stride}"
    rounding = f"to_{dtype_name(dtype)}" if dtype != real and direction == "forward" else ""
    if not trace(cell, real).reduces:
        return Step(_compiled("cell", real, mathematics, stride, cell_loop(cell, direction, real, rounding)), 0)
    rows = cell_rows(cell, direction, real, rounding)
    names = f"{stride}\nWIDTH = {sizes.width}\nD = {head_dim}"
    part = _compiled("cell", real, mathematics, names, _template("reductions"), rows.text)
    return Step(part, rows.slots * sizes.width)


# Importing numba.types is not thread-safe, and the lock also keeps threads from compiling the same part twice.
_COMPILING = lock_that_forks_wait_for()


@contextmanager
def _making() -> Iterator[None]:
    """Let one thread at a time import numba and compile; errors become KernelUnavailable."""
    with making_kernels("numba cannot compile the kernels for the CPU"), _COMPILING:
        yield


def _compiled(name: str, dtype: torch.dtype, shared: tuple[str, ...], *parts: str) -> Part:
    """Return the C function `kernel` of the module that consists of `parts`.

    Args:
        name: part of the name of the module's file.
        dtype: the dtype of the elements.
        shared: names of the templates with functions that several kernels call.
        parts: Python source code.

    Raises:
        KernelUnavailable: numba cannot compile it.
    """
    with _making():
        return _compiled_once(name, dtype, shared, *parts)


@cache
def _shared(dtype: torch.dtype, *templates: str) -> ModuleType:
    """Return a module of functions that kernels import, so that a process compiles them only once."""
    names = f"from numba import {dtype_name(dtype)} as real\nfrom numpy import {dtype_name(dtype)} as F"
    text = "\n\n".join((names, *map(_template, ("header", *templates)))) + "\n"
    name = f"flashrnn_cpu_{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    module = sys.modules[name] = ModuleType(name)
    exec(compile(text, f"<{name}>", "exec"), module.__dict__)
    return module


@cache
def _compiled_once(name: str, dtype: torch.dtype, shared: tuple[str, ...], *parts: str) -> Part:
    text = "\n\n".join((f"from {_shared(dtype, *shared).__name__} import *", *parts)) + "\n"
    versions = f"{sys.version} numba {version('numba')} llvmlite {version('llvmlite')} numpy {version('numpy')}"
    key = hashlib.sha256((versions + text).encode()).hexdigest()[:32]
    path = cache_folder() / f"cpu-{name}-{key}.py"
    if not path.exists():
        store({path: text.encode()})
    module = sys.modules[path.stem] = ModuleType(path.stem)  # numba's stored code imports the module by this name
    module.CACHE = path.exists() and os.access(path.parent, os.W_OK)
    with nullcontext() if _stored(path) else one_at_a_time(path.with_suffix(".lock")):  # one process compiles
        _execute(compile(text, str(path), "exec"), module, path)
    return Part(module.kernel.address, module)


def _stored(path: Path) -> list[Path]:
    """Return the files in which numba has stored the compiled code of the module at `path`."""
    return list((path.parent / "__pycache__").glob(f"{path.stem}.*"))


def _execute(code: CodeType, module: ModuleType, path: Path) -> None:
    """Run the module's code; numba loads the functions that it has stored and compiles the others.

    Stored code that cannot be read is deleted. If compiled code cannot be written, as on a full disk, only this process
    uses it.
    """
    try:
        exec(code, module.__dict__)
        return
    except Exception as error:
        stored = _stored(path)
        if not stored and not isinstance(error, OSError):
            raise
        for file in stored:
            file.unlink(missing_ok=True)
    try:
        exec(code, module.__dict__)
    except OSError as error:
        warn_not_kept(path.parent, error.strerror)
        module.CACHE = False
        exec(code, module.__dict__)


def _template(name: str) -> str:
    return (_KERNELS / f"{name}.py").read_text()
