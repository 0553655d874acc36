"""Multiplication tables of groups, and errors for tables that are not groups."""

import re

import numpy as np
import pytest

from data.groups import group_name, group_table


@pytest.mark.parametrize(
    ("name", "order", "abelian"),
    [
        ("cyclic_60", 60, True),
        ("dihedral_15", 30, False),
        ("dihedral_2", 4, True),
        ("symmetric_3", 6, False),
        ("alternating_5", 60, False),
        ("symmetric_5", 120, False),
        ("alternating_4*cyclic_5", 60, False),
    ],
)
def test_named_groups_are_groups(name, order, abelian):
    table = group_table(name)
    assert table.shape == (order, order)
    everything = np.arange(order)
    assert (table[0] == everything).all()  # the identity is the first element
    assert (table[:, 0] == everything).all()
    assert (np.sort(table, axis=1) == everything).all()  # all elements have an inverse
    x, y, z = np.random.default_rng(0).integers(0, order, (3, 1000))
    assert (table[table[x, y], z] == table[x, table[y, z]]).all()
    assert (table == table.T).all() == abelian


def test_reflections_of_a_dihedral_group_are_involutions():
    table = group_table("dihedral_7")
    assert (table[np.arange(7, 14), np.arange(7, 14)] == 0).all()


def test_table_from_a_file(tmp_path):
    table = group_table("dihedral_3")
    np.savetxt(tmp_path / "mine.csv", table, delimiter=",", fmt="%d")
    np.save(tmp_path / "mine.npy", table)
    for file in ("mine.csv", "mine.npy"):
        assert (group_table(str(tmp_path / file)) == table).all()
        assert group_name(str(tmp_path / file)) == "mine"


@pytest.mark.parametrize(
    ("group", "key"),
    [
        ("dihedral", "'dihedral'"),
        ("cyclic_0", "'cyclic_0'"),
        ("cyclic_5000", "1024"),
        ("symmetric_7", "1024"),
        ("cyclic_40*cyclic_40", "1024"),
        ([[0, 1], [1, 1]], "once each"),
        ([[0, 1, 2], [1, 2, 0]], "square"),
        ([[0, 2, 1], [2, 1, 0], [1, 0, 2]], "no element"),
        # a loop of order 5 that is not associative
        ([[0, 1, 2, 3, 4], [1, 0, 3, 4, 2], [2, 4, 0, 1, 3], [3, 2, 4, 0, 1], [4, 3, 1, 2, 0]], "(1 "),
    ],
)
def test_table_that_is_not_a_group_is_an_error(group, key):
    with pytest.raises(ValueError, match=re.escape(key)):
        group_table(group)


def test_identity_may_be_any_element():
    assert group_table([[1, 0], [0, 1]]).tolist() == [[1, 0], [0, 1]]
