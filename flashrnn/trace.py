"""The scalar graphs of a cell, of which kernels are printed."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from threading import Lock

import torch

from flashrnn.cells import Cell
from flashrnn.codegen.graph import Graph


@dataclass(frozen=True)
class Trace:
    """A cell as scalar graphs. Inputs and outputs go by the names of gates and states.

    forward: gates and previous states -> `new_<state>` for every state.
    factors: gates and previous states -> `factor<k>`.
    backward: `factor<k>` and `d_new_<state>` -> `d_<gate>` for every gate and `d_<state>` for every previous state.
    """

    forward: Graph
    factors: Graph
    backward: Graph


class UntraceableCell(ValueError):
    """The step of a cell uses something that has no scalar graph."""


def trace(cell: Cell, dtype: torch.dtype = torch.float32) -> Trace:
    """Scalar graphs of `cell`; raises UntraceableCell naming the operator that has none.

    A step may choose its constants by the dtype of its numbers: it sees float64 for `dtype` float64, and float32 for
    all others, in which half types are computed too.
    """
    return _traced(cell, torch.float64 if dtype == torch.float64 else torch.float32)


@cache
def _traced(cell: Cell, dtype: torch.dtype) -> Trace:
    """In a thread of its own, which starts without the modes of the caller: a trace is the same at inference and under
    autocast, and within an operator of a compiled model, where PyTorch's tracing modes do not nest.
    """
    from flashrnn.tracer import make_trace  # which imports this module

    with _TRACING, ThreadPoolExecutor(1) as thread:
        return thread.submit(make_trace, cell, dtype).result()


_TRACING = Lock()  # of PyTorch's tracing modes there is one count for all threads


def untraceable(cell: Cell) -> str | None:
    """Why the cell has no scalar graphs, and so no printed kernels; None if it has."""
    try:
        trace(cell)
    except UntraceableCell as reason:
        return str(reason)
    return None
