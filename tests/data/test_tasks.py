"""Tasks against an oracle in plain Python that reads one sequence at a time."""

import itertools
import re

import numpy as np
import pytest

from data import tasks
from data.tasks import IGNORE, TASKS, symmetric_group


def permutations(degree, even=False):
    """In lexicographic order; even: those that a product of an even number of swaps gives."""
    found = list(itertools.permutations(range(degree)))
    return [p for p in found if round(np.linalg.det(np.eye(degree)[list(p)])) == 1] if even else found


def product_of(elements):
    def label(prefix):
        place = list(range(len(elements[0])))
        for token in reversed(prefix):  # x_1 x_2 ... x_t acts with x_t first
            place = [elements[token][k] for k in place]
        return elements.index(tuple(place))

    return label


def arithmetic(prefix):
    text = "".join("01234+-*()"[token] for token in prefix)
    try:
        return eval(text) % 5
    except SyntaxError:
        return IGNORE


def flip_flop(prefix):
    *before, last = ["wir01"[token] for token in prefix]
    if last != "r":
        return IGNORE
    return int(re.findall("w([01])", "".join(before))[-1])


ORACLES = {
    "parity": lambda prefix: prefix.count(1) % 2,
    "even_pairs": lambda prefix: int(sum(x != y for x, y in itertools.pairwise(prefix)) % 2 == 0),
    "cycle_navigation": lambda prefix: (prefix.count(1) - prefix.count(2)) % 5,
    "modular_arithmetic": arithmetic,
    "modular_arithmetic_brackets": arithmetic,
    "s3": product_of(permutations(3)),
    "a5": product_of(permutations(5, even=True)),
    "s5": product_of(permutations(5)),
    "flip_flop": flip_flop,
}


def draw(name, shape, seed=0):
    return TASKS[name].draw(np.random.default_rng(seed), shape)


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("shape", [(50, 41), (7, 1), (1, 2), (20, 3)])
def test_labels(name, shape):
    tokens, labels = draw(name, shape)
    assert tokens.shape == labels.shape == shape
    for sequence, expected in zip(tokens.tolist(), labels.tolist(), strict=True):
        assert expected == [ORACLES[name](sequence[: t + 1]) for t in range(len(sequence))]


@pytest.mark.parametrize("name", TASKS)
def test_every_token_and_label_comes_up(name):
    task = TASKS[name]
    tokens, labels = draw(name, (500, 100))
    assert sorted(np.unique(tokens)) == list(range(task.vocab_size))
    assert sorted(np.unique(labels[labels != IGNORE])) == list(range(task.num_classes))


@pytest.mark.parametrize("name", TASKS)
def test_sequences_ask_something_early_and_near_their_end(name):
    asked = draw(name, (500, 256))[1] != IGNORE
    assert asked[:, :3].any(axis=1).all()
    behind_last = asked[:, ::-1].argmax(axis=1)
    assert np.median(behind_last) < 16


@pytest.mark.parametrize("name", TASKS)
def test_no_answer_is_right_much_more_often_than_chance(name):
    task = TASKS[name]
    labels = draw(name, (500, 256))[1][:, 64:]
    share = np.bincount(labels[labels != IGNORE]).max() / (labels != IGNORE).sum()
    assert share < 1.1 * task.chance


@pytest.mark.parametrize(("degree", "even", "elements"), [(3, False, 6), (5, True, 60), (5, False, 120)])
def test_multiplication_tables_are_those_of_groups(degree, even, elements):
    table = symmetric_group(degree, even)
    assert table.shape == (elements, elements)
    everything = np.arange(elements)
    assert (table[0] == everything).all()  # the identity comes first in lexicographic order
    assert (table[:, 0] == everything).all()
    assert (np.sort(table, axis=1) == everything).all()  # so everything has an inverse
    x, y, z = np.random.default_rng(0).integers(0, elements, (3, 1000))
    assert (table[table[x, y], z] == table[x, table[y, z]]).all()


def test_flip_flops_are_drawn_as_documented():
    tokens = draw("flip_flop", (500, 200))[0]
    assert (tokens[:, 0] == tasks.WRITE).all()
    assert (tokens[:, 2] == tasks.READ).all()
    share = np.bincount(tokens[:, 4::2].ravel(), minlength=3) / tokens[:, 4::2].size
    np.testing.assert_allclose(share, [0.1, 0.8, 0.1], atol=0.01)


@pytest.mark.parametrize("length", range(1, 10))
def test_brackets_nest_as_deep_as_a_short_sequence_lets_them(length):
    draw("modular_arithmetic_brackets", (20_000, length))


def test_brackets_nest():
    tokens = draw("modular_arithmetic_brackets", (500, 100))[0]
    depth = ((tokens == tasks.OPEN).astype(int) - (tokens == tasks.CLOSE)).cumsum(axis=1)
    assert depth.min() == 0
    assert depth.max() >= 4
