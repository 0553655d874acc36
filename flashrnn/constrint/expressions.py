"""Integer expressions over variables, and their comparisons: trees built by Python operators, with bounds and text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import reduce
from itertools import chain
from math import prod

from . import intervals
from .conditions import AllOf, AnyOf, Condition
from .domains import Domain
from .intervals import Interval
from .text import ATOM, COMPARISON, PAPER, POWER, PRODUCT, PYTHON, SIGN, SUM, Style, bracketed, superscript


class Expression(ABC):
    """An integer that depends on variables.

    `+ - * // % **` build expressions, and `<= < >= > == !=` conditions. `bounds` are bounds of all possible values.
    """

    __slots__ = ("bounds",)
    bounds: Interval
    operands: tuple[Expression, ...] = ()

    @abstractmethod
    def evaluate(self, values: Mapping[Variable, int]) -> int:
        """Return the value of the expression for these values of the variables."""

    @abstractmethod
    def write(self, style: Style) -> tuple[str, int]:
        """Return the text, and the precedence of its outermost operator (`text.ATOM` is the highest)."""

    def __add__(self, other: Operand) -> Expression:
        return _sum(self, as_expression(other))

    def __radd__(self, other: int) -> Expression:
        return _sum(as_expression(other), self)

    def __sub__(self, other: Operand) -> Expression:
        return _sum(self, -as_expression(other))

    def __rsub__(self, other: int) -> Expression:
        return _sum(as_expression(other), -self)

    def __neg__(self) -> Expression:
        return _product(Constant(-1), self)

    def __mul__(self, other: Operand) -> Expression:
        return _product(self, as_expression(other))

    def __rmul__(self, other: int) -> Expression:
        return _product(as_expression(other), self)

    def __pow__(self, other: Operand) -> Expression:
        return Power(self, as_expression(other))

    def __rpow__(self, other: int) -> Expression:
        return Power(as_expression(other), self)

    def __floordiv__(self, other: Operand) -> Expression:
        return Quotient(self, as_expression(other), upward=False)

    def __rfloordiv__(self, other: int) -> Expression:
        return Quotient(as_expression(other), self, upward=False)

    def __mod__(self, other: Operand) -> Expression:
        return Remainder(self, as_expression(other))

    def __rmod__(self, other: int) -> Expression:
        return Remainder(as_expression(other), self)

    def __truediv__(self, other: object) -> Expression:
        raise TypeError(f"'{self} / {other}' need not be an integer: use // (rounds down) or ceil_div (rounds up)")

    __rtruediv__ = __truediv__

    def __le__(self, other: Operand) -> Comparison:
        return Comparison(self, "<=", as_expression(other))

    def __lt__(self, other: Operand) -> Comparison:
        return Comparison(self, "<", as_expression(other))

    def __ge__(self, other: Operand) -> Comparison:
        return Comparison(self, ">=", as_expression(other))

    def __gt__(self, other: Operand) -> Comparison:
        return Comparison(self, ">", as_expression(other))

    def __eq__(self, other: Operand) -> Comparison:  # type: ignore[override]
        return Comparison(self, "==", as_expression(other))

    def __ne__(self, other: Operand) -> Comparison:  # type: ignore[override]
        return Comparison(self, "!=", as_expression(other))

    __hash__ = object.__hash__  # by identity, because == builds a condition

    def __bool__(self) -> bool:
        raise TypeError(f"'{self}' has no value until it is solved: compare it, as in {self} != 0, and add that")

    def __repr__(self) -> str:
        return self.write(PYTHON)[0]

    def __str__(self) -> str:
        return self.write(PAPER)[0]


Operand = Expression | int


def as_expression(value: Operand) -> Expression:
    if isinstance(value, Expression):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return Constant(value)
    raise TypeError(f"{value!r} is not an integer or an expression of variables")


class Constant(Expression):
    """A number."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value, self.bounds = value, (value, value)

    def evaluate(self, values: Mapping[Variable, int]) -> int:
        return self.value

    def write(self, style: Style) -> tuple[str, int]:
        return str(self.value), ATOM if self.value >= 0 else SIGN


