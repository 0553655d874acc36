"""Solutions, domains, texts and error messages of the solver on small examples."""

import pickle
from itertools import islice

import pytest

from flashrnn.constrint import (
    ConstraintProblem,
    Infeasible,
    Variable,
    all_of,
    any_of,
    ceil_div,
    lookup,
    maximum,
    minimum,
)


@pytest.fixture
def problem() -> ConstraintProblem:
    return ConstraintProblem()


@pytest.fixture
def xyz(problem: ConstraintProblem) -> list[Variable]:
    return [problem.variable(name, range(1, 13)) for name in "xyz"]


def reason(problem: ConstraintProblem) -> str:
    with pytest.raises(Infeasible) as error:
        problem.solve()
    return str(error.value)


class TestSolving:
    def test_solution_by_name_variable_and_expression(self, problem):
        x, y = problem.variable("x", [2, 3]), problem.variable("y", 5)
        problem.add("odd", x % 2 == 1)
        solution = problem.solve()
        assert dict(solution) == {"x": 3, "y": 5}
        assert (solution[x], solution[y], solution.value(x * y + 1)) == (3, 5, 16)
        assert str(solution) == "x = 3, y = 5"

    def test_problems_solutions_and_errors_can_be_pickled(self, problem):
        x, y = problem.variable("x", range(9)), problem.variable("y", range(9), prefer="largest")
        problem.add("sum", lookup(x, {i: i * i for i in range(9)}) + y == 12, unit="bytes")
        solution = problem.solve()
        again, same = pickle.loads(pickle.dumps((problem, solution)))
        assert str(again) == str(problem)
        assert again.solve() == same == solution
        problem.add("none", x > 7)
        said = reason(problem)
        with pytest.raises(Infeasible) as error:
            problem.solve()
        assert str(pickle.loads(pickle.dumps(error.value))) == said

    def test_preference_chooses_the_end_of_the_domain(self, problem):
        x = problem.variable("x", range(10), prefer="largest")
        y = problem.variable("y", range(10))
        problem.add("sum", x + y == 12)
        assert dict(problem.solve(order=[x])) == {"x": 9, "y": 3}
        assert dict(problem.solve(order=[y])) == {"x": 9, "y": 3}

    def test_order_decides_these_variables_first(self, problem):
        x, y = problem.variable("x", range(10)), problem.variable("y", range(10))
        problem.add("sum", x + y == 5)
        assert [s["y"] for s in problem.solutions(order=[y])] == [0, 1, 2, 3, 4, 5]
        assert [s["x"] for s in problem.solutions(order=[x])] == [0, 1, 2, 3, 4, 5]

    def test_minimize_and_maximize(self, problem, xyz):
        x, y, _ = xyz
        problem.add("area", x * y == 12)
        assert problem.minimize(x + y).value(x + y) == 7
        assert problem.maximize(x + y).value(x + y) == 13

    def test_later_objectives_break_ties(self, problem, xyz):
        x, y, _ = xyz
        problem.add("area", x * y >= 12)
        assert dict(problem.minimize((x * y, -x)))["x"] == 12
        assert dict(problem.maximize((-x * y, y)))["y"] == 12

    def test_best_yields_solutions_in_order(self, problem):
        x = problem.variable("x", range(-3, 4))
        assert [s[x] for s in islice(problem.best((x * x, x)), 4)] == [0, -1, 1, -2]

    def test_exclude_removes_one_solution(self, problem):
        x, y = problem.variable("x", [1, 2]), problem.variable("y", [1, 2])
        problem.exclude(problem.solve())
        assert len(list(problem.solutions())) == 3
        assert not any(s[x] == s[y] == 1 for s in problem.solutions())

    def test_exclude_with_variables_removes_all_matching_solutions(self, problem):
        x, _ = problem.variable("x", [1, 2]), problem.variable("y", [1, 2])
        problem.exclude(problem.solve(), x)
        assert [s["x"] for s in problem.solutions()] == [2, 2]

    def test_constraints_added_during_iteration_do_not_affect_it(self, problem):
        x = problem.variable("x", range(5))
        solutions = problem.solutions(order=[x])
        next(solutions)
        problem.add("small", x <= 1)
        assert len(list(solutions)) == 4
        assert len(list(problem.solutions())) == 2

    def test_infeasible_problem_has_no_solutions_to_iterate(self, problem, xyz):
        problem.add("none", xyz[0] > 12)
        assert list(problem.solutions()) == []
        assert list(problem.best(xyz[0])) == []

    def test_problem_without_constraints(self, problem):
        problem.variable("x", [3, 1])
        assert [s["x"] for s in problem.solutions()] == [1, 3]

    def test_long_ranges_are_fast(self, problem):
        x, y = problem.variable("x", range(10**9)), problem.variable("y", range(0, 10**9, 7))
        problem.add("sum", x + y == 10**9)
        problem.add("multiple", x % 1000 == 0)
        solution = problem.minimize(x)
        assert solution[x] == next(x for x in range(0, 10**9, 1000) if (10**9 - x) % 7 == 0)


