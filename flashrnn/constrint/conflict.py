"""Why a problem has no solution: a smallest set of constraints that exclude each other, in words and numbers."""

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
    """No values of the variables satisfy all constraints.

    `conflict` names constraints that exclude each other, and no longer do when any one of them is left out; the message
    says of each what it asks for and how near the others let it come. Both are worked out when first asked for, so that
    code that only wants to know whether there is a solution does not wait for the reason.
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
        """Return the message without formulas, for those who do not know the problem's variables."""
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
    """Return an irreducible infeasible subset of an infeasible model's constraints, by deletion.

    Starts from the constraints that removed a value during a search that found nothing, since together they prove it;
    then leaves out one after the other where that still gives no solution. One search per constraint of the start.
    """
    core = _refutation(model.constraints, model.variables)
    assert core is not None, "the model has a solution"
    for constraint in core:
        if constraint in core:
            core = _refutation([other for other in core if other is not constraint], model.variables) or core
    return tuple(core)


def _refutation(constraints: Sequence[Constraint], variables: Sequence[Variable]) -> list[Constraint] | None:
    """Return the constraints that removed values on the way to no solution; None if there is a solution."""
    model = Model(variables, constraints)
    if next(model.solutions(), None) is not None:
        return None
    return [constraints[number] for number in sorted(model.network.pruned_by)]


def _described(constraint: Constraint, others: Model) -> str:
    """Return the name of a constraint in a conflict, and how near the others let it come."""
    condition = constraint.condition
    gap = None
    if isinstance(condition, Comparison) and not is_divisibility(condition):
        gap = _gap(condition, constraint.unit, others)
    return f"{constraint.name}: {gap or _choices(condition, others)}"


def _gap(condition: Comparison, unit: str, others: Model) -> str | None:
    """Return how near its two sides come where the others hold; None if no side is always the larger."""
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
    """Return the two sides where the larger exceeds the smaller by the least."""
    values = next(others.best((larger - smaller,)))
    return larger.evaluate(values), smaller.evaluate(values)


def _choices(condition: Condition, others: Model) -> str:
    """Return what the others leave to the variables of a condition."""
    domains = others.domains() or {}
    names = [variable for variable in dict.fromkeys(variables_of(condition)) if len(variable.domain) > 1]
    choices = [f"{name} {domain_text(domains[name])}" for name in names]
    return f"does not hold with {', '.join(choices)}" if choices else "does not hold"
