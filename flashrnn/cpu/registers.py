"""Tile sizes of the matrix products, chosen so that all sums stay in the vector registers of this processor."""

from functools import cache
from typing import NamedTuple


class Registers(NamedTuple):
    """The vector registers of a processor."""

    bytes: int  # per register
    number: int


class Tiles(NamedTuple):
    """Rows and columns of tiles; their sums leave enough registers for the operands."""

    many: tuple[int, int]  # in kernels/product.py: rows, and columns in vectors
    few: tuple[int, int]  # the same for the remaining rows
    dots: tuple[int, int]  # in kernels/rows.py: rows of the operand, and rows of the matrix


@cache
def registers() -> Registers:
    """Return the vector registers of this processor."""
    from llvmlite.binding import get_host_cpu_features  # llvmlite comes with numba, which may be missing

    has = get_host_cpu_features()
    if has.get("avx512f"):
        return Registers(64, 32)
    return Registers(32, 16) if has.get("avx") else Registers(16, 16 if has.get("sse2") else 32)


def tiles() -> Tiles:
    """Return the tiles that were measured to be the fastest for this number of registers."""
    if registers().number == 32:
        return Tiles((8, 3), (4, 4), (4, 4))
    return Tiles((6, 2), (4, 3), (4, 3))
