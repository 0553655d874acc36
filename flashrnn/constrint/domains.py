"""The domain of a variable: a range with a step if possible, or a sorted tuple if there are gaps.

Both support slicing and bisection, so that other code need not distinguish them. A range needs constant memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

Domain = range | tuple[int, ...]


def make_domain(name: str, values: int | Iterable[int]) -> Domain:
    """Return the values sorted and without duplicates, as a range if they are equally spaced."""
    if isinstance(values, range) and values:
        return values if values.step > 0 else values[::-1]
    if not isinstance(values, Iterable | int):
        raise TypeError(f"variable '{name}': {values!r} is neither a range or list of integers nor an integer")
    items = list(values) if isinstance(values, Iterable) else [values]
    for value in items:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"variable '{name}': {value!r} is not an integer")
    if not items:
        raise ValueError(f"variable '{name}' has an empty domain")
    return compact(tuple(sorted(set(items))))


def compact(values: tuple[int, ...]) -> Domain:
    """Return the sorted values as a range if they are equally spaced."""
    step = values[1] - values[0] if len(values) > 1 else 1
    whole = range(values[0], values[-1] + 1, step)
    return whole if len(whole) == len(values) and tuple(whole) == values else values


def divisor(domain: Domain) -> int:
    """Return the greatest number that divides every value (0 if all are 0)."""
    return gcd(domain[0], domain.step if len(domain) > 1 else 0) if isinstance(domain, range) else gcd(*domain)


def domain_text(domain: Domain) -> str:
    """Return a domain as text: "= 4", "∈ {2, 4, 8}", or its ends with an ellipsis in between."""
    if len(domain) == 1:
        return f"= {domain[0]}"
    if len(domain) <= 6:
        return f"∈ {{{', '.join(map(str, domain))}}}"
    if isinstance(domain, range):
        return f"∈ {{{domain[0]}, {domain[1]}, …, {domain[-1]}}}"
    return f"∈ {{{', '.join(map(str, domain[:3]))}, …, {domain[-1]}}}, {len(domain)} values"
