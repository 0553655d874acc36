"""Functions of integer expressions for which Python has no operator."""

from __future__ import annotations

from collections.abc import Mapping

from .expressions import Expression, Operand, Quotient, Variable, as_expression
from .text import ATOM, Style


class Extremum(Expression):
    """The smallest or the largest of its operands."""

    __slots__ = ("largest", "operands")

    def __init__(self, operands: tuple[Expression, ...], *, largest: bool) -> None:
        self.operands, self.largest = operands, largest
        pick = max if largest else min
        self.bounds = (pick(o.bounds[0] for o in operands), pick(o.bounds[1] for o in operands))

    def evaluate(self, values: Mapping[Variable, int]) -> int:
        return (max if self.largest else min)(operand.evaluate(values) for operand in self.operands)

    def write(self, style: Style) -> tuple[str, int]:
        name = ("max" if self.largest else "min") if style.paper else ("maximum" if self.largest else "minimum")
        return f"{name}({', '.join(operand.write(style)[0] for operand in self.operands)})", ATOM


class Lookup(Expression):
    """The entry of a table for the value of a variable."""

    __slots__ = ("operands", "table")

    def __init__(self, variable: Variable, table: Mapping[int, int]) -> None:
        self.operands = (variable,)
        self.table = {key: table[key] for key in variable.domain if key in table}
        missing = [key for key in variable.domain if key not in table]
        if missing:
            raise ValueError(f"lookup: the table has no value for {variable} = {missing[0]}; it has {sorted(table)}")
        for key, value in self.table.items():
            if type(value) is not int:
                raise TypeError(f"lookup: the table's value for {variable} = {key} must be an integer, got {value!r}")
        self.bounds = (min(self.table.values()), max(self.table.values()))

    def evaluate(self, values: Mapping[Variable, int]) -> int:
        return self.table[self.operands[0].evaluate(values)]

    def write(self, style: Style) -> tuple[str, int]:
        variable = self.operands[0].write(style)[0]
        if style.paper:
            return f"{variable}[{', '.join(f'{k}→{v}' for k, v in self.table.items())}]", ATOM
        return f"lookup({variable}, {self.table})", ATOM


def ceil_div(dividend: Operand, divisor: Operand) -> Expression:
    """Return the quotient rounded up. The divisor's bounds must exclude zero."""
    return Quotient(as_expression(dividend), as_expression(divisor), upward=True)


def minimum(*operands: Operand) -> Expression:
    """Return the smallest of one or more expressions."""
    return _extremum(operands, largest=False)


def maximum(*operands: Operand) -> Expression:
    """Return the largest of one or more expressions."""
    return _extremum(operands, largest=True)


def lookup(variable: Variable, table: Mapping[int, int]) -> Expression:
    """Return table[variable], for measured numbers; the table needs an entry for each value of the variable."""
    if not isinstance(variable, Variable):
        raise TypeError(f"lookup: {variable!r} is not a variable; define a variable for this quantity")
    return Lookup(variable, table)


def _extremum(operands: tuple[Operand, ...], *, largest: bool) -> Expression:
    if not operands:
        raise ValueError("minimum() and maximum() need at least one expression")
    expressions = tuple(as_expression(operand) for operand in operands)
    return expressions[0] if len(expressions) == 1 else Extremum(expressions, largest=largest)
