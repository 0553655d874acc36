"""Pruning of domains to a fixed point (Global ARC-Reduce of the FlashRNN paper, arXiv 2412.07752)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from .checks import ANY, UP_TO, Check, Test
from .domains import Domain, divisor
from .source import Bounds

# If a test is not monotone, domains up to this size are tested value by value; larger ones are first cut by search.
VALUE_BY_VALUE = 512


class State:
    """The domains of all variables, with their smallest values, largest values and divisors."""

    __slots__ = ("divisor", "domains", "high", "low")

    def __init__(self, domains: list[Domain], low: Bounds, high: Bounds, divisor: Bounds) -> None:
        self.domains, self.low, self.high, self.divisor = domains, low, high, divisor

    @classmethod
    def of(cls, domains: Sequence[Domain]) -> State:
        return cls(list(domains), [d[0] for d in domains], [d[-1] for d in domains], [divisor(d) for d in domains])

    def copy(self) -> State:
        return State(self.domains[:], self.low[:], self.high[:], self.divisor[:])


class Network:
    """The checks of numbered constraints, and which of them depend on each variable."""

    def __init__(self, size: int, constraints: Sequence[Sequence[Check]]) -> None:
        self.checks = [(check, number) for number, checks in enumerate(constraints) for check in checks]
        self.pruned_by: set[int] = set()  # the constraints that have removed values
        # For each variable, the checks to run again when its smallest value, largest value or divisor changes.
        self.readers: dict[str, list[list[int]]] = {table: [[] for _ in range(size)] for table in "LHS"}
        for place, (check, _) in enumerate(self.checks):
            for table, index in check.reads:
                self.readers[table][index].append(place)

    def propagate(self, state: State, woken: Iterable[int] | None = None) -> bool:
        """Remove values that do not pass a check until nothing changes; return False if a domain becomes empty.

        `woken` are the checks to start with; None means all. Running a check takes one or two tests, and for each of
        its undecided variables another one, or log2(domain) tests if it prunes, or one per value if it is not monotone.
        """
        queued = set(range(len(self.checks)) if woken is None else woken)
        queue = sorted(queued)  # a heap, so that checks run in the order in which their constraints were added
        low, high, divisors = state.low, state.high, state.divisor
        while queue:
            place = heappop(queue)
            queued.discard(place)
            check, number = self.checks[place]
            test = check.test
            if not test(low, high, divisors):
                self.pruned_by.add(number)
                return False
            if check.one_sided and test(high, low, divisors):
                continue
            undecided = [(index, shape) for index, shape in check.shapes if low[index] != high[index]]
            if check.sleeps and len(undecided) > 1:
                continue
            for index, shape in undecided:
                domain = state.domains[index]
                remaining = _passing(test, state, index, shape)
                if len(remaining) == len(domain):
                    continue
                self.pruned_by.add(number)
                if not remaining:
                    return False
                for other in self.assign(state, index, remaining):
                    if other not in queued:
                        queued.add(other)
                        heappush(queue, other)
        return True

    def assign(self, state: State, index: int, domain: Domain) -> list[int]:
        """Set a smaller domain of a variable; return the checks to run again, possibly with duplicates."""
        woken: list[int] = []
        state.domains[index] = domain
        if state.low[index] != domain[0]:
            state.low[index] = domain[0]
            woken += self.readers["L"][index]
        if state.high[index] != domain[-1]:
            state.high[index] = domain[-1]
            woken += self.readers["H"][index]
        if self.readers["S"][index]:
            step = divisor(domain)
            if step != state.divisor[index]:
                state.divisor[index] = step
                woken += self.readers["S"][index]
        return woken


def _passing(test: Test, state: State, index: int, shape: str) -> Domain:
    """Return the values of a variable that pass a test, given that its whole domain passes."""
    domain = state.domains[index]
    if shape is ANY:
        return _filtered(test, state, index, domain)
    low, high = state.low, state.high
    # A test of these shapes reads the variable in one list only, and the value there passes.
    bound, farthest = (low, high[index]) if shape is UP_TO else (high, low[index])
    passing = bound[index]
    bound[index] = farthest
    all_pass = test(low, high, state.divisor)
    bound[index] = passing
    if all_pass:  # most often
        return domain
    if shape is UP_TO:
        return domain[: _count(test, state, bound, index, domain)]
    return domain[len(domain) - _count(test, state, bound, index, domain[::-1]) :]


def _count(test: Test, state: State, bound: Bounds, index: int, values: Domain) -> int:
    """Return how many values pass a test that reads the variable in `bound`; the first passes, the last does not."""
    first = bound[index]
    passing, failing = 1, len(values) - 1
    while passing < failing:
        probe = (passing + failing) // 2
        bound[index] = values[probe]
        if test(state.low, state.high, state.divisor):
            passing = probe + 1
        else:
            failing = probe
    bound[index] = first
    return passing


def _filtered(test: Test, state: State, index: int, domain: Domain) -> Domain:
    """Return the values that pass a test of any shape."""
    if len(domain) > VALUE_BY_VALUE:
        return domain
    low, high, divisors = state.low, state.high, state.divisor
    before = low[index], high[index], divisors[index]
    remaining = []
    for value in domain:
        low[index] = high[index] = value
        divisors[index] = abs(value)
        if test(low, high, divisors):
            remaining.append(value)
    low[index], high[index], divisors[index] = before
    return domain if len(remaining) == len(domain) else tuple(remaining)
