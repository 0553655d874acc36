"""State-tracking tasks: sequences whose labels require a state that is updated at every step.

A new task is one function, in this file or in your own module (docs/concepts.md). It draws tokens [B, T] and labels
[B, T], both int64. The label of a position depends only on the tokens up to that position, so that every prefix is a
sample too; it is IGNORE (-100) at positions that are not scored. Every sequence has a label within its first `shortest`
positions.

A task with options (`task_family`) is a function of these options that returns a Task.

Sources: Deletang et al. 2023, Neural Networks and the Chomsky Hierarchy, arXiv 2207.02098; Liu et al. 2023, Exposing
Attention Glitches with Flip-Flop Language Modeling, arXiv 2306.00946; Liu et al. 2023, Transformers Learn Shortcuts to
Automata, arXiv 2210.10749; Merrill, Petty and Sabharwal 2024, The Illusion of State in State-Space Models, arXiv
2404.08819.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from data.groups import group_name, group_table, symmetric_group
from data.task import FAMILIES as FAMILIES
from data.task import IGNORE, Task, task, task_family
from data.task import TASKS as TASKS
from data.task import get_task as get_task


@task(vocab_size=2, num_classes=2)
def parity(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Whether the number of ones so far is odd. The tokens are bits. (Deletang et al.: Parity Check.)"""
    bits = rng.integers(0, 2, shape)
    return bits, bits.cumsum(axis=1) % 2


