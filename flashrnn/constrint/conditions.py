"""Conditions on integers: conjunctions (`&`, `all_of`) and alternatives (`|`, `any_of`) of comparisons."""

from __future__ import annotations

from abc import ABC, abstractmethod

from .text import AND, COMPARISON, OR, PAPER, PYTHON, Style, bracketed


class Condition(ABC):
    """A condition, which is true or false once every variable has a value."""

    __slots__ = ()

    @abstractmethod
    def write(self, style: Style) -> tuple[str, int]:
        """Return the text, and the precedence of its outermost operator (`text.ATOM` is the highest)."""

    def __and__(self, other: Condition) -> Condition:
        return all_of(self, other)

    def __or__(self, other: Condition) -> Condition:
        return any_of(self, other)

    def __bool__(self) -> bool:
        raise TypeError(
            f"'{self}' is a condition, true or false only once it is solved: combine conditions with & and | "
            "(each in brackets), or all_of and any_of; and, or, not, if and chains like 1 <= x <= 8 cannot work"
        )

    def __repr__(self) -> str:
        return self.write(PYTHON)[0]

    def __str__(self) -> str:
        return self.write(PAPER)[0]


class _Several(Condition):
    __slots__ = ("parts",)

    def __init__(self, parts: tuple[Condition, ...]) -> None:
        self.parts = parts


class AllOf(_Several):
    """Every part holds."""

    __slots__ = ()

    def write(self, style: Style) -> tuple[str, int]:
        # In Python, & has a higher precedence than comparisons, so its operands are always in brackets.
        at_least = COMPARISON if style.paper else COMPARISON + 1
        return style.both.join(bracketed(part, at_least, style) for part in self.parts), AND


class AnyOf(_Several):
    """At least one part holds."""

    __slots__ = ()

    def write(self, style: Style) -> tuple[str, int]:
        at_least = COMPARISON if style.paper else COMPARISON + 1
        return style.either.join(bracketed(part, at_least, style) for part in self.parts), OR


def all_of(*conditions: Condition) -> Condition:
    """Return the conjunction; the same as `c1 & c2 & ...`."""
    return _several(AllOf, "all_of", conditions)


def any_of(*conditions: Condition) -> Condition:
    """Return the alternative; the same as `c1 | c2 | ...`."""
    return _several(AnyOf, "any_of", conditions)


def _several(kind: type[_Several], name: str, conditions: tuple[Condition, ...]) -> Condition:
    if not conditions:
        raise ValueError(f"{name}() needs at least one condition")
    parts: list[Condition] = []
    for condition in conditions:
        if not isinstance(condition, Condition):
            raise TypeError(f"{name}: {condition!r} is not a condition; write comparisons like x * y <= 64")
        parts += condition.parts if isinstance(condition, kind) else (condition,)
    return parts[0] if len(parts) == 1 else kind(tuple(parts))
