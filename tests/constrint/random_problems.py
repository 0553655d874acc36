"""Random small problems, and their solutions by brute force."""

from collections.abc import Callable
from itertools import product
from typing import Any

from hypothesis import strategies as st

from flashrnn.constrint import (
    Condition,
    ConstraintProblem,
    Expression,
    Variable,
    all_of,
    any_of,
    ceil_div,
    lookup,
    maximum,
    minimum,
)

Values = dict[str, int]

DOMAINS = st.one_of(
    st.integers(-6, 12),
    st.lists(st.integers(-6, 12), min_size=1, max_size=7),
    st.builds(range, st.integers(-6, 4), st.integers(5, 16), st.integers(1, 4)),
)
RELATIONS: list[Callable[[Expression, Expression], Condition]] = [
    lambda a, b: a <= b,
    lambda a, b: a < b,
    lambda a, b: a >= b,
    lambda a, b: a > b,
    lambda a, b: a == b,
    lambda a, b: a != b,
    lambda a, b: a % b == 0,
]
OPERATIONS: list[Callable[[Expression, Expression], Expression]] = [
    lambda a, b: a + b,
    lambda a, b: a - b,
    lambda a, b: a * b,
    lambda a, b: a * b,
    lambda a, b: a // b,
    lambda a, b: a % b,
    ceil_div,
    minimum,
    maximum,
    lambda a, b: maximum(a, b, 3),
    lambda a, b: a**2,
    lambda a, b: b**3,
    lambda a, b: 2 ** minimum(b, 12),
    lambda a, b: -a,
]


@st.composite
def problems(draw: st.DrawFn, max_constraints: int = 4) -> ConstraintProblem:
    """Draw a problem with up to four variables of up to twenty values, and all kinds of expressions and conditions."""
    problem = ConstraintProblem()
    for name in "wxyz"[: draw(st.integers(1, 4))]:
        problem.variable(name, draw(DOMAINS), prefer=draw(st.sampled_from(["smallest", "largest"])))
    for number in range(draw(st.integers(0, max_constraints))):
        problem.add(f"constraint {number}", draw(conditions(problem.variables)))
    return problem


@st.composite
def expressions(draw: st.DrawFn, variables: tuple[Variable, ...], depth: int = 3) -> Expression | int:
    kind = draw(st.integers(0, 9)) if depth else draw(st.integers(0, 2))
    if kind == 0:
        return draw(st.integers(-4, 9))
    variable = draw(st.sampled_from(variables))
    if kind < 3:
        return variable
    if kind == 3:
        return lookup(variable, {value: draw(st.integers(-5, 20)) for value in variable.domain})
    a, b = draw(expressions(variables, depth - 1)), draw(expressions(variables, depth - 1))
    return applied(draw(st.sampled_from(OPERATIONS)), a, b, otherwise=variable)


@st.composite
def conditions(draw: st.DrawFn, variables: tuple[Variable, ...], depth: int = 1) -> Condition:
    kind = draw(st.integers(0, 4)) if depth else 0
    if kind > 2:
        parts = draw(st.lists(conditions(variables, depth - 1), min_size=1, max_size=3))
        return (all_of if kind == 3 else any_of)(*parts)
    a, b = draw(expressions(variables)), draw(expressions(variables))
    variable = draw(st.sampled_from(variables))
    return applied(draw(st.sampled_from(RELATIONS)), a + variable, b, otherwise=variable == variable)


def applied(operation: Callable[[Any, Any], Any], a: Any, b: Any, otherwise: Any) -> Any:
    """Return the operation, or `otherwise` if it may divide by zero, has a negative exponent or overflows in CP-SAT."""
    try:
        result = operation(a, b)
    except (ValueError, ZeroDivisionError, TypeError, OverflowError):
        return otherwise
    if isinstance(result, Condition):
        return result
    size = max(map(abs, result.bounds)) if isinstance(result, Expression) else abs(result)
    return result if size < 10**6 else otherwise


def brute_force(
    problem: ConstraintProblem, without: str | None = None, only: tuple[str, ...] | None = None
) -> list[Values]:
    """Return all solutions. Python evaluates the text of the constraints, which tests the text, too."""
    names = [variable.name for variable in problem.variables]
    texts = [
        repr(constraint.condition)
        for constraint in problem.constraints
        if constraint.name != without and (only is None or constraint.name in only)
    ]
    code = compile(" and ".join(f"({text})" for text in texts) or "True", "<constraints>", "eval")
    points = (dict(zip(names, point, strict=True)) for point in product(*(v.domain for v in problem.variables)))
    return [point for point in points if eval(code, FUNCTIONS, dict(point))]


def evaluated(expression: Expression | int, point: Values) -> int:
    """Return the value of an expression, evaluated from its text."""
    return eval(repr(expression), FUNCTIONS, dict(point))


FUNCTIONS = {
    "ceil_div": lambda a, b: -(-a // b),
    "minimum": min,
    "maximum": max,
    "lookup": lambda value, table: table[value],
}
