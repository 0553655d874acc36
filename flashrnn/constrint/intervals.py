"""Integer interval arithmetic: the range of an operation's result, given the ranges of its operands.

Every function is exact when its operands are single values, and otherwise returns a range that contains every possible
result. Divisors' ranges never contain zero (`expressions` sees to that).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import lru_cache
from math import gcd

Interval = tuple[int, int]


def product(al: int, ah: int, bl: int, bh: int) -> Interval:
    corners = (al * bl, al * bh, ah * bl, ah * bh)
    return min(corners), max(corners)


def floor_quotient(al: int, ah: int, bl: int, bh: int) -> Interval:
    corners = (al // bl, al // bh, ah // bl, ah // bh)
    return min(corners), max(corners)


def ceil_quotient(al: int, ah: int, bl: int, bh: int) -> Interval:
    low, high = floor_quotient(-ah, -al, bl, bh)
    return -high, -low


def remainder(al: int, ah: int, bl: int, bh: int) -> Interval:
    """Return a % b with Python's sign: that of b."""
    if bh < 0:
        low, high = remainder(-ah, -al, -bh, -bl)
        return -high, -low
    if bl == bh and al // bl == ah // bl:
        return al % bl, ah % bl
    if al >= 0 and ah < bl:
        return al, ah
    return 0, (min(ah, bh - 1) if al >= 0 else bh - 1)


def power(al: int, ah: int, el: int, eh: int) -> Interval:
    """Return a ** e for one exponent e >= 0, or for several where every a >= 1."""
    if al >= 0:
        return al**el, ah**eh
    if el % 2:
        return al**el, ah**el
    low = 0 if ah >= 0 and el > 0 else min(al**el, ah**el)
    return low, max(al**el, ah**el)


@lru_cache(maxsize=4096)  # propagation asks for the same few ranges thousands of times
def lookup(keys: tuple[int, ...], values: tuple[int, ...], low: int, high: int) -> Interval:
    """Return the range of the values whose (sorted) keys lie between low and high."""
    found = values[bisect_left(keys, low) : bisect_right(keys, high)]
    return min(found), max(found)


def shares_multiple(low: int, high: int, a: int, b: int) -> bool:
    """Return whether a multiple of both a and b (of zero: only zero) lies between low and high."""
    if a == 0 or b == 0:
        return low <= 0 <= high
    common = a // gcd(a, b) * b
    return high // common * common >= low


def divisible(al: int, ah: int, a: int, bl: int, bh: int, b: int) -> bool:
    """Return whether some multiple of a within [al, ah] can be a multiple of some multiple of b within [bl, bh]."""
    if al <= 0 <= ah:
        return True
    return max(abs(al), abs(ah)) >= (bl if bl > 0 else -bh) and shares_multiple(al, ah, a, b)


RULES = (product, floor_quotient, ceil_quotient, remainder, power, lookup)
