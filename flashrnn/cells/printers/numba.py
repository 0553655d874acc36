"""Scalar graphs as loops over arrays, and matrix products, for numba to compile."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from flashrnn.cells.definition import Cell
from flashrnn.cells.graph import REDUCTIONS, Graph, Node
from flashrnn.cells.printers.functions import Function, functions
from flashrnn.cells.printers.phases import phases, stored_nodes
from flashrnn.cells.printers.printing import PYTHON, operations, variables, write
from flashrnn.cells.trace import trace

_FORMULA = PYTHON | {"not": "not {0}"}


def cell_loop(cell: Cell, direction: str, dtype: torch.dtype, rounding: str = "") -> str:
    """Return the C function `kernel(gates, states, count)`, backward `kernel(gates, states, d_states, count)`.

    It goes over `count` numbers of every gate and state, STRIDE apart, and writes its results in the place of what it
    reads: the new states, the first one rounded by the function `rounding` if given, or the gradients of the gates and
    of the states before.
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
    slots: int  # of WIDTH numbers each, after the states or their gradients, that a row is worked on in


def cell_rows(cell: Cell, direction: str, dtype: torch.dtype, rounding: str = "") -> RowStep:
    """Return what `cell_loop` does, for rows of D units, WIDTH apart."""
    forward, _, backward = functions(cell, dtype)
    places = {name: ("gates", k) for k, name in enumerate(cell.gates)}
    places |= {name: ("states", k) for k, name in enumerate(cell.states)}
    if direction == "forward":
        results = dict(zip(forward.outputs["fresh"], cell.states, strict=True))
        rounded = {cell.states[0]: rounding}
        return _rows(forward.graph, places, results, rounded, len(cell.states))
    d_new = backward.inputs["d_new"]
    places |= {name: ("d_states", k) for k, name in enumerate(d_new)}
    results = dict(zip(backward.outputs["d_g"], cell.gates, strict=True))
    results |= dict(zip(backward.outputs["d_old"], d_new, strict=True))
    return _rows(trace(cell, dtype).gradient, places, results, {}, len(cell.states))


def row_product(rows: int, columns: int) -> str:
    """`dots_{rows}x{columns}(out, a, row_step, w, depth)`: out [rows, columns] += a [rows, depth] @ w.T, where w is
    [columns, depth], and rows of `out` and a are `row_step` apart.

    The sums stay in registers, each in parts, one for each place in a vector.
    """
    sums = [(r, c) for r in range(rows) for c in range(columns)]
    lines = ["@sums", f"def dots_{rows}x{columns}(out, a, row_step, w, depth):"]
    lines += [f"    s{r}_{c} = F(0)" for r, c in sums]
    lines.append("    for d in range(depth):")
    lines += [f"        a{r} = a[{r} * row_step + d]" for r in range(rows)]
    lines += [f"        w{c} = w[{c} * depth + d]" for c in range(columns)]
    lines += [f"        s{r}_{c} += a{r} * w{c}" for r, c in sums]
    lines += [f"    out[{r} * row_step + {c}] += s{r}_{c}" for r, c in sums]
    return "\n".join(lines)


def _loop(arrays: tuple[str, ...], body: list[str]) -> str:
    lines = [
        f"@cfunc(void({'pointer, ' * len(arrays)}intp), cache=CACHE, pipeline_class=Kernel, **OPTIONS)",
        f"def kernel({', '.join(arrays)}, count):",
        "    for i in range(count):",
    ]
    return "\n".join([*lines, *(f"        {line}" for line in body)])


def _rows(
    graph: Graph, places: dict[str, tuple[str, int]], results: dict[str, str], rounded: dict[str, str], states: int
) -> RowStep:
    """Return a loop over rows, in which loops over units and reductions take turns.

    `places` are the inputs' arrays and numbers in them, `results` the inputs whose places results go to, `rounded` the
    functions by which they go there. A row is copied, because loops over a single array are vectorized without checks
    that arrays do not overlap.
    """
    found = phases(graph, (graph.outputs[name] for name in results))
    stored = [*places, *stored_nodes(graph, found)]  # inputs, and nodes of the graph
    slot = {name: f"{k} * WIDTH" for k, name in enumerate(stored)}
    arrays = list(dict.fromkeys(array for array, _ in places.values()))

    def text(index: int) -> str:
        value = graph.constant(index)
        return f"v{index}" if value is None else f"F({value!r})"

    def operation(index: int) -> str:
        node = graph.nodes[index]
        if node.op == "input":
            return f"row[{slot[node.value]} + j]"
        if node.op not in REDUCTIONS:
            return _expression(node, [text(a) for a in node.args])
        (a,) = node.args
        if graph.is_uniform(a):
            return f"{text(a)} * F(D)"
        return f"op_{node.op}(offset(row, {slot[a] if a in slot else slot[graph.nodes[a].value]}), D)"

    def copies(names: Iterable[str], back: bool = False) -> list[str]:
        ends = [(f"row, {slot[name]}", "{}, {} * STRIDE + start".format(*places[name])) for name in names]
        return [
            f"copy_row(offset({to}), offset({given}))" for to, given in (pair[:: -1 if back else 1] for pair in ends)
        ]

    lines = copies(name for name in places if name in graph.inputs)
    for phase in found:
        lines += [f"v{k} = {operation(k)}" for k in phase.uniform]
        body = [f"v{k} = row[{slot[k]} + j]" for k in phase.reads]
        body += [f"v{k} = {operation(k)}" for k in phase.computes]
        body += [f"row[{slot[k]} + j] = v{k}" for k in phase.computes if k in slot]
        if not phase.reductions:  # the last one
            body += [
                f"row[{slot[to]} + j] = {rounded.get(to, '')}({text(graph.outputs[name])})"
                for name, to in results.items()
            ]
        lines += ["for j in range(D):", *(f"    {line}" for line in body)]
        lines += [f"v{k} = {operation(k)}" for k in phase.reductions]
    lines += copies(results.values(), back=True)
    head = [
        f"@cfunc(void({'pointer, ' * len(arrays)}intp), cache=CACHE, pipeline_class=Kernel, **OPTIONS)",
        f"def kernel({', '.join(arrays)}, count):",
        f"    row = offset({arrays[-1]}, {states} * STRIDE)",
        "    for start in range(0, count, WIDTH):",
    ]
    return RowStep("\n".join([*head, *(f"        {line}" for line in lines)]), len(stored))


def _body(function: Function, inputs: dict[str, str], outputs: dict[str, str]) -> list[str]:
    """Return statements that assign the function's results to the texts in `outputs`, all inputs being read before."""
    names = variables(function.graph.inputs)
    read = [f"{variable} = {inputs[name]}" for name, variable in names.items()]
    printed, texts = operations(function.graph, outputs, names, lambda value: f"F({value!r})", _expression)
    lines = [f"{value} = {text}" for value, _, text in printed]
    return [*read, *lines, *(f"{place} = {text}" for place, text in zip(outputs.values(), texts, strict=True))]


def _expression(node: Node, args: list[str]) -> str:
    return write(node.op, args, _FORMULA, "op_")
