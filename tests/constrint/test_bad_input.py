"""Mistakes in writing a problem: one clear error each, where the mistake is made."""

import pytest

from flashrnn.constrint import ConstraintProblem, all_of, any_of, ceil_div, lookup, maximum


@pytest.fixture
def problem() -> ConstraintProblem:
    problem = ConstraintProblem()
    problem.variable("x", range(1, 9))
    problem.variable("z", range(-3, 4))
    return problem


@pytest.mark.parametrize(
    ("name", "values", "error", "message"),
    [
        ("y", [], ValueError, "'y' has no value to take"),
        ("y", range(5, 5), ValueError, "'y' has no value to take"),
        ("y", [1, 2.5], TypeError, "'y': 2.5 is not an integer"),
        ("y", [True], TypeError, "'y': True is not an integer"),
        ("y", 2.5, TypeError, "'y': 2.5 is neither a range or list of integers nor an integer"),
        ("warps per CTA", [1], ValueError, "'warps per CTA' cannot name a variable"),
        ("x", [1], ValueError, "variable 'x' already"),
    ],
)
def test_variables(problem, name, values, error, message):
    with pytest.raises(error, match=message):
        problem.variable(name, values)


def test_unknown_preference(problem):
    with pytest.raises(ValueError, match="'biggest' is neither 'smallest' nor 'largest'"):
        problem.variable("y", [1], prefer="biggest")


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda x, z: 1 <= x <= 5, TypeError, "chains like 1 <= x <= 8 cannot work"),
        (lambda x, z: x > 1 and z > 1, TypeError, "combine conditions with & and |"),
        (lambda x, z: not x > 1, TypeError, "'x > 1' is a condition, true or false only once"),
        (lambda x, z: x or z, TypeError, "'x' has no value until it is solved"),
        (lambda x, z: x / 2, TypeError, "use // .rounds down. or ceil_div"),
        (lambda x, z: 2 / x, TypeError, "use // .rounds down. or ceil_div"),
        (lambda x, z: x * 0.5, TypeError, "0.5 is not an integer"),
        (lambda x, z: x <= "8", TypeError, "'8' is not an integer"),
        (lambda x, z: x + True, TypeError, "True is not an integer"),
        (lambda x, z: x // z, ValueError, "the divisor ranges over -3..3"),
        (lambda x, z: ceil_div(x, 0), ValueError, "the divisor ranges over 0..0"),
        (lambda x, z: x % (x - 4), ValueError, "the divisor ranges over -3..4"),
        (lambda x, z: x**z, ValueError, "the exponent can be -3"),
        (lambda x, z: z**x, ValueError, "the base can be -3"),
        (lambda x, z: lookup(x, {1: 5}), ValueError, r"no value for x = 2; it has \[1\]"),
        (lambda x, z: lookup(x, dict.fromkeys(range(1, 9), 1.5)), TypeError, "for x = 1 must be an integer, got 1.5"),
        (lambda x, z: lookup(x + z, {1: 5}), TypeError, "x \\+ z is not a variable"),
        (lambda x, z: maximum(), ValueError, "at least one expression"),
        (lambda x, z: any_of(), ValueError, r"any_of\(\) needs at least one condition"),
        (lambda x, z: all_of(x > 1, True), TypeError, "all_of: True is not a condition"),
    ],
)
def test_expressions(problem, build, error, message):
    with pytest.raises(error, match=message):
        build(*problem.variables)


@pytest.mark.parametrize(
    ("name", "build", "error", "message"),
    [
        ("", lambda x: x > 1, ValueError, "a constraint needs a name"),
        ("taken", lambda x: x > 1, ValueError, "a constraint 'taken' already"),
        ("c", lambda x: x + 1, TypeError, r"constraint 'c': x \+ 1 is not a condition"),
        ("c", lambda x: True, TypeError, "constraint 'c': True is not a condition"),
    ],
)
def test_constraints(problem, name, build, error, message):
    x, _ = problem.variables
    problem.add("taken", x >= 1)
    with pytest.raises(error, match=message):
        problem.add(name, build(x))


def test_variables_of_another_problem(problem):
    x, _ = problem.variables
    foreign = ConstraintProblem().variable("x", range(4))
    message = "variable 'x' belongs to another problem"
    for attempt in (
        lambda: problem.add("c", x + foreign <= 3),
        lambda: problem.minimize(foreign),
        lambda: problem.solve(order=[foreign]),
        lambda: problem.exclude(problem.solve(), foreign),
    ):
        with pytest.raises(ValueError, match=message):
            attempt()


def test_order_of_names(problem):
    with pytest.raises(TypeError, match="order: 'x' is not a variable"):
        problem.solve(order=["x"])


def test_objective_that_is_none(problem):
    with pytest.raises(TypeError, match="None is not an integer or an expression"):
        problem.minimize(None)


def test_excluding_a_solution_of_fewer_variables(problem):
    solution = problem.solve()
    problem.variable("y", range(3))
    with pytest.raises(ValueError, match="has no value for 'y'"):
        problem.exclude(solution)
