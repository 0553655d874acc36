"""The solver compared with brute force and with CP-SAT on random small problems."""

from itertools import islice

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashrnn.constrint import ConstraintProblem, Infeasible, compile_value
from tests.constrint.cp_sat import solve_with_cp_sat
from tests.constrint.random_problems import brute_force, evaluated, expressions, problems

EXAMPLES = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def as_set(solutions) -> set[tuple[tuple[str, int], ...]]:
    return {tuple(solution.items()) for solution in solutions}


@EXAMPLES
@given(problems())
def test_solutions_are_those_of_brute_force(problem: ConstraintProblem):
    found = list(problem.solutions())
    assert as_set(found) == as_set(brute_force(problem))
    assert len(as_set(found)) == len(found)


@EXAMPLES
@given(problems(), st.data())
def test_best_sorts_all_solutions_by_objective(problem: ConstraintProblem, data):
    objective = tuple(data.draw(st.lists(expressions(problem.variables), min_size=1, max_size=2)))
    values = [tuple(evaluated(e, point) for e in objective) for point in brute_force(problem)]
    assert [tuple(map(solution.value, objective)) for solution in problem.best(objective)] == sorted(values)
    if values:
        assert tuple(map(problem.minimize(objective).value, objective)) == min(values)
        assert tuple(map(problem.maximize(objective).value, objective)) == max(values)


@EXAMPLES
@given(problems(max_constraints=6))
def test_conflict_is_infeasible_and_irreducible(problem: ConstraintProblem):
    if brute_force(problem):
        problem.solve()
        return
    with pytest.raises(Infeasible) as error:
        problem.solve()
    conflict = error.value.conflict
    assert not brute_force(problem, only=conflict)
    for name in conflict:
        assert brute_force(problem, only=conflict, without=name)
        assert f"{name}: " in str(error.value)


@EXAMPLES
@given(problems(), st.data())
def test_order_and_preference_determine_the_first_solution(problem: ConstraintProblem, data):
    order = data.draw(st.permutations(problem.variables))

    def rank(solution) -> tuple[int, ...]:
        return tuple(solution[v.name] * (-1 if v.prefer == "largest" else 1) for v in order)

    assert [dict(s) for s in problem.solutions(order)] == sorted(brute_force(problem), key=rank)


@EXAMPLES
@given(problems())
def test_propagation_loses_no_solution(problem: ConstraintProblem):
    solutions = brute_force(problem)
    if not solutions:
        return
    domains = problem.domains()
    assert all(solution[name] in domain for solution in solutions for name, domain in domains.items())


@EXAMPLES
@given(problems(), st.data())
def test_bounds_contain_every_value(problem: ConstraintProblem, data):
    expression = data.draw(expressions(problem.variables))
    if not isinstance(expression, int):
        low, high = expression.bounds
        assert all(low <= evaluated(expression, point) <= high for point in brute_force(problem))


@EXAMPLES
@given(problems(), st.data())
def test_compiled_value_equals_that_of_the_expression(problem: ConstraintProblem, data):
    expression = data.draw(expressions(problem.variables))
    if not isinstance(expression, int):
        value = compile_value(expression, problem.variables)
        assert all(value([*point.values()]) == evaluated(expression, point) for point in brute_force(problem))


@EXAMPLES
@given(problems(), st.data())
def test_excluding_the_best_solution_yields_the_next_best(problem: ConstraintProblem, data):
    objective = data.draw(expressions(problem.variables))
    expected = [solution.value(objective) for solution in islice(problem.best(objective), 3)]
    for value in expected:
        best = problem.minimize(objective)
        assert best.value(objective) == value
        problem.exclude(best)
    if len(expected) < 3:
        with pytest.raises(Infeasible):
            problem.solve()


@settings(EXAMPLES, max_examples=20)
@given(problems(), st.data())
def test_cp_sat_finds_the_same_optimum(problem: ConstraintProblem, data):
    objective = tuple(data.draw(st.lists(expressions(problem.variables), min_size=1, max_size=2)))
    objective = tuple(e for e in objective if not isinstance(e, int))
    theirs, ours = solve_with_cp_sat(problem, objective), next(problem.best(objective), None)
    assert (theirs is None) == (ours is None)
    if theirs is not None:
        assert [theirs.value(e) for e in objective] == [ours.value(e) for e in objective]
        assert dict(theirs) in brute_force(problem)
