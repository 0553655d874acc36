"""Mistakes in a problem cause one clear error where the mistake is made."""

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
        ("y", [], ValueError, "'y'"),
        ("y", range(5, 5), ValueError, "'y'"),
        ("y", [1, 2.5], TypeError, "'y': 2.5 "),
        ("y", [True], TypeError, "'y': True "),
        ("y", 2.5, TypeError, "'y': 2.5 .*range or list"),
        ("warps per CTA", [1], ValueError, "'warps per CTA'"),
        ("x", [1], ValueError, "'x'"),
    ],
)
def test_wrong_variable_is_an_error(problem, name, values, error, message):
    with pytest.raises(error, match=message):
        problem.variable(name, values)


def test_unknown_preference_is_an_error(problem):
    with pytest.raises(ValueError, match=r"'biggest' .*'smallest' .*'largest'"):
        problem.variable("y", [1], prefer="biggest")


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda x, z: 1 <= x <= 5, TypeError, "1 <= x <= 8"),
        (lambda x, z: x > 1 and z > 1, TypeError, r"& and \|"),
        (lambda x, z: not x > 1, TypeError, "'x > 1'"),
        (lambda x, z: x or z, TypeError, "'x'"),
        (lambda x, z: x / 2, TypeError, "// .*ceil_div"),
        (lambda x, z: 2 / x, TypeError, "// .*ceil_div"),
        (lambda x, z: x * 0.5, TypeError, "^0.5 "),
        (lambda x, z: x <= "8", TypeError, "^'8' "),
        (lambda x, z: x + True, TypeError, "^True "),
        (lambda x, z: x // z, ValueError, r"divisor .*-3\.\.3"),
        (lambda x, z: ceil_div(x, 0), ValueError, r"divisor .*0\.\.0"),
        (lambda x, z: x % (x - 4), ValueError, r"divisor .*-3\.\.4"),
        (lambda x, z: x**z, ValueError, "exponent .*-3"),
        (lambda x, z: z**x, ValueError, "base .*-3"),
        (lambda x, z: lookup(x, {1: 5}), ValueError, r"x = 2.*\[1\]"),
        (lambda x, z: lookup(x, dict.fromkeys(range(1, 9), 1.5)), TypeError, "x = 1 .*1.5"),
        (lambda x, z: lookup(x + z, {1: 5}), TypeError, r"x \+ z "),
        (lambda x, z: maximum(), ValueError, "at least one"),
        (lambda x, z: any_of(), ValueError, r"any_of\(\)"),
        (lambda x, z: all_of(x > 1, True), TypeError, "all_of: True "),
    ],
)
def test_wrong_expression_is_an_error(problem, build, error, message):
    with pytest.raises(error, match=message):
        build(*problem.variables)


@pytest.mark.parametrize(
    ("name", "build", "error", "message"),
    [
        ("", lambda x: x > 1, ValueError, "name"),
        ("taken", lambda x: x > 1, ValueError, "'taken'"),
        ("c", lambda x: x + 1, TypeError, r"'c': x \+ 1 "),
        ("c", lambda x: True, TypeError, "'c': True "),
    ],
)
def test_wrong_constraint_is_an_error(problem, name, build, error, message):
    x, _ = problem.variables
    problem.add("taken", x >= 1)
    with pytest.raises(error, match=message):
        problem.add(name, build(x))


def test_variables_of_another_problem_are_an_error(problem):
    x, _ = problem.variables
    foreign = ConstraintProblem().variable("x", range(4))
    message = "'x' .*another problem"
    for attempt in (
        lambda: problem.add("c", x + foreign <= 3),
        lambda: problem.minimize(foreign),
        lambda: problem.solve(order=[foreign]),
        lambda: problem.exclude(problem.solve(), foreign),
    ):
        with pytest.raises(ValueError, match=message):
            attempt()


def test_order_must_contain_variables(problem):
    with pytest.raises(TypeError, match="order: 'x' "):
        problem.solve(order=["x"])


def test_objective_must_be_an_expression(problem):
    with pytest.raises(TypeError, match=r"^None "):
        problem.minimize(None)


def test_excluding_a_solution_without_all_variables_is_an_error(problem):
    solution = problem.solve()
    problem.variable("y", range(3))
    with pytest.raises(ValueError, match="'y'"):
        problem.exclude(solution)
