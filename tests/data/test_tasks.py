"""Tasks compared with oracles in plain Python that read one sequence at a time."""

import itertools
import re

import numpy as np
import pytest

from data import tasks
from data.tasks import IGNORE, TASKS, get_task


def permutations(degree, even=False):
    """Return all permutations, or only the `even` ones, in lexicographic order."""
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


def swaps(prefix):
    held = dict(zip("abcde", range(5), strict=True))
    words = [("swap", "print", *"abcde", *range(5))[token] for token in prefix]
    for start in range(0, len(words), 3):
        match words[start : start + 3]:
            case ["swap", x, y]:
                held[x], held[y] = held[y], held[x]
            case ["print", x, value]:
                assert value == held[x]
            case ["print", x]:
                return held[x]
    return IGNORE


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
    "swaps": swaps,
}


def draw(name, shape, seed=0):
    return TASKS[name].draw(np.random.default_rng(seed), shape)


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("shape", [(50, 41), (7, 1), (1, 2), (20, 3)])
def test_labels_equal_the_oracle(name, shape):
    tokens, labels = draw(name, shape)
    assert tokens.shape == labels.shape == shape
    for sequence, expected in zip(tokens.tolist(), labels.tolist(), strict=True):
        assert expected == [ORACLES[name](sequence[: t + 1]) for t in range(len(sequence))]


@pytest.mark.parametrize("name", TASKS)
def test_all_tokens_and_labels_occur(name):
    task = TASKS[name]
    tokens, labels = draw(name, (500, 100))
    assert sorted(np.unique(tokens)) == list(range(task.vocab_size))
    assert sorted(np.unique(labels[labels != IGNORE])) == list(range(task.num_classes))


@pytest.mark.parametrize("name", TASKS)
def test_scored_positions_are_early_and_near_the_end(name):
    asked = draw(name, (500, 256))[1] != IGNORE
    assert asked[:, : TASKS[name].shortest].any(axis=1).all()
    after_last = asked[:, ::-1].argmax(axis=1)
    assert np.median(after_last) < 16


@pytest.mark.parametrize("name", TASKS)
def test_labels_are_balanced(name):
    task = TASKS[name]
    labels = draw(name, (500, 256))[1][:, 64:]
    share = np.bincount(labels[labels != IGNORE]).max() / (labels != IGNORE).sum()
    assert share < 1.1 * task.chance


def test_flip_flop_tokens_have_the_documented_frequencies():
    tokens = draw("flip_flop", (500, 200))[0]
    assert (tokens[:, 0] == tasks.WRITE).all()
    assert (tokens[:, 2] == tasks.READ).all()
    share = np.bincount(tokens[:, 4::2].ravel(), minlength=3) / tokens[:, 4::2].size
    np.testing.assert_allclose(share, [0.1, 0.8, 0.1], atol=0.01)


@pytest.mark.parametrize("length", range(1, 10))
def test_brackets_of_short_sequences_reach_the_largest_depth(length):
    depth = depth_of_brackets((20_000, length))
    assert depth.min() == 0
    assert depth.max() == max(0, length - 2)  # a number and an operator come first


def test_brackets_of_long_sequences_are_nested():
    depth = depth_of_brackets((500, 100))
    assert depth.min() == 0
    assert depth.max() >= 4


def depth_of_brackets(shape):
    tokens = draw("modular_arithmetic_brackets", shape)[0]
    return ((tokens == tasks.OPEN).astype(int) - (tokens == tasks.CLOSE)).cumsum(axis=1)


def sequences(task, shape=(20, 50)):
    tokens, labels = task.draw(np.random.default_rng(0), shape)
    return zip(tokens.tolist(), labels.tolist(), strict=True)


def test_counter_adds_powers_of_two():
    task = get_task("modular_counter", modulus=97)
    assert (task.vocab_size, task.num_classes) == (7, 97)
    for tokens, labels in sequences(task):
        assert labels == [sum(2**token for token in tokens[: t + 1]) % 97 for t in range(50)]


def test_recalled_elements_are_multiplied():
    task = get_task("recall_group", group="symmetric_3", keys=8, bound=3)
    assert (task.name, task.vocab_size, task.num_classes, task.shortest) == ("recall_symmetric_3_3_of_8", 14, 6, 7)
    product = product_of(permutations(3))
    for tokens, labels in sequences(task):
        held = dict(zip(tokens[:6:2], tokens[1:6:2], strict=True))
        assert len(held) == 3
        assert max(held) < 8 <= min(held.values())
        named = [held[key] - 8 for key in tokens[6:]]
        assert labels == [IGNORE] * 6 + [product(named[: t + 1]) for t in range(len(named))]
    assert all(len(set(asked[6:])) > 1 for asked, _ in sequences(task))


def test_automaton_is_deterministic_and_only_its_last_letter_resets():
    task = get_task("automaton", states=4, letters=3, number=1)
    moves = {}
    for letters, states in sequences(task, (200, 50)):
        for before, letter, state in zip([0, *states], letters, states, strict=False):
            assert moves.setdefault((letter, before), state) == state
    targets = [[moves[letter, state] for state in range(4)] for letter in range(3)]
    assert sorted(targets[0]) == sorted(targets[1]) == [0, 1, 2, 3]
    assert get_task("automaton", states=4, letters=3, number=1).name == task.name == "automaton_4_3_1"


def test_word_problem_of_a_user_group():
    klein = [[0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]]
    task = get_task("group", group=klein)
    assert (task.name, task.vocab_size, task.num_classes) == ("group_of_4", 4, 4)
    for tokens, labels in sequences(task):
        assert labels == list(itertools.accumulate(tokens, lambda x, y: x ^ y))


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("parity", {"group": "cyclic_3"}, "'parity' has no option group"),
        ("group", {}, "takes the options group"),
        ("group", {"group": "cyclic_3", "modulus": 3}, "modulus"),
        ("recall_group", {"group": "cyclic_3", "keys": 2, "bound": 3}, "data.bound=3 with data.keys=2"),
        ("modular_counter", {"modulus": 1}, "data.modulus=1"),
        ("automaton", {"states": 1, "letters": 2, "number": 0}, "data.states=1"),
    ],
)
def test_unknown_options_are_an_error(name, options, key):
    with pytest.raises(ValueError, match=re.escape(key)):
        get_task(name, **options)