class Variable(Expression):
    """An unknown, created by `ConstraintProblem.variable`."""

    __slots__ = ("domain", "meaning", "name", "prefer", "unit")

    def __init__(self, name: str, domain: Domain, meaning: str, unit: str, prefer: str) -> None:
        self.name, self.domain, self.meaning, self.unit, self.prefer = name, domain, meaning, unit, prefer
        self.bounds = (domain[0], domain[-1])

    def evaluate(self, values: Mapping[Variable, int]) -> int:
        return values[self]

    def write(self, style: Style) -> tuple[str, int]:
        return self.name, ATOM


class Sum(Expression):
    """Two or more terms, at most one of them a constant (the last)."""

    __slots__ = ("operands",)

    def __init__(self, terms: tuple[Expression, ...]) -> None:
        self.operands = terms
        self.bounds = (sum(t.bounds[0] for t in terms), sum(t.bounds[1] for t in terms))

    def evaluate(self, values: Mapping[Variable, int]) -> int:
        return sum(term.evaluate(values) for term in self.operands)

    def write(self, style: Style) -> tuple[str, int]:
        text = bracketed(self.operands[0], SUM, style)
        for term in self.operands[1:]:
            written = bracketed(term, SUM, style)
            text += f" - {written[1:]}" if written.startswith("-") else f" + {written}"
        return text, SUM


class Product(Expression):
    """Two or more factors, at most one of them a constant (the first)."""

    __slots__ = ("operands",)

    def __init__(self, factors: tuple[Expression, ...]) -> None:
        self.operands = factors
        self.bounds = reduce(lambda a, b: intervals.product(*a, *b), (f.bounds for f in factors))

    def evaluate(self, values: Mapping[Variable, int]) -> int:
        return prod(factor.evaluate(values) for factor in self.operands)

    def write(self, style: Style) -> tuple[str, int]:
        first, *others = self.operands
        sign = ""
        if isinstance(first, Constant):
            sign = "-" if first.value < 0 else ""
            others = others if abs(first.value) == 1 else [Constant(abs(first.value)), *others]
        else:
            others = [first, *others]
        return sign + style.times.join(bracketed(factor, PRODUCT + 1, style) for factor in others), PRODUCT


class Power(Expression):
    """base ** exponent, with exponent >= 0; the exponent must be constant unless base >= 1."""

    __slots__ = ("operands",)

    def __init__(self, base: Expression, exponent: Expression) -> None:
        self.operands = (base, exponent)
        (low, high), (least, most) = base.bounds, exponent.bounds
        if least < 0:
            raise ValueError(f"'{self}': the exponent can be {least}; only exponents >= 0 give integers")
        if least != most and low < 1:
            raise ValueError(f"'{self}': the base can be {low}; with an exponent that varies it must be >= 1")
        self.bounds = intervals.power(low, high, least, most)

    def evaluate(self, values: Mapping[Variable, int]) -> int:
        return int(self.operands[0].evaluate(values) ** self.operands[1].evaluate(values))

    def write(self, style: Style) -> tuple[str, int]:
        base, exponent = self.operands
        text = bracketed(base, ATOM, style)
        if style.paper and isinstance(exponent, Constant):
            return text + superscript(exponent.value), POWER
        return f"{text}{'^' if style.paper else ' ** '}{bracketed(exponent, ATOM, style)}", POWER


