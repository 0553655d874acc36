"""How expressions and conditions are written: as Python that can be read back (repr) and as on paper (str)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

# Binding strength, weakest first. A child is bracketed when it binds more weakly than its place demands.
OR, AND, COMPARISON, SUM, SIGN, PRODUCT, POWER, ATOM = range(8)

_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Style:
    """The symbols of one way of writing."""

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
    """Anything with a text in a style and the binding strength of that text."""

    def write(self, style: Style) -> tuple[str, int]: ...


def bracketed(node: Writable, at_least: int, style: Style) -> str:
    """Return the node's text, in brackets if it binds more weakly than `at_least`."""
    text, strength = node.write(style)
    return text if strength >= at_least else f"({text})"


def superscript(exponent: int) -> str:
    return str(exponent).translate(_SUPERSCRIPTS)


def with_unit(value: int, unit: str) -> str:
    """Return a number with its unit; bytes in KiB or MiB once they reach 1 KiB, to the tenth where it is not whole."""
    if unit == "bytes":
        for name, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
            if abs(value) >= size:
                return f"{value // size} {name}" if value % size == 0 else f"{value / size:.1f} {name}"
    return f"{value} {unit}".rstrip()
