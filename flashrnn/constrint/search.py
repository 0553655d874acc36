"""Search for solutions, by halving and pruning domains until every variable has one value."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from heapq import heappop, heappush
from math import inf

from .checks import Objective
from .propagation import Network, State

# Deciding what the objective depends on raises its lower bound. With this weight, found by trial on tilings
# (tests/constrint/tilings.py), the search for an optimum opens a fifth fewer states than without, at times ten times
# fewer.
OBJECTIVE_WEIGHT = 8


class Search:
    """A search in one network of checks, with an order of variables and a preferred end of each domain.

    Variables that are not in the order are decided afterwards, always the one with the smallest domain relative to its
    number of checks; variables of the objective count as if they had more checks.
    """

    def __init__(
        self, network: Network, order: Sequence[int], largest_first: Sequence[bool], of_objective: Collection[int]
    ) -> None:
        self.network, self.order, self.largest_first = network, order, largest_first
        readers = zip(*(network.readers[table] for table in "LHS"), strict=True)
        self.degree = [
            (OBJECTIVE_WEIGHT if index in of_objective else 1) * (1 + sum(map(len, lists)))
            for index, lists in enumerate(readers)
        ]

    def depth_first(self, root: State) -> Iterator[State]:
        """Yield all solutions below a propagated state, preferred values first."""
        stack: list[Iterator[State]] = [iter([root])]
        while stack:
            state = next(stack[-1], None)
            if state is None:
                stack.pop()
                continue
            index = self._undecided(state)
            if index is None:
                yield state
            else:
                stack.append(self._children(state, index))

    def best_first(self, root: State, objective: Objective) -> Iterator[State]:
        """Yield all solutions, with the smallest objective first, and preferred values first if it is equal.

        States whose lower bound exceeds the objective of the next solution are not expanded.
        """

        def bound(state: State) -> tuple[int, ...]:
            return objective(state.low, state.high, state.divisor)

        # The path (which child at each step) orders states with equal bounds depth first.
        heap: list[tuple[tuple[int, ...], tuple[int, ...], State]] = [(bound(root), (), root)]
        while heap:
            _, path, state = heappop(heap)
            index = self._undecided(state)
            if index is None:
                yield state
                continue
            for turn, child in enumerate(self._children(state, index)):
                heappush(heap, (bound(child), (*path, turn), child))

    def _undecided(self, state: State) -> int | None:
        """Return the variable to decide next; None if all variables have one value."""
        low, high = state.low, state.high
        for index in self.order:
            if low[index] != high[index]:
                return index
        chosen, least = None, inf
        for index, domain in enumerate(state.domains):
            if low[index] != high[index] and len(domain) / self.degree[index] < least:
                chosen, least = index, len(domain) / self.degree[index]
        return chosen

    def _children(self, state: State, index: int) -> Iterator[State]:
        """Return the states for the two halves of a variable's domain after pruning, preferred first, if not empty."""
        domain = state.domains[index]
        middle = len(domain) // 2
        halves = [domain[:middle], domain[middle:]]
        if self.largest_first[index]:
            halves.reverse()
        for half in halves:
            child = state.copy()
            if self.network.propagate(child, self.network.assign(child, index, half)):
                yield child
