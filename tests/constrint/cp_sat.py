"""Translation of a problem to OR-tools CP-SAT: the same variables, constraints and objective, for comparison."""

import operator
from collections.abc import Collection
from functools import reduce
from itertools import product
from typing import Any

from ortools.sat.python import cp_model

from flashrnn.constrint import (
    AllOf,
    AnyOf,
    Comparison,
    Condition,
    Constant,
    ConstraintProblem,
    Expression,
    Extremum,
    Lookup,
    Power,
    Product,
    Quotient,
    Remainder,
    Solution,
    Sum,
    Variable,
)

RELATIONS = {
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
    ">": operator.gt,
    "==": operator.eq,
    "!=": operator.ne,
}


def solve_with_cp_sat(
    problem: ConstraintProblem, objective: tuple[Expression, ...] = (), only: Collection[str] | None = None
) -> Solution | None:
    """Return a solution that minimises the objective (lexicographically if it is a tuple); None if there is none.

    `only` names the constraints to use; None means all. CP-SAT runs with one worker, which is the fastest at these
    sizes and comparable with our solver.
    """
    translation = _Translation()
    for variable in problem.variables:
        translation.of(variable)
    for constraint in problem.constraints:
        if only is None or constraint.name in only:
            translation.demand(constraint.condition)
    if objective:
        translation.model.minimize(_combined(objective, translation))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    status = solver.solve(translation.model)
    if status == cp_model.INFEASIBLE:
        return None
    assert status == cp_model.OPTIMAL, solver.status_name(status)
    return Solution({variable: solver.value(translation.of(variable)) for variable in problem.variables})


def _combined(objective: tuple[Expression, ...], translation: "_Translation") -> Any:
    """Return one expression with the lexicographic order of the objective."""
    total: Any = 0
    for expression in objective:
        low, high = expression.bounds
        total = total * (high - low + 1) + (translation.of(expression) - low)
    return total


class _Translation:
    """Translates expressions to linear expressions of CP-SAT, with a variable per result of a nonlinear operation."""

    def __init__(self) -> None:
        self.model = cp_model.CpModel()
        self.made: dict[Expression, Any] = {}  # keys by identity, because == of expressions is a condition

    def of(self, e: Expression) -> Any:
        if isinstance(e, Variable):
            if e not in self.made:
                values = cp_model.Domain.from_values(list(e.domain))
                self.made[e] = self.model.new_int_var_from_domain(values, e.name)
        elif e.bounds[0] == e.bounds[1]:
            return e.bounds[0]
        elif e not in self.made:
            self.made[e] = _RULES[type(e)](self, e)
        return self.made[e]

    def new(self, low: int, high: int) -> cp_model.IntVar:
        return self.model.new_int_var(low, high, f"t{len(self.model.proto.variables)}")

    def bound(self, e: Expression) -> cp_model.IntVar:
        """Return a variable equal to an expression."""
        result = self.new(*e.bounds)
        self.model.add(result == self.of(e))
        return result

    def demand(self, condition: Condition, enforcing: list[cp_model.IntVar] | None = None) -> None:
        """Add a condition that must hold if all `enforcing` literals are true."""
        enforcing = enforcing or []
        if isinstance(condition, AllOf):
            for part in condition.parts:
                self.demand(part, enforcing)
        elif isinstance(condition, AnyOf):
            chosen = [self.model.new_bool_var("") for _ in condition.parts]
            self.model.add_bool_or(chosen).only_enforce_if(*enforcing)
            for literal, part in zip(chosen, condition.parts, strict=True):
                self.demand(part, [literal])
        else:
            assert isinstance(condition, Comparison)
            linear = RELATIONS[condition.relation](self.of(condition.left), self.of(condition.right))
            if linear is False:
                self.model.add_bool_or(literal.negated() for literal in enforcing)
            elif linear is not True:
                self.model.add(linear).only_enforce_if(*enforcing)


def _sum(t: _Translation, e: Sum) -> Any:
    return sum(t.of(term) for term in e.operands)


def _product(t: _Translation, e: Product) -> Any:
    fixed = [f.bounds[0] for f in e.operands if f.bounds[0] == f.bounds[1]]
    varying = [f for f in e.operands if f.bounds[0] != f.bounds[1]]
    coefficient = reduce(int.__mul__, fixed, 1)
    if len(varying) == 1:
        return coefficient * t.of(varying[0])
    whole = reduce(Expression.__mul__, varying)
    result = t.new(*whole.bounds)
    t.model.add_multiplication_equality(result, [t.of(factor) for factor in varying])
    return coefficient * result


def _quotient(t: _Translation, e: Quotient) -> Any:
    a, b = e.operands
    if b.bounds[1] < 0:
        a, b = -a, -b
    if e.upward:
        a = a + (b - 1)
    result = t.new(*e.bounds)
    if a.bounds[0] >= 0:
        t.model.add_division_equality(result, t.of(a), t.of(b))
        return result
    # CP-SAT's own division rounds towards zero, so use the definition: b * result <= a < b * result + b.
    multiple = t.new(min(-abs(x) for x in a.bounds) - b.bounds[1], max(abs(x) for x in a.bounds))
    t.model.add_multiplication_equality(multiple, [t.of(b), result])
    t.model.add(multiple <= t.of(a))
    t.model.add(t.of(a) <= multiple + t.of(b) - 1)
    return result


def _remainder(t: _Translation, e: Remainder) -> Any:
    a, b = e.operands
    if a.bounds[0] >= 0 and b.bounds[0] > 0:
        result = t.new(*e.bounds)
        t.model.add_modulo_equality(result, t.of(a), t.of(b))
        return result
    quotient = Quotient(a, b, upward=False)
    return t.of(a - b * quotient)


def _power(t: _Translation, e: Power) -> Any:
    base, exponent = e.operands
    result = t.new(*e.bounds)
    if exponent.bounds[0] == exponent.bounds[1]:
        t.model.add_multiplication_equality(result, [t.of(base)] * exponent.bounds[0])
        return result
    pairs = product(range(base.bounds[0], base.bounds[1] + 1), range(exponent.bounds[0], exponent.bounds[1] + 1))
    t.model.add_allowed_assignments([t.bound(base), t.bound(exponent), result], [(b, n, b**n) for b, n in pairs])
    return result


def _extremum(t: _Translation, e: Extremum) -> Any:
    result = t.new(*e.bounds)
    add = t.model.add_max_equality if e.largest else t.model.add_min_equality
    add(result, [t.of(operand) for operand in e.operands])
    return result


def _lookup(t: _Translation, e: Lookup) -> Any:
    result = t.new(*e.bounds)
    t.model.add_allowed_assignments([t.of(e.operands[0]), result], list(e.table.items()))
    return result


_RULES: dict[type, Any] = {
    Constant: lambda t, e: e.value,
    Sum: _sum,
    Product: _product,
    Quotient: _quotient,
    Remainder: _remainder,
    Power: _power,
    Extremum: _extremum,
    Lookup: _lookup,
}
