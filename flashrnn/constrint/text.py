"""The text of expressions and conditions: as Python code (repr), and in mathematical notation (str)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

# Operator precedence, lowest first. An operand is put in brackets if its precedence is lower than required.
OR, AND, COMPARISON, SUM, SIGN, PRODUCT, POWER, ATOM = range(8)

_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Style:
    """The symbols of one notation."""

    times: str
    remainder: str
    both: str
    either: str
    relations: dict[str, str]
    paper: bool


PYTHON = Style(" * ", " % ", " & ", " | ", {r: r for r in ("<=", "<", ">=", ">", "==", "!=")}, paper=False)
PAPER = Style(
    "·", " mod ", " and ", " or ", {"<=": "≤", "<": "<", ">=": "≥", ">": ">", "==": "=", "!=": "≠"}, paper=True
)


class Writable(Protocol):
    """Anything with a text in a style, and the precedence of this text."""

    def write(self, style: Style) -> tuple[str, int]: ...


def bracketed(node: Writable, at_least: int, style: Style) -> str:
    """Return the text of a node, in brackets if its precedence is lower than `at_least`."""
    text, strength = node.write(style)
    return text if strength >= at_least else f"({text})"


def superscript(exponent: int) -> str:
    return str(exponent).translate(_SUPERSCRIPTS)


def with_unit(value: int, unit: str) -> str:
    """Return a number with its unit; bytes from 1 KiB on in KiB or MiB, with one decimal if necessary."""
    if unit == "bytes":
        for name, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
            if abs(value) >= size:
                return f"{value // size} {name}" if value % size == 0 else f"{value / size:.1f} {name}"
    return f"{value} {unit}".rstrip()
