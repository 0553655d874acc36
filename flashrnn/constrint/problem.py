"""Problems with named variables and constraints: their solutions and optima, or the reason why there are none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from .conditions import Condition, any_of
from .conflict import Infeasible
from .domains import Domain, domain_text, make_domain
from .expressions import Expression, Operand, Variable, as_expression, variables_of
from .model import Constraint, Model

Objective = Operand | tuple[Operand, ...]


class Solution(Mapping[str, int]):
    """The values of all variables, by name or by variable; `value` returns that of any expression of them."""

    def __init__(self, values: Mapping[Variable, int]) -> None:
        self._values = dict(values)
        self._names = {variable.name: value for variable, value in values.items()}

    def __getitem__(self, key: str | Variable) -> int:
        return self._values[key] if isinstance(key, Variable) else self._names[key]

    def __contains__(self, key: object) -> bool:
        return key in self._values if isinstance(key, Variable) else key in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def value(self, expression: Operand) -> int:
        return as_expression(expression).evaluate(self._values)

    def __repr__(self) -> str:
        return ", ".join(f"{name} = {value}" for name, value in self._names.items())


class ConstraintProblem:
    """Integer variables with finite domains, and constraints on them.

    It is designed for problems such as tilings, with about ten variables of up to a few hundred values and tens of
    constraints. The time to solve grows with the number of halvings of domains, in the worst case with the product of
    the domains. Bounds that push each other by one (x < y, y < x) take as many steps as the domains have values.
    Numbers are Python integers and do not overflow.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self._variables: dict[str, Variable] = {}
        self._constraints: dict[str, Constraint] = {}

    @property
    def variables(self) -> tuple[Variable, ...]:
        return tuple(self._variables.values())

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        return tuple(self._constraints.values())

    def variable(
        self,
        name: str,
        values: int | Iterable[int],
        meaning: str = "",
        *,
        unit: str = "",
        prefer: Literal["smallest", "largest"] = "smallest",
    ) -> Variable:
        """Return a new variable with these possible values (a range or a list), or a known quantity (an integer).

        `prefer` is the end of the domain that search tries first; it decides between equally good solutions.
        """
        if not name.isidentifier():
            raise ValueError(
                f"{name!r} cannot name a variable: use letters, digits, _ (and `meaning` for a description)"
            )
        if name in self._variables:
            raise ValueError(f"there is a variable '{name}' already")
        if prefer not in ("smallest", "largest"):
            raise ValueError(f"variable '{name}': prefer={prefer!r} is neither 'smallest' nor 'largest'")
        variable = Variable(name, make_domain(name, values), meaning, unit, prefer)
        self._variables[name] = variable
        return variable

    def add(self, name: str, condition: Condition, *, unit: str = "") -> None:
        """Add a constraint. Its name and the unit of its two sides appear in messages if it cannot be satisfied."""
        if not name or name in self._constraints:
            raise ValueError(f"there is a constraint '{name}' already" if name else "a constraint needs a name")
        if not isinstance(condition, Condition):
            raise TypeError(f"constraint '{name}': {condition!r} is not a condition such as x * y <= 64")
        self._own(variables_of(condition), f"constraint '{name}'")
        self._constraints[name] = Constraint(name, condition, unit)

    def exclude(self, solution: Solution, *variables: Variable) -> None:
        """Exclude a solution. With `variables`, exclude all solutions with the same values of these variables."""
        missing = [
            variable for variable in self._own(variables or self.variables, "exclude") if variable not in solution
        ]
        if missing:
            raise ValueError(f"exclude: the solution ({solution}) has no value for '{missing[0]}'")
        chosen = variables or tuple(v for v in self.variables if len(v.domain) > 1) or self.variables
        name = "excluded: " + ", ".join(f"{variable} = {solution[variable]}" for variable in chosen)
        self.add(name, any_of(*(variable != solution[variable] for variable in chosen)))

    def domains(self) -> dict[str, Domain]:
        """Return the domains of the variables after propagation only; they contain all solutions."""
        model = self._model()
        domains = model.domains()
        if domains is None:
            raise Infeasible(model)
        return {variable.name: domain for variable, domain in domains.items()}

    def solve(self, order: Sequence[Variable] = ()) -> Solution:
        """Return the first of `solutions`, or raise Infeasible with the reason."""
        return self._first(self.solutions(order))

    def solutions(self, order: Sequence[Variable] = ()) -> Iterator[Solution]:
        """Yield all solutions of the problem in its current state; none if it is infeasible.

        The variables in `order` are decided first, with preferred values first. After that, the next variable is always
        the one with the smallest domain relative to its number of constraints.
        """
        return map(Solution, self._model().solutions(self._own(order, "order")))

    def minimize(self, objective: Objective, order: Sequence[Variable] = ()) -> Solution:
        """Return the first of `best`, or raise Infeasible with the reason."""
        return self._first(self.best(objective, order))

    def maximize(self, objective: Objective, order: Sequence[Variable] = ()) -> Solution:
        """Return a solution with the largest objective (of a tuple, the first counts most), or raise Infeasible."""
        return self.minimize(tuple(-expression for expression in self._expressions(objective)), order)

    def best(self, objective: Objective, order: Sequence[Variable] = ()) -> Iterator[Solution]:
        """Yield all solutions, smallest objective first, computing each on demand; none if the problem is infeasible.

        Of a tuple of expressions the first counts, the next where it is equal, and so on; negate what is to be large.
        Keeps every open part of the search in memory: those whose lower bound is above the solutions asked for so far.
        """
        return map(Solution, self._model().best(self._expressions(objective), self._own(order, "order")))

    def __str__(self) -> str:
        head = [self.name] if self.name else []
        texts = [(f"{v} {domain_text(v.domain)} {v.unit}".rstrip(), v.meaning) for v in self.variables]
        width = max((len(text) for text, _ in texts), default=0)
        variables = [f"  {text:{width}}  {meaning}".rstrip() for text, meaning in texts]
        constraints = [f"  {constraint.name}: {constraint.text}" for constraint in self.constraints]
        return "\n".join([*head, "variables", *variables, "constraints", *constraints])

    def _model(self) -> Model:
        return Model(self.variables, self.constraints)

    def _first(self, solutions: Iterator[Solution]) -> Solution:
        for solution in solutions:
            return solution
        raise Infeasible(self._model())

    def _expressions(self, objective: Objective) -> tuple[Expression, ...]:
        several = objective if isinstance(objective, tuple) else (objective,)
        expressions = tuple(as_expression(expression) for expression in several)
        for expression in expressions:
            self._own(variables_of(expression), "objective")
        return expressions

    def _own(self, variables: Iterable[Variable], where: str) -> tuple[Variable, ...]:
        """Return the variables, if they are this problem's."""
        owned = tuple(variables)
        for variable in owned:
            if not isinstance(variable, Variable):
                raise TypeError(f"{where}: {variable!r} is not a variable")
            if self._variables.get(variable.name) is not variable:
                raise ValueError(f"{where}: variable '{variable}' belongs to another problem")
        return owned
