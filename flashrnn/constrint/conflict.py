"""The reason why a problem has no solution: a minimal set of constraints that exclude each other, in words."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from .checks import is_divisibility
from .conditions import Condition
from .domains import domain_text
from .expressions import Comparison, Expression, Variable, variables_of
from .model import Constraint, Model
from .text import with_unit


class Infeasible(Exception):
    """Error: no values of the variables satisfy all constraints.

    `conflict` contains the names of constraints that exclude each other; without any one of them, the others have a
    solution. The message gives, for each of them, what it needs and how close the others allow it to come. Both are
    computed on first use, so that code that only needs to know whether there is a solution does not wait for them.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._model = model

    @cached_property
    def conflict(self) -> tuple[str, ...]:
        return tuple(constraint.name for constraint in self._conflict)

    @cached_property
    def _conflict(self) -> tuple[Constraint, ...]:
        return minimal_conflict(self._model)

    @cached_property
    def summary(self) -> str:
        """Return the message without formulas, for readers who do not know the variables of the problem."""
        return self._text(formulas=False)

    def _text(self, *, formulas: bool) -> str:
        conflict = self._conflict
        involved = {variable for constraint in conflict for variable in variables_of(constraint.condition)}
        given = [f"{v} {domain_text(v.domain)}" for v in self._model.variables if v in involved and len(v.domain) == 1]
        opening = f"no solution with {', '.join(given)}" if given else "no solution"
        if len(conflict) > 1:
            opening += f"; these {len(conflict)} constraints exclude each other"
        lines = []
        for constraint in conflict:
            others = Model(self._model.variables, [other for other in conflict if other is not constraint])
            lines.append(_described(constraint, others) + (f" ({constraint.text})" if formulas else ""))
        return "\n  ".join([f"{opening}:", *lines])

    @cached_property
    def _message(self) -> str:
        return self._text(formulas=True)

    def __str__(self) -> str:
        return self._message


def minimal_conflict(model: Model) -> tuple[Constraint, ...]:
    """Return an irreducible infeasible subset of the constraints of an infeasible model, found by deletion.

    It starts from the constraints that removed values during the unsuccessful search, because these prove that there is
    no solution. It then removes one constraint after another if there is still no solution. This takes one search per
    constraint.
    """
    core = _refutation(model.constraints, model.variables)
    assert core is not None, "the model has a solution"
    for constraint in core:
        if constraint in core:
            core = _refutation([other for other in core if other is not constraint], model.variables) or core
    return tuple(core)


def _refutation(constraints: Sequence[Constraint], variables: Sequence[Variable]) -> list[Constraint] | None:
    """Return the constraints that removed values in an unsuccessful search; None if there is a solution."""
    model = Model(variables, constraints)
    if next(model.solutions(), None) is not None:
        return None
    return [constraints[number] for number in sorted(model.network.pruned_by)]


def _described(constraint: Constraint, others: Model) -> str:
    """Return the name of a constraint in a conflict, and how close the others allow it to come."""
    condition = constraint.condition
    gap = None
    if isinstance(condition, Comparison) and not is_divisibility(condition):
        gap = _gap(condition, constraint.unit, others)
    return f"{constraint.name}: {gap or _choices(condition, others)}"


def _gap(condition: Comparison, unit: str, others: Model) -> str | None:
    """Return how close the two sides come if the other constraints hold; None if neither is always the larger."""
    left, relation, right = condition.left, condition.relation, condition.right
    if relation in ("<=", "<", "=="):
        a, b = _nearest(left, right, others)
        if relation != "==" or a > b:
            limit = {"<=": "at most", "<": "less than", "==": "exactly"}[relation]
            return f"needs at least {with_unit(a, unit)}, {limit} {with_unit(b, unit)}"
    if relation in (">=", ">", "=="):
        b, a = _nearest(right, left, others)
        if relation != "==" or a < b:
            limit = {">=": "at least", ">": "more than", "==": "exactly"}[relation]
            return f"reaches at most {with_unit(a, unit)}, needs {limit} {with_unit(b, unit)}"
    return None


def _nearest(larger: Expression, smaller: Expression, others: Model) -> tuple[int, int]:
    """Return the values of both sides at their smallest difference."""
    values = next(others.best((larger - smaller,)))
    return larger.evaluate(values), smaller.evaluate(values)


def _choices(condition: Condition, others: Model) -> str:
    """Return a text on the domains that the other constraints leave to the variables of a condition."""
    domains = others.domains() or {}
    names = [variable for variable in dict.fromkeys(variables_of(condition)) if len(variable.domain) > 1]
    choices = [f"{name} {domain_text(domains[name])}" for name in names]
    return f"does not hold with {', '.join(choices)}" if choices else "does not hold"