@task(vocab_size=2, num_classes=2)
def even_pairs(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Whether a string of a and b (0 and 1) has changed its letter an even number of times. (Deletang et al.)

    This is the case if the first letter is also the last one.
    """
    letters = rng.integers(0, 2, shape)
    return letters, (letters == letters[:, :1]).astype(np.int64)


@task(vocab_size=3, num_classes=5)
def cycle_navigation(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The position on a cycle of five, starting at 0. The tokens are stay, step up and step down. (Deletang et al.)"""
    moves = rng.integers(0, 3, shape)
    return moves, np.array([0, 1, -1])[moves].cumsum(axis=1) % 5


MODULUS = 5
PLUS, MINUS, TIMES, OPEN, CLOSE = range(MODULUS, MODULUS + 5)


@task(vocab_size=MODULUS + 3, num_classes=MODULUS)
def modular_arithmetic(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The value, modulo 5, of a sum of products. The tokens are 0 ... 4, +, - and *; only numbers have labels.

    Numbers and operators alternate, and products take precedence over sums. (Deletang et al.: Modular Arithmetic
    (Simple).)
    """
    tokens = np.empty(shape, dtype=np.int64)
    tokens[:, ::2] = rng.integers(0, MODULUS, tokens[:, ::2].shape)
    tokens[:, 1::2] = rng.integers(PLUS, TIMES, tokens[:, 1::2].shape, endpoint=True)
    return tokens, _values(tokens)


@task(vocab_size=MODULUS + 5, num_classes=MODULUS)
def modular_arithmetic_brackets(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The value, modulo 5, of an expression with brackets. The tokens are 0 ... 4, +, -, *, ( and ).

    Positions have labels if the tokens so far are a complete expression: at numbers and closing brackets outside of all
    other brackets. An operand is an expression in brackets with probability 1/4; after an operand, brackets close with
    probability 1/2. After an opening bracket there is a sign with probability 1/8. The first token is a number.
    (Deletang et al.: Modular Arithmetic, where expressions are drawn by length and only the last position is labelled.)
    """
    choice = rng.random(shape)
    numbers = rng.integers(0, MODULUS, shape)
    operators = rng.integers(PLUS, TIMES, shape, endpoint=True)
    tokens = np.empty(shape, dtype=np.int64)
    tokens[:, 0] = numbers[:, 0]
    depth = np.zeros(shape[0], dtype=np.int64)
    for t in range(1, shape[1]):
        last = tokens[:, t - 1]
        after_operand = (last < MODULUS) | (last == CLOSE)
        signed = (last == OPEN) & (choice[:, t] > 7 / 8)
        operand = np.where(signed, MINUS, np.where(choice[:, t] < 1 / 4, OPEN, numbers[:, t]))
        following = np.where((depth > 0) & (choice[:, t] < 1 / 2), CLOSE, operators[:, t])
        tokens[:, t] = np.where(after_operand, following, operand)
        depth += (tokens[:, t] == OPEN).astype(np.int64) - (tokens[:, t] == CLOSE)
    return tokens, _values(tokens)


def _values(tokens: np.ndarray) -> np.ndarray:
    """Return the value modulo 5 of every prefix that is an expression [B, T], and IGNORE for other prefixes.

    An incomplete expression has the form a + b * (next operand); a stack keeps a and b for every enclosing bracket.
    """
    tokens = tokens.T
    ends_operand = (tokens < MODULUS) | (tokens == CLOSE)
    adds = (tokens == PLUS) | (tokens == MINUS)
    sign = np.where(tokens == MINUS, -1, 1)
    a, b = np.zeros_like(tokens[0]), np.ones_like(tokens[0])
    value, product, depth = np.zeros_like(a), np.zeros_like(a), np.zeros_like(a)
    stack = np.empty((2, *tokens.shape), dtype=np.int64)
    values = np.full_like(tokens, IGNORE)
    for t, token in enumerate(tokens):
        opens, closes = np.flatnonzero(token == OPEN), np.flatnonzero(token == CLOSE)
        operand = np.where(token == CLOSE, value, token)
        stack[:, depth[opens], opens] = a[opens], b[opens]
        a[opens], b[opens], value[opens] = 0, 1, 0
        depth[opens] += 1
        depth[closes] -= 1
        a[closes], b[closes] = stack[:, depth[closes], closes]
        product = np.where(ends_operand[t], b * operand % MODULUS, product)
        value = np.where(ends_operand[t], (a + product) % MODULUS, value)
        a = np.where(adds[t], value, a)
        b = np.where(adds[t], sign[t], np.where(token == TIMES, product, b))
        values[t] = np.where(ends_operand[t] & (depth == 0), value, IGNORE)
    return values.T


@task(vocab_size=6, num_classes=6)
def s3(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The product so far of permutations of three elements, the smallest non-commutative group; see `_products`."""
    return _products(rng, shape, symmetric_group(3))


@task(vocab_size=60, num_classes=60)
def a5(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The product so far of even permutations of five elements, the smallest non-solvable group."""
    return _products(rng, shape, symmetric_group(5, even=True))


@task(vocab_size=120, num_classes=120)
def s5(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The product so far of permutations of five elements."""
    return _products(rng, shape, symmetric_group(5))


def _products(rng: np.random.Generator, shape: tuple[int, int], table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draw the word problem of a group, given its multiplication table. (Merrill et al.)

    The tokens are elements x_1, x_2, ... of the group, and the labels the products x_1 x_2 ... x_t. Tokens and labels
    number the elements in the same way.
    """
    elements = rng.integers(0, len(table), shape)
    return elements, _product_so_far(elements, table)


def _product_so_far(elements: np.ndarray, table: np.ndarray) -> np.ndarray:
    products = elements.copy()
    for t in range(1, elements.shape[1]):
        products[:, t] = table[products[:, t - 1], elements[:, t]]
    return products


@task_family
def group(group: str | Sequence[Sequence[int]]) -> Task:
    """Return the word problem of any finite group, given as in `data.groups.group_table`, by name or by table."""
    table = group_table(group)
    return Task(group_name(group), len(table), len(table), partial(_products, table=table))


@task_family
def recall_group(group: str | Sequence[Sequence[int]], keys: int, bound: int) -> Task:
    """Return associative recall combined with the word problem of a group, whose elements have to be recalled.

    The tokens are `keys` keys, followed by the elements. A sequence first binds `bound` of the keys to random elements,
    as pairs "key element". Then it names bound keys at random, and the label of each is the product so far of the
    elements bound to these keys.
    """
    if not 1 <= bound <= keys:
        raise ValueError(f"data.bound={bound} with data.keys={keys}: expected 1 to data.keys bound keys")
    table = group_table(group)
    draw = partial(_recalled_products, table=table, keys=keys, bound=bound)
    name = f"recall_{group_name(group)}_{bound}_of_{keys}"
    return Task(name, keys + len(table), len(table), draw, shortest=2 * bound + 1)


def _recalled_products(
    rng: np.random.Generator, shape: tuple[int, int], table: np.ndarray, keys: int, bound: int
) -> tuple[np.ndarray, np.ndarray]:
    rows = shape[0]
    named = rng.permuted(np.tile(np.arange(keys), (rows, 1)), axis=1)[:, :bound]
    elements = rng.integers(0, len(table), named.shape)
    bindings = np.stack([named, keys + elements], axis=2).reshape(rows, -1)
    asked = rng.integers(0, bound, (rows, max(0, shape[1] - 2 * bound)))
    products = _product_so_far(np.take_along_axis(elements, asked, axis=1), table)
    tokens = np.concatenate([bindings, np.take_along_axis(named, asked, axis=1)], axis=1)
    labels = np.concatenate([np.full_like(bindings, IGNORE), products], axis=1)
    return tokens[:, : shape[1]], labels[:, : shape[1]]


@task_family
def modular_counter(modulus: int) -> Task:
    """Return the task of adding up powers of two below `modulus`, one per token, modulo `modulus`."""
    if modulus < 2:
        raise ValueError(f"data.modulus={modulus} must be at least 2")
    steps = 2 ** np.arange((modulus - 1).bit_length())
    return Task(f"counter_{modulus}", len(steps), modulus, partial(_sums, steps=steps, modulus=modulus))


def _sums(
    rng: np.random.Generator, shape: tuple[int, int], steps: np.ndarray, modulus: int
) -> tuple[np.ndarray, np.ndarray]:
    tokens = rng.integers(0, len(steps), shape)
    return tokens, steps[tokens].cumsum(axis=1) % modulus


@task_family
def automaton(states: int, letters: int, number: int) -> Task:
    """Return the task of giving the state of a random automaton after every letter; it starts in state 0.

    All letters but the last permute the states. The last letter maps each state to a random one, so that some of what
    was read is forgotten. `number` selects one of these automata; every state can be reached. (Liu et al., Shortcuts.)
    """
    if states < 2 or letters < 2:
        raise ValueError(f"data.states={states}, data.letters={letters}: expected at least 2 of each")
    rng = np.random.default_rng([number, states, letters])
    moves = _random_moves(rng, states, letters)
    while not _all_reached(moves):
        moves = _random_moves(rng, states, letters)
    return Task(f"automaton_{states}_{letters}_{number}", letters, states, partial(_states, moves=moves))


def _random_moves(rng: np.random.Generator, states: int, letters: int) -> np.ndarray:
    """Return the state that follows [letters, states]."""
    permutations = [rng.permutation(states) for _ in range(letters - 1)]
    return np.array([*permutations, rng.integers(0, states, states)])


def _all_reached(moves: np.ndarray) -> bool:
    reached = {0}
    for _ in range(moves.shape[1]):
        reached |= set(moves[:, sorted(reached)].ravel().tolist())
    return len(reached) == moves.shape[1]


def _states(rng: np.random.Generator, shape: tuple[int, int], moves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    letters = rng.integers(0, len(moves), shape)
    states = np.empty_like(letters)
    state = np.zeros(shape[0], dtype=np.int64)
    for t in range(shape[1]):
        states[:, t] = state = moves[letters[:, t], state]
    return letters, states


VARIABLES = 5
SWAP, PRINT, VARIABLE, VALUE = 0, 1, 2, 2 + VARIABLES  # tokens; the last two are the first variable and value


@task(vocab_size=2 + 2 * VARIABLES, num_classes=VARIABLES, shortest=5)
def swaps(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The output of a session that swaps five variables. The tokens are swap, print, the variables and their values.

    Statements have three tokens: "swap x y", or "print x" followed by the value of x, which is the label at x. Variable
    k starts with value k. The first statement swaps and the second prints; later statements print with probability 1/4.
    """
    statements = (shape[0], -(-shape[1] // 3))
    prints = rng.random(statements) < 1 / 4
    prints[:, 0], prints[:, 1:2] = False, True
    x = rng.integers(0, VARIABLES, statements)
    y = (x + rng.integers(1, VARIABLES, statements)) % VARIABLES
    held = np.tile(np.arange(VARIABLES), (shape[0], 1))
    value, row = np.empty_like(x), np.arange(shape[0])
    for k in range(statements[1]):
        value[:, k] = held[row, x[:, k]]
        other = np.where(prints[:, k], x[:, k], y[:, k])
        held[row, x[:, k]], held[row, other] = held[row, other], value[:, k]
    last = np.where(prints, VALUE + value, VARIABLE + y)
    tokens = np.stack([np.where(prints, PRINT, SWAP), VARIABLE + x, last], axis=2).reshape(shape[0], -1)
    unasked = np.full_like(x, IGNORE)
    labels = np.stack([unasked, np.where(prints, value, IGNORE), unasked], axis=2).reshape(shape[0], -1)
    return tokens[:, : shape[1]], labels[:, : shape[1]]


WRITE, SKIP, READ, ZERO = range(4)  # tokens; the bit 1 is ZERO + 1


@task(vocab_size=5, num_classes=2, shortest=3)
def flip_flop(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The bit that was written last. The tokens are w, i, r, 0 and 1; only r has labels.

    Instructions and bits alternate: write the bit, ignore it, or read, in which case the bit is that of the memory. The
    first instruction writes and the second reads; of the others 80 % ignore, 10 % write and 10 % read. (Liu et al.:
    FFL(0.8), where the last instruction reads.)
    """
    pairs = (shape[0], -(-shape[1] // 2))
    instructions = rng.choice([WRITE, SKIP, READ], pairs, p=[0.1, 0.8, 0.1])
    instructions[:, 0] = WRITE
    instructions[:, 1:2] = READ
    bits = rng.integers(0, 2, pairs)
    last_write = np.maximum.accumulate(np.where(instructions == WRITE, np.arange(pairs[1]), 0), axis=1)
    memory = np.take_along_axis(bits, last_write, axis=1)
    bits = np.where(instructions == READ, memory, bits)
    tokens = np.stack([instructions, ZERO + bits], axis=2).reshape(shape[0], -1)
    labels = np.stack([np.where(instructions == READ, memory, IGNORE), np.full(pairs, IGNORE)], axis=2)
    return tokens[:, : shape[1]], labels.reshape(shape[0], -1)[:, : shape[1]]