class TestPropagation:
    def test_sums_and_products_tighten_bounds(self, problem, xyz):
        x, y, z = xyz
        problem.add("sum", x + y + z >= 34)
        problem.add("product", x * y <= 121)
        domains = problem.domains()
        assert domains["z"] == range(10, 13)
        assert (domains["x"], domains["y"]) == (range(10, 13), range(10, 13))

    def test_products_restrict_factors_to_divisors(self, problem, xyz):
        x, y, z = xyz
        problem.add("product", x * y * z == 20)
        assert problem.domains()["x"] == (1, 2, 4, 5, 10)

    def test_divisibility_restricts_to_divisors(self, problem):
        size, x = problem.variable("size", 768), problem.variable("x", range(1, 20))
        problem.add("whole tiles", size % (16 * x) == 0)
        assert problem.domains()["x"] == (1, 2, 3, 4, 6, 8, 12, 16)

    def test_multiples(self, problem):
        x = problem.variable("x", range(100))
        problem.add("multiple", x % 24 == 0)
        assert problem.domains()["x"] == (0, 24, 48, 72, 96)

    def test_alternatives(self, problem, xyz):
        x, y, _ = xyz
        problem.add("either", any_of(x <= 2, (x >= 11) & (y >= 13)))
        assert list(problem.domains()["x"]) == [1, 2]

    def test_chain_of_constraints_reaches_the_fixed_point(self, problem):
        xs = [problem.variable(f"x{i}", range(8)) for i in range(8)]
        for i in range(7):
            problem.add(f"step {i}", xs[i] < xs[i + 1])
        assert [list(d) for d in problem.domains().values()] == [[i] for i in range(8)]

    def test_domains_of_infeasible_problem(self, problem, xyz):
        problem.add("none", xyz[0] * xyz[1] > 144)
        with pytest.raises(Infeasible, match="none"):
            problem.domains()


class TestInfeasible:
    def test_conflict_message_with_numbers_and_units(self, problem):
        x, y = problem.variable("x", [64, 128]), problem.variable("y", [502 * 4, 4096])
        problem.add("fine", x <= y)
        problem.add("shared memory", x * y * 2 <= 227 * 1024, unit="bytes")
        assert reason(problem) == (
            "no solution:\n  shared memory: needs at least 251 KiB, at most 227 KiB (2·x·y ≤ 227 KiB)"
        )

    @pytest.mark.parametrize(
        ("value", "unit", "text"),
        [
            (1000, "bytes", "1000 bytes"),
            (1536, "bytes", "1.5 KiB"),
            (3 << 20, "bytes", "3 MiB"),
            (4096, "registers", "4096 registers"),
            (4096, "", "4096"),
        ],
    )
    def test_units(self, problem, value, unit, text):
        x = problem.variable("x", value)
        problem.add("c", x <= 1, unit=unit)
        assert f"c: needs at least {text}, at most" in reason(problem)

    def test_conflict_contains_only_necessary_constraints(self, problem):
        size = problem.variable("head_dim", 4096)
        tile, other = problem.variable("tile", range(1, 1025)), problem.variable("other", range(9))
        problem.add("innocent", other <= tile)
        problem.add("cover", 8 * tile >= size)
        problem.add("registers", tile + 40 <= 255, unit="registers")
        with pytest.raises(Infeasible) as error:
            problem.minimize(tile)
        assert error.value.conflict == ("cover", "registers")
        assert str(error.value) == (
            "no solution with head_dim = 4096; these 2 constraints exclude each other:\n"
            "  cover: reaches at most 1720, needs at least 4096 (8·tile ≥ head_dim)\n"
            "  registers: needs at least 552 registers, at most 255 registers (tile + 40 ≤ 255 registers)"
        )
        assert error.value.summary == (
            "no solution with head_dim = 4096; these 2 constraints exclude each other:\n"
            "  cover: reaches at most 1720, needs at least 4096\n"
            "  registers: needs at least 552 registers, at most 255 registers"
        )

    @pytest.mark.parametrize(
        ("condition", "words"),
        [
            (lambda x: x < 1, "needs at least 1, less than 1 (x < 1)"),
            (lambda x: x > 12, "reaches at most 12, needs more than 12 (x > 12)"),
            (lambda x: x == 13, "reaches at most 12, needs exactly 13 (x = 13)"),
            (lambda x: x == 0, "needs at least 1, exactly 0 (x = 0)"),
            (lambda x: 2 * x == 7, "does not hold with x ∈ {1, 2, …, 12} (2·x = 7)"),
            (lambda x: x % 13 == 0, "does not hold with x ∈ {1, 2, …, 12} (x mod 13 = 0)"),
            (lambda x: any_of(x < 1, x > 12), "does not hold with x ∈ {1, 2, …, 12} (x < 1 or x > 12)"),
        ],
    )
    def test_message_for_each_relation(self, problem, xyz, condition, words):
        problem.add("c", condition(xyz[0]))
        assert reason(problem) == f"no solution:\n  c: {words}"

    def test_conflict_names_exclusions(self, problem):
        problem.variable("x", [4, 8])
        problem.exclude(problem.solve())
        problem.exclude(problem.solve())
        assert "excluded: x = 4: does not hold with x = 4 (x ≠ 4)" in reason(problem)


