"""Conditions compiled to Python functions that decide whether they can still hold for given bounds of the variables.

A test is a function of three lists over the variables: smallest value L, largest value H, divisor S. It returns False
only if no values within these bounds satisfy its condition, and its result is exact if every L = H. If an L falls or an
H rises, bounds widen, and a test can only change from False to True. A test that reads L but not H of some variable is
therefore monotone in this variable: it is True up to some value and False beyond it. Propagation finds this value by
bisection. Which of L, H, S a test reads is recorded while its source is written.

Compiling costs about 40 µs per condition, a test 0.1 to 0.5 µs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from . import domains
from .conditions import AllOf, AnyOf, Condition
from .expressions import Comparison, Constant, Expression, Product, Remainder, Sum, Variable
from .source import Bounds, Source, compile_functions

Test = Callable[[Bounds, Bounds, Bounds], bool]
Objective = Callable[[Bounds, Bounds, Bounds], tuple[int, ...]]

UP_TO, FROM, ANY = "up to", "from", "any"  # the sets of values of one variable that can pass a test


@dataclass(frozen=True, slots=True)
class Check:
    """A compiled test and its properties.

    shapes: the variables that it reads, each with the shape of the set of values that pass.
    reads: (list, variable) for each of L, H, S that it reads.
    one_sided: every variable is read at one end only; test(H, L, S) is then True if all remaining values satisfy it.
    sleeps: it removes no values while more than one of its variables is undecided.
    """

    test: Test
    shapes: tuple[tuple[int, str], ...]
    reads: frozenset[tuple[str, int]]
    one_sided: bool
    sleeps: bool


def compile_conditions(conditions: Sequence[Condition], position: Mapping[Variable, int]) -> list[list[Check]]:
    """Return the checks of each condition; `position` gives the index of each variable in L, H and S."""
    sources = []
    for number, condition in enumerate(conditions):
        for part in _parts(condition):
            source = Source(position)
            sources.append((number, source, part(source)))
    tests = compile_functions([(source.lines, result) for _, source, result in sources])
    checks: list[list[Check]] = [[] for _ in conditions]
    for test, (number, source, _) in zip(tests, sources, strict=True):
        checks[number].append(_check(test, source.reads, _only_inequations(conditions[number])))
    return checks


def compile_objective(expressions: tuple[Expression, ...], position: Mapping[Variable, int]) -> Objective:
    """Return a function that computes the lower bounds of the expressions."""
    source = Source(position)
    sides = "".join(f"{source.side(expression, False)}, " for expression in expressions)
    function: Objective = compile_functions([(source.lines, f"({sides})")])[0]
    return function


def _check(test: Test, reads: set[tuple[str, int]], sleeps: bool) -> Check:
    shapes = []
    for index in sorted({index for _, index in reads}):
        lists = {name for name, i in reads if i == index}
        shapes.append((index, UP_TO if lists == {"L"} else FROM if lists == {"H"} else ANY))
    return Check(test, tuple(shapes), frozenset(reads), all(shape is not ANY for _, shape in shapes), sleeps)


def _parts(condition: Condition) -> Iterator[Callable[[Source], str]]:
    """Split a condition into tests that all have to pass. Small tests prune more and have to run less often."""
    if isinstance(condition, AllOf):
        for part in condition.parts:
            yield from _parts(part)
    elif isinstance(condition, Comparison) and condition.relation == "==" and not is_divisibility(condition):
        left, right = condition.left, condition.right
        yield lambda source: _comparison(source, Comparison(left, "<=", right))
        yield lambda source: _comparison(source, Comparison(left, ">=", right))
        # The two bounds imply the rest where one side is a sum without common divisor: it can take any value.
        if not any(isinstance(side, Sum) and _common_divisor(side) == 1 for side in (left, right)):
            yield lambda source: _equal_multiple(source, left, right)
    else:
        yield lambda source: _can_hold(source, condition)


def _can_hold(source: Source, condition: Condition) -> str:
    """Return the source of an expression that decides whether a condition can hold."""
    if isinstance(condition, AllOf | AnyOf):
        word = " and " if isinstance(condition, AllOf) else " or "
        return f"({word.join(_can_hold(source, part) for part in condition.parts)})"
    assert isinstance(condition, Comparison)
    return _comparison(source, condition)


def _comparison(source: Source, condition: Comparison) -> str:
    left, relation, right = condition.left, condition.relation, condition.right
    if relation in ("<=", "<"):
        return f"{source.side(left, False)} {relation} {source.side(right, True)}"
    if relation in (">=", ">"):
        return f"{source.side(left, True)} {relation} {source.side(right, False)}"
    if relation == "!=":
        (a, b), (c, d) = source.ends(left), source.ends(right)
        return f"not ({a} == {b} == {c} == {d})"
    if is_divisibility(condition):
        dividend, divisor = left.operands
        arguments = (source.both(dividend), source.divisor(dividend), source.both(divisor), source.divisor(divisor))
        return f"divisible({', '.join(arguments)})"
    return _equal_multiple(source, left, right)


def _equal_multiple(source: Source, left: Expression, right: Expression) -> str:
    """Return the source of a check whether the ranges of both sides share a multiple of their divisors."""
    (a, b), (c, d) = source.ends(left), source.ends(right)
    return f"shares_multiple(max({a}, {c}), min({b}, {d}), {source.divisor(left)}, {source.divisor(right)})"


def is_divisibility(condition: Comparison) -> bool:
    """Return whether the condition has the form a % b == 0."""
    return condition.relation == "==" and isinstance(condition.left, Remainder) and condition.right.bounds == (0, 0)


def _common_divisor(expression: Expression) -> int:
    """Return a number that divides every value of the expression."""
    if isinstance(expression, Constant):
        return abs(expression.value)
    if isinstance(expression, Variable):
        return domains.divisor(expression.domain)
    if isinstance(expression, Product | Sum):
        parts = [_common_divisor(operand) for operand in expression.operands]
        if isinstance(expression, Sum):
            return gcd(*parts)
        whole = 1
        for part in parts:
            whole *= part
        return whole
    return 1


def _only_inequations(condition: Condition) -> bool:
    """Return whether the condition consists of != only, which removes nothing until both sides have one value."""
    if isinstance(condition, AnyOf):
        return all(_only_inequations(part) for part in condition.parts)
    return isinstance(condition, Comparison) and condition.relation == "!="
