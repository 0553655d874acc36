"""A fixed set of variables and compiled constraints, on which propagation, search and conflict analysis work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .checks import Check, compile_conditions, compile_objective
from .conditions import Condition
from .domains import Domain
from .expressions import Comparison, Constant, Expression, Variable, variables_of
from .propagation import Network, State
from .search import Search
from .text import PAPER, with_unit

Values = dict[Variable, int]


@dataclass(slots=True, eq=False)
class Constraint:
    """A named condition with the unit of its two sides, and its checks after a model has been made with it."""

    name: str
    condition: Condition
    unit: str
    checks: list[Check] | None = None

    def __reduce__(self):
        return Constraint, (self.name, self.condition, self.unit)

    @property
    def text(self) -> str:
        """Return the condition as text, with the unit of a constant limit."""
        condition = self.condition
        if isinstance(condition, Comparison) and isinstance(condition.right, Constant) and self.unit:
            relation = PAPER.relations[condition.relation]
            return f"{condition.left} {relation} {with_unit(condition.right.value, self.unit)}"
        return str(condition)


class Model:
    """Variables and constraints. Every call starts from the full domains of the variables."""

    def __init__(self, variables: Sequence[Variable], constraints: Sequence[Constraint]) -> None:
        self.variables, self.constraints = tuple(variables), tuple(constraints)
        self._position = {variable: i for i, variable in enumerate(variables)}
        fresh = [constraint for constraint in constraints if constraint.checks is None]
        compiled = compile_conditions([constraint.condition for constraint in fresh], self._position)
        for constraint, checks in zip(fresh, compiled, strict=True):
            constraint.checks = checks
        self.network = Network(len(variables), [constraint.checks or [] for constraint in constraints])

    def __reduce__(self):
        return Model, (self.variables, self.constraints)  # compiled functions cannot be pickled

    def propagated(self) -> State | None:
        """Return the domains after propagation of all constraints, or None if a domain becomes empty."""
        state = State.of([variable.domain for variable in self.variables])
        return state if self.network.propagate(state) else None

    def domains(self) -> dict[Variable, Domain] | None:
        state = self.propagated()
        return None if state is None else dict(zip(self.variables, state.domains, strict=True))

    def solutions(self, order: Sequence[Variable] = ()) -> Iterator[Values]:
        """Yield all solutions, depth first."""
        state = self.propagated()
        if state is not None:
            yield from map(self._values, self._search(order).depth_first(state))

    def best(self, objective: tuple[Expression, ...], order: Sequence[Variable] = ()) -> Iterator[Values]:
        """Yield all solutions in the order of the objective, the smallest first."""
        state = self.propagated()
        if state is not None:
            bound = compile_objective(objective, self._position)
            yield from map(self._values, self._search(order, objective).best_first(state, bound))

    def _search(self, order: Sequence[Variable], objective: tuple[Expression, ...] = ()) -> Search:
        first = [self._position[variable] for variable in order]
        largest_first = [variable.prefer == "largest" for variable in self.variables]
        of_objective = {self._position[variable] for expression in objective for variable in variables_of(expression)}
        return Search(self.network, first, largest_first, of_objective)

    def _values(self, state: State) -> Values:
        return dict(zip(self.variables, state.low, strict=True))