class Quotient(Expression):
    """dividend / divisor, rounded up or down (Python's //). The divisor's bounds must exclude zero."""

    __slots__ = ("operands", "upward")

    def __init__(self, dividend: Expression, divisor: Expression, *, upward: bool) -> None:
        self.operands, self.upward = (dividend, divisor), upward
        _reject_zero(divisor, self)
        rule = intervals.ceil_quotient if upward else intervals.floor_quotient
        self.bounds = rule(*dividend.bounds, *divisor.bounds)

    def evaluate(self, values: Mapping[Variable, int]) -> int:
        dividend, divisor = (operand.evaluate(values) for operand in self.operands)
        return -(-dividend // divisor) if self.upward else dividend // divisor

    def write(self, style: Style) -> tuple[str, int]:
        dividend, divisor = self.operands
        if style.paper:
            left, right = "⌈⌉" if self.upward else "⌊⌋"
            return (
                f"{left}{bracketed(dividend, PRODUCT, style)} / {bracketed(divisor, PRODUCT + 1, style)}{right}",
                ATOM,
            )
        if self.upward:
            return f"ceil_div({dividend!r}, {divisor!r})", ATOM
        return f"{bracketed(dividend, PRODUCT + 1, style)} // {bracketed(divisor, PRODUCT + 1, style)}", PRODUCT


class Remainder(Expression):
    """dividend % divisor with Python's sign (that of the divisor), whose bounds must exclude zero."""

    __slots__ = ("operands",)

    def __init__(self, dividend: Expression, divisor: Expression) -> None:
        self.operands = (dividend, divisor)
        _reject_zero(divisor, self)
        self.bounds = intervals.remainder(*dividend.bounds, *divisor.bounds)

    def evaluate(self, values: Mapping[Variable, int]) -> int:
        return self.operands[0].evaluate(values) % self.operands[1].evaluate(values)

    def write(self, style: Style) -> tuple[str, int]:
        dividend, divisor = (bracketed(operand, PRODUCT + 1, style) for operand in self.operands)
        return f"{dividend}{style.remainder}{divisor}", PRODUCT


class Comparison(Condition):
    """A comparison: left `relation` right, where the relation is one of <=, <, >=, >, ==, !=."""

    __slots__ = ("left", "relation", "right")

    def __init__(self, left: Expression, relation: str, right: Expression) -> None:
        self.left, self.relation, self.right = left, relation, right

    def write(self, style: Style) -> tuple[str, int]:
        left, right = self.left.write(style)[0], self.right.write(style)[0]
        return f"{left} {style.relations[self.relation]} {right}", COMPARISON


def variables_of(whole: Expression | Condition) -> Iterator[Variable]:
    """Yield the variables in an expression or a condition, in order of appearance, with repetitions."""
    match whole:
        case Variable():
            yield whole
        case Expression():
            yield from chain.from_iterable(map(variables_of, whole.operands))
        case Comparison():
            yield from chain(variables_of(whole.left), variables_of(whole.right))
        case AllOf() | AnyOf():
            yield from chain.from_iterable(map(variables_of, whole.parts))


def _reject_zero(divisor: Expression, whole: Expression) -> None:
    low, high = divisor.bounds
    if low <= 0 <= high:
        raise ValueError(f"'{whole}': the divisor ranges over {low}..{high}; its range must not contain 0")


def _sum(a: Expression, b: Expression) -> Expression:
    terms = [term for side in (a, b) for term in (side.operands if isinstance(side, Sum) else (side,))]
    constant = sum(term.value for term in terms if isinstance(term, Constant))
    others = [term for term in terms if not isinstance(term, Constant)]
    if not others:
        return Constant(constant)
    if constant:
        others.append(Constant(constant))
    return others[0] if len(others) == 1 else Sum(tuple(others))


def _product(a: Expression, b: Expression) -> Expression:
    factors = [factor for side in (a, b) for factor in (side.operands if isinstance(side, Product) else (side,))]
    constant = prod(factor.value for factor in factors if isinstance(factor, Constant))
    others = [factor for factor in factors if not isinstance(factor, Constant)]
    if constant == 0 or not others:
        return Constant(constant)
    if constant != 1:
        others.insert(0, Constant(constant))
    return others[0] if len(others) == 1 else Product(tuple(others))
