"""The tiles of the matrix products: as many sums as the vector registers of this processor hold."""

from functools import cache
from typing import NamedTuple


class Registers(NamedTuple):
    """Vector registers of a processor."""

    bytes: int  # of one
    number: int


class Tiles(NamedTuple):
    """Rows and columns of tiles whose sums leave registers for what is multiplied."""

    many: tuple[int, int]  # of kernels/product.py, where columns are vectors
    few: tuple[int, int]  # the same for the rows that are left
    dots: tuple[int, int]  # of kernels/rows.py, where columns are rows of the matrix


@cache
def registers() -> Registers:
    """Return those of the processor that this runs on."""
    from llvmlite.binding import get_host_cpu_features  # numba's, which may be missing

    has = get_host_cpu_features()
    if has.get("avx512f"):
        return Registers(64, 32)
    return Registers(32, 16) if has.get("avx") else Registers(16, 16 if has.get("sse2") else 32)


def tiles() -> Tiles:
    """Return the fastest tiles that were measured for so many registers."""
    if registers().number == 32:
        return Tiles((8, 3), (4, 4), (4, 4))
    return Tiles((6, 2), (4, 3), (4, 3))
