"""Finite groups as multiplication tables, for word problems."""

import itertools
import re
from collections.abc import Sequence
from functools import cache, reduce
from pathlib import Path

import numpy as np

LARGEST = 1024  # largest number of elements; a model has one output for each


def group_table(group: str | Sequence[Sequence[int]]) -> np.ndarray:
    """Return the multiplication table of a group, whose entry [x, y] is the index of the element x y.

    Args:
        group: a name, such as `cyclic_60`, `dihedral_15` (30 elements), `symmetric_4` or `alternating_5`; a direct
            product of these, such as `alternating_4*cyclic_5`; a file with the table (.csv or .npy); or the table.

    Returns:
        int64 [elements, elements].

    Raises:
        ValueError: there is no such group, or the table is not that of a group.
        FileNotFoundError: there is no such file.
    """
    if not isinstance(group, str):
        return _checked(np.array([list(row) for row in group]), "data.group")
    if Path(group).suffix == ".npy":
        return _checked(np.load(group), group)
    if Path(group).suffix == ".csv":
        return _checked(np.loadtxt(group, delimiter=",", ndmin=2), group)
    return reduce(_direct_product, map(_named, group.split("*")))


def group_name(group: str | Sequence[Sequence[int]]) -> str:
    """Return the name under which results of a group's word problem are stored."""
    return Path(group).stem if isinstance(group, str) else f"group_of_{len(group)}"


def _named(name: str) -> np.ndarray:
    found = re.fullmatch(r"(cyclic|dihedral|symmetric|alternating)_([1-9]\d*)", name)
    if not found:
        raise ValueError(
            f"unknown group {name!r}: expected cyclic_N, dihedral_N, symmetric_N or alternating_N, a product of such "
            "with *, or a table in a .csv or .npy file"
        )
    family, n = found[1], int(found[2])
    if (family in ("symmetric", "alternating") and n > 6) or n > LARGEST // (1 + (family == "dihedral")):
        raise ValueError(f"group {name!r} has more than {LARGEST} elements")
    if family in ("symmetric", "alternating"):
        return symmetric_group(n, even=family == "alternating")
    turns = np.arange(n)
    if family == "cyclic":
        return (turns[:, None] + turns) % n
    # The elements are r^k, followed by r^k s, where s r = r^-1 s.
    flipped, turn = np.divmod(np.arange(2 * n), n)
    return (turn[:, None] + np.where(flipped, -1, 1)[:, None] * turn) % n + n * (flipped[:, None] ^ flipped)


@cache
def symmetric_group(degree: int, even: bool = False) -> np.ndarray:
    """Return the table of all (or all even) permutations in lexicographic order; p q means first q, then p.

    Returns:
        int64 [elements, elements].
    """
    elements = list(itertools.permutations(range(degree)))
    if even:
        elements = [p for p in elements if sum(a > b for a, b in itertools.combinations(p, 2)) % 2 == 0]
    index = {p: number for number, p in enumerate(elements)}
    return np.array([[index[tuple(p[k] for k in q)] for q in elements] for p in elements])


def _direct_product(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the table of the pairs (x, y), whose index is x * len(second) + y."""
    if len(first) * len(second) > LARGEST:
        raise ValueError(f"a product of groups of {len(first)} and {len(second)} has more than {LARGEST} elements")
    return np.kron(first, np.ones_like(second)) * len(second) + np.tile(second, first.shape)


def _checked(table: np.ndarray, origin: str) -> np.ndarray:
    """Return a table as int64; raise ValueError with the reason if it is not that of a group."""
    if table.ndim != 2 or table.shape[0] != table.shape[1]:
        raise ValueError(f"{origin}: a multiplication table is square, got the shape {list(table.shape)}")
    size = len(table)
    if size > LARGEST:
        raise ValueError(f"{origin}: {size} elements; at most {LARGEST} are supported")
    everything = np.arange(size)
    if not (np.sort(table, axis=0) == everything[:, None]).all() or not (np.sort(table, axis=1) == everything).all():
        raise ValueError(f"{origin}: every row and column of a group's table holds 0 ... {size - 1} once each")
    table = table.astype(np.int64)
    if not any((table[e] == everything).all() and (table[:, e] == everything).all() for e in everything):
        raise ValueError(f"{origin}: no element leaves all others as they are, so this is not a group")
    for x in everything:  # n^2 products at a time, because n^3 would not fit in memory
        wrong = np.argwhere(table[table[x]] != table[x][table])
        if len(wrong):
            y, z = wrong[0]
            raise ValueError(f"{origin}: ({x} {y}) {z} is not {x} ({y} {z}), so this is not a group")
    return table
