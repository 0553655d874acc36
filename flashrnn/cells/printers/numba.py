"""Scalar graphs as loops over arrays, which numba compiles."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from flashrnn.cells.definition import Cell
from flashrnn.cells.graph import REDUCTIONS, Graph, Node
from flashrnn.cells.printers.functions import Function, functions
from flashrnn.cells.printers.phases import Phase, phases, stored_nodes
from flashrnn.cells.printers.printing import PYTHON, operations, variables, write
from flashrnn.cells.trace import trace

_FORMULA = PYTHON | {"not": "not {0}"}


def cell_loop(cell: Cell, direction: str, dtype: torch.dtype, rounding: str = "") -> str:
    """Return the C function `kernel(gates, states, count)`, backward `kernel(gates, states, d_states, count)`.

    It processes `count` elements of every gate and state, STRIDE apart, and overwrites its inputs with its results: the
    new states, the first of which is rounded by the function `rounding` if given, or the gradients of the gates and of
    the previous states.
    """
    forward, factors, backward = functions(cell, dtype)
    gates = {name: f"gates[{k} * STRIDE + i]" for k, name in enumerate(cell.gates)}
    states = {name: f"states[{k} * STRIDE + i]" for k, name in enumerate(cell.states)}
    if direction == "forward":
        results = dict(zip(forward.outputs["fresh"], states.values(), strict=True))
        h = states[cell.states[0]]
        rounded = [f"{h} = {rounding}({h})"] if rounding else []
        return _loop(("gates", "states"), _body(forward, gates | states, results) + rounded)
    d_new = {name: f"d_states[{k} * STRIDE + i]" for k, name in enumerate(backward.inputs["d_new"])}
    saved = {name: name for name in factors.outputs["factors"]}
    results = dict(zip(backward.outputs["d_g"], gates.values(), strict=True))
    results |= dict(zip(backward.outputs["d_old"], d_new.values(), strict=True))
    body = _body(factors, gates | states, saved) + _body(backward, saved | d_new, results)
    return _loop(("gates", "states", "d_states"), body)


class RowStep(NamedTuple):
    """The step of a cell that reduces over the units of a row."""

    text: str
    slots: int  # number of buffers of WIDTH elements for a row, after the states or their gradients


def cell_rows(cell: Cell, direction: str, dtype: torch.dtype, rounding: str = "") -> RowStep:
    """Return a function like that of `cell_loop`, but for rows of D units, WIDTH apart."""
    forward, _, backward = functions(cell, dtype)
    places = {name: ("gates", k) for k, name in enumerate(cell.gates)}
    places |= {name: ("states", k) for k, name in enumerate(cell.states)}
    if direction == "forward":
        results = dict(zip(forward.outputs["fresh"], cell.states, strict=True))
        rounded = {cell.states[0]: rounding}
        return _RowPrinter(forward.graph, places, results, rounded).step(len(cell.states))
    d_new = backward.inputs["d_new"]
    places |= {name: ("d_states", k) for k, name in enumerate(d_new)}
    results = dict(zip(backward.outputs["d_g"], cell.gates, strict=True))
    results |= dict(zip(backward.outputs["d_old"], d_new, strict=True))
    return _RowPrinter(trace(cell, dtype).gradient, places, results, {}).step(len(cell.states))


def _kernel(arrays: Sequence[str], body: list[str]) -> str:
    """Return the C function `kernel` of pointers to `arrays` and of the number of elements `count`."""
    head = [
        f"@cfunc(void({'pointer, ' * len(arrays)}intp), cache=CACHE, pipeline_class=Kernel, **OPTIONS)",
        f"def kernel({', '.join(arrays)}, count):",
    ]
    return "\n".join([*head, *_indented(["with_widest_vectors()", *body])])


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _loop(arrays: Sequence[str], body: list[str]) -> str:
    return _kernel(arrays, ["for i in range(count):", *_indented(body)])


class _RowPrinter:
    """Prints a loop over rows, in which loops over units and reductions alternate.

    A row is copied to one array, because loops over one array are vectorized without checks for overlapping arrays.

    Args:
        graph: the graph to compute.
        places: for each input, its array and its index in it.
        results: for each result, the input that it overwrites.
        rounded: for such inputs, the function that rounds the result.
    """

    def __init__(
        self, graph: Graph, places: dict[str, tuple[str, int]], results: dict[str, str], rounded: dict[str, str]
    ) -> None:
        self.graph, self.places, self.results, self.rounded = graph, places, results, rounded
        self.phases = phases(graph, (graph.outputs[name] for name in results))
        stored = [*places, *stored_nodes(graph, self.phases)]  # inputs, and nodes of the graph
        self.slot = {name: f"{k} * WIDTH" for k, name in enumerate(stored)}

    def step(self, states: int) -> RowStep:
        """Return the step of a cell with this number of states."""
        arrays = list(dict.fromkeys(array for array, _ in self.places.values()))
        lines = self._copies(name for name in self.places if name in self.graph.inputs)
        for phase in self.phases:
            lines += self._phase(phase)
        lines += self._copies(self.results.values(), back=True)
        rows = [f"row = offset({arrays[-1]}, {states} * STRIDE)", "for start in range(0, count, WIDTH):"]
        return RowStep(_kernel(arrays, [*rows, *_indented(lines)]), len(self.slot))

    def _copies(self, names: Iterable[str], back: bool = False) -> list[str]:
        """Return the copies of the inputs to the row or, with `back`, of the results from the row."""
        lines = []
        for name in names:
            ends = ["row, " + self.slot[name], "{}, {} * STRIDE + start".format(*self.places[name])]
            to, given = reversed(ends) if back else ends
            lines.append(f"copy_row(offset({to}), offset({given}))")
        return lines

    def _phase(self, phase: Phase) -> list[str]:
        lines = [f"v{k} = {self._operation(k)}" for k in phase.uniform]
        body = [f"v{k} = row[{self.slot[k]} + j]" for k in phase.reads]
        body += [f"v{k} = {self._operation(k)}" for k in phase.computes]
        body += [f"row[{self.slot[k]} + j] = v{k}" for k in phase.computes if k in self.slot]
        if not phase.reductions:  # the last one
            body += [
                f"row[{self.slot[to]} + j] = {self.rounded.get(to, '')}({self._text(self.graph.outputs[name])})"
                for name, to in self.results.items()
            ]
        lines += ["for j in range(D):", *_indented(body)]
        return lines + [f"v{k} = {self._operation(k)}" for k in phase.reductions]

    def _operation(self, index: int) -> str:
        node = self.graph.nodes[index]
        if node.op == "input":
            return f"row[{self.slot[node.value]} + j]"
        if node.op not in REDUCTIONS:
            return _expression(node, [self._text(a) for a in node.args])
        (a,) = node.args
        if self.graph.is_uniform(a):
            return f"{self._text(a)} * F(D)"
        slot = self.slot[a if a in self.slot else self.graph.nodes[a].value]
        return f"op_{node.op}(offset(row, {slot}), D)"

    def _text(self, index: int) -> str:
        value = self.graph.constant(index)
        return f"v{index}" if value is None else f"F({value!r})"


def _body(function: Function, inputs: dict[str, str], outputs: dict[str, str]) -> list[str]:
    """Return statements that read all inputs, then assign the results of the function to the texts in `outputs`."""
    names = variables(function.graph.inputs)
    read = [f"{variable} = {inputs[name]}" for name, variable in names.items()]
    printed, texts = operations(function.graph, outputs, names, lambda value: f"F({value!r})", _expression)
    lines = [f"{value} = {text}" for value, _, text in printed]
    return [*read, *lines, *(f"{place} = {text}" for place, text in zip(outputs.values(), texts, strict=True))]


def _expression(node: Node, args: list[str]) -> str:
    return write(node.op, args, _FORMULA, "op_")