class TestText:
    @pytest.mark.parametrize(
        ("build", "paper", "python"),
        [
            (lambda x, y, z: x * y * 2 + 1024, "2·x·y + 1024", "2 * x * y + 1024"),
            (lambda x, y, z: (x + y) * z, "(x + y)·z", "(x + y) * z"),
            (lambda x, y, z: x - (y - z), "x - (y - z)", "x - (y - z)"),
            (lambda x, y, z: -(x + 1) - 2 * y, "-(x + 1) - 2·y", "-(x + 1) - 2 * y"),
            (lambda x, y, z: x + (-1) // y, "x + ⌊(-1) / y⌋", "x + (-1) // y"),
            (lambda x, y, z: (x * y) // z, "⌊x·y / z⌋", "(x * y) // z"),
            (lambda x, y, z: x * (y // z), "x·⌊y / z⌋", "x * (y // z)"),
            (lambda x, y, z: ceil_div(x + y, y * z), "⌈(x + y) / (y·z)⌉", "ceil_div(x + y, y * z)"),
            (lambda x, y, z: (x * y) % 8, "(x·y) mod 8", "(x * y) % 8"),
            (lambda x, y, z: (x + 1) ** 2, "(x + 1)²", "(x + 1) ** 2"),
            (lambda x, y, z: 2 ** (x + y), "2^(x + y)", "2 ** (x + y)"),
            (lambda x, y, z: (x**2) ** y, "(x²)^y", "(x ** 2) ** y"),
            (lambda x, y, z: maximum(x, minimum(y, 3)), "max(x, min(y, 3))", "maximum(x, minimum(y, 3))"),
            (lambda x, y, z: (x == 1) & ((y < 2) | (z != 3)), "x = 1 and (y < 2 or z ≠ 3)", None),
            (lambda x, y, z: (x <= 1) & (y >= 2) | (z > 3), "(x ≤ 1 and y ≥ 2) or z > 3", None),
            (lambda x, y, z: any_of(x == 1, y == 1), "x = 1 or y = 1", "(x == 1) | (y == 1)"),
            (lambda x, y, z: all_of(x == 1, y == 1), "x = 1 and y = 1", "(x == 1) & (y == 1)"),
        ],
    )
    def test_brackets(self, xyz, build, paper, python):
        assert str(build(*xyz)) == paper
        if python is not None:
            assert repr(build(*xyz)) == python

    def test_lookup(self, problem):
        assert str(lookup(problem.variable("x", [2, 1]), {1: 10, 2: 20, 3: 30})) == "x[1→10, 2→20]"

    def test_text_of_a_problem(self):
        problem = ConstraintProblem("tiling of one CTA")
        size = problem.variable("head_dim", 64, "head size")
        tile = problem.variable("tile", [16, 8], "units of a warp", unit="units")
        warps = problem.variable("warps", range(1, 17))
        depth = problem.variable("depth", [1, 2, 3, 5, 8, 13, 21])
        problem.add("cover", tile * warps >= size)
        problem.add("shared memory", 2 * tile * depth**2 <= 227 * 1024, unit="bytes")
        assert str(problem).splitlines() == [
            "tiling of one CTA",
            "variables",
            "  head_dim = 64                       head size",
            "  tile ∈ {8, 16} units                units of a warp",
            "  warps ∈ {1, 2, …, 16}",
            "  depth ∈ {1, 2, 3, …, 21}, 7 values",
            "constraints",
            "  cover: tile·warps ≥ head_dim",
            "  shared memory: 2·tile·depth² ≤ 227 KiB",
        ]
