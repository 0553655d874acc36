"""Scalar graphs as CUDA C++ device functions."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from flashrnn.cells.centring import MEAN_SQUARE, centred
from flashrnn.cells.definition import Cell
from flashrnn.cells.early_sums import gradient_with_early_sums
from flashrnn.cells.graph import REDUCTIONS, TRUTH, Graph, Node
from flashrnn.cells.hoisting import Hoisted
from flashrnn.cells.printers.early import Late, late_inputs, with_early
from flashrnn.cells.printers.functions import Function, functions
from flashrnn.cells.printers.phases import phases
from flashrnn.cells.printers.printing import EVERYWHERE, operations, write
from flashrnn.cells.statistics import storing
from flashrnn.cells.trace import trace

_FORMULA = EVERYWHERE | {"and": "{0} && {1}", "or": "{0} || {1}", "not": "!{0}", "where": "{0} ? {1} : {2}"}


def device_function(
    graph: Graph, name: str, inputs: dict[str, Sequence[str]], outputs: dict[str, Sequence[str]]
) -> str:
    """Return a device function of float arrays; `inputs` and `outputs` contain the names of all arrays and elements."""
    arrays = [f"const float (&{a})[{max(len(names), 1)}]" for a, names in inputs.items()]
    arrays += [f"float (&{a})[{max(len(names), 1)}]" for a, names in outputs.items()]
    place = {element: f"{a}[{k}]" for a, names in inputs.items() for k, element in enumerate(names)}
    printed, texts = operations(graph, graph.outputs, place, _literal, _expression)
    lines = [f"DEVICE void {name}({', '.join(arrays)}) {{"]
    for value, node, text in printed:
        lines.append(f"  const {'bool' if node.op in TRUTH else 'float'} {value} = {text};")
    results = dict(zip(graph.outputs, texts, strict=True))
    for array, names in outputs.items():
        lines += [f"  {array}[{k}] = {results[element]};" for k, element in enumerate(names)]
    return "\n".join([*lines, "}"])


def cell_functions(cell: Cell) -> str:
    """Return the text of `cell_forward`, `cell_factors` and `cell_backward` of a cell (see `trace.Trace`)."""
    return "\n\n".join(device_function(f.graph, f.name, f.inputs, f.outputs) for f in functions(cell))


class Exchange(NamedTuple):
    """The nodes of a graph that are reduced over the units of a head in one exchange, by kind of reduction."""

    sums: tuple[int, ...]
    moments: tuple[int, ...]  # mean and variance
    maxima: tuple[int, ...]

    @property
    def operands(self) -> tuple[int, ...]:
        """Return all nodes, in the order of `UnitReductions::reduce`."""
        return (*self.sums, *self.moments, *self.maxima)

    @property
    def results(self) -> int:
        """Return the number of results: two of each moment."""
        return len(self.operands) + len(self.moments)

    @property
    def words(self) -> int:
        """Return the number of values per sequence, as `Partial` in kernels/partial.cuh."""
        return len(self.sums) + 3 * len(self.moments) + len(self.maxima)

    @property
    def pairs(self) -> int:
        """Return the pairs of numbers that go through global memory; the last of `words` are second ones."""
        return max(-(-self.words // 2), len(self.moments) + len(self.maxima))

    @property
    def vectors(self) -> int:
        """Return the vectors of four numbers that these take."""
        return -(-self.words // 4)


@cache
def exchanges(cell: Cell, direction: str, early_sums: bool = False) -> tuple[Exchange, ...]:
    """Return the exchanges of a step "forward" or "backward", in order. `early_sums`: see `head_functions`."""
    if early_sums and has_early_sums(cell, direction):
        function, late = _with_early_sums(cell), late_inputs(cell)["backward"]
        return tuple(_exchange(function.graph, some) for some in _early_and_late_reductions(function.graph, late))
    return _exchanges(_of_head(cell, direction).graph)


def has_early_sums(cell: Cell, direction: str) -> bool:
    """Return whether a step "forward" or "backward" can be computed with `early_sums` (see `head_functions`)."""
    return direction == "backward" and gradient_with_early_sums(cell) is not None


@cache
def operation_count(cell: Cell, direction: str) -> int:
    """Return the number of operations of a step "forward" or "backward"."""
    graph = _of_head(cell, direction).graph
    return sum(graph.nodes[k].op not in ("input", "const") for k in graph.needed(graph.outputs.values()))


def head_functions(cell: Cell, early: bool = False, of_centred: bool = False, early_sums: bool = False) -> str:
    """Return the text of `cells_forward` and `cells_backward` of a cell that reduces over the units of a head.

    They compute the CELLS cells of a thread, phase by phase. Between phases, `units.reduce` reduces over units
    (`UnitReductions` in resident/kernels/unit_reductions.cuh). `late` provides the recurrent gates or, in the backward
    pass, the gradients of the new states. The forward function also returns statistics and the stored form of the
    gates, which the backward function reads (`cells.statistics`).

    `early`: `cells_forward_early` and `cells_backward_early` compute what depends neither on `late` nor on the states
    before the step. Their results, `early`, are arguments of the two functions, and known when `late` has been called.

    `of_centred`: the recurrent gates of `cells_forward` are centred, and their mean square follows the gates
    (`cells.centring`); `late` provides it too.

    `early_sums`: if the cell has any, `cells_backward` has two exchanges that overlap, of which the first is begun
    before `late` is called (`cells.early_sums`). `units.begin` and `units.end` replace `units.reduce`.
    """
    texts = []
    for direction, late in late_inputs(cell).items():
        if early_sums and has_early_sums(cell, direction):
            texts.append(_overlapping_function(_with_early_sums(cell), late))
            continue
        whole = _of_head(cell, direction, of_centred and direction == "forward")
        parts = with_early(cell, whole, late) if early else (whole,)
        texts += [_head_function(part, late) for part in parts]
    return "\n\n".join(texts)


@cache
def early_values(cell: Cell, direction: str) -> int:
    """Return the number of results `early` of a step "forward" or "backward"."""
    whole = _of_head(cell, direction)
    return len(with_early(cell, whole, late_inputs(cell)[direction])[0].outputs["early"])


def hoisted_function(parts: Hoisted, direction: str) -> tuple[str, int]:
    """Return the text of `hoisted` or, "backward", of `hoisted_gradient`, and the vectors of its largest exchange.

    They are like those of `head_functions`, but never call `late`, because all arguments are available.
    """
    gradients = {"d_g": tuple(f"d_{gate}" for gate in parts.gates)}
    if direction == "forward":
        function = Function("hoisted", parts.forward, {"g": parts.gates}, {"values": parts.values})
    else:
        inputs = {"g": parts.gates, "d_values": tuple(f"d_{value}" for value in parts.values)}
        function = Function("hoisted_gradient", parts.gradient, inputs, gradients)
    found = _exchanges(function.graph)
    return _head_function(function, Late("", ())), max((one.vectors for one in found), default=1)


def _of_head(cell: Cell, direction: str, of_centred: bool = False) -> Function:
    (forward, factors, backward), graphs = functions(cell), trace(cell)
    statistics = graphs.statistics
    stored = tuple(f"stored_{gate}" if gate in statistics.normalised else gate for gate in cell.gates)
    if direction == "forward":
        whole = storing(graphs.forward, statistics)
        whole.outputs |= {gate: whole.input(gate) for gate in cell.gates}
        outputs = {**forward.outputs, "statistics": statistics.names, "stored": stored}
        step = whole.extract({name: whole.outputs[name] for group in outputs.values() for name in group})
        inputs = forward.inputs
        if of_centred:
            step, inputs = centred(cell, step), {**inputs, "g": (*cell.gates, MEAN_SQUARE)}
        return Function("cells_forward", step, inputs, outputs)
    needed = statistics.names[: statistics.needed]
    after = tuple(f"after_{state}" for state in statistics.after)
    inputs = {**factors.inputs, "g": stored, "after": after, "statistics": needed, "d_new": backward.inputs["d_new"]}
    return Function("cells_backward", statistics.gradient, inputs, backward.outputs)


def _with_early_sums(cell: Cell) -> Function:
    graph = gradient_with_early_sums(cell)
    assert graph is not None
    return _of_head(cell, "backward")._replace(graph=graph)


def _early_and_late_reductions(graph: Graph, late: Late) -> tuple[list[int], list[int]]:
    """Return the reductions that do not depend on late inputs, and those that do."""
    depends = graph.depending(lambda node: node.value in late.names)
    found = [k for k in graph.needed(graph.outputs.values()) if graph.nodes[k].op in REDUCTIONS]
    return [k for k in found if not depends[k]], [k for k in found if depends[k]]


def _exchanges(graph: Graph) -> tuple[Exchange, ...]:
    found = phases(graph, graph.outputs.values())
    return tuple(_exchange(graph, phase.reductions) for phase in found if phase.reductions)


def _exchange(graph: Graph, reductions: Sequence[int]) -> Exchange:
    """Return the reduced nodes. A mean is computed as a sum, or together with the variance of the same node."""
    reduced = {op: [graph.nodes[k].args[0] for k in reductions if graph.nodes[k].op == op] for op in REDUCTIONS}
    moments, means = tuple(reduced["unit_variance"]), reduced["unit_mean"]
    sums = dict.fromkeys([*reduced["unit_sum"], *(a for a in means if a not in moments)])
    return Exchange(tuple(a for a in sums if not graph.is_uniform(a)), moments, tuple(reduced["unit_max"]))


def _head_function(function: Function, late: Late) -> str:
    """Return the device function of a graph with reductions over units: loops over a thread's cells, and exchanges."""
    graph, body, number = function.graph, _Phases(function, late), 0
    if "early" in function.inputs:
        body.request_late()
    for phase in phases(graph, graph.outputs.values()):
        body.wait_for_late(phase.computes)
        body.define([*phase.uniform, *phase.computes])
        if not phase.reductions:
            continue
        one = _exchange(graph, phase.reductions)
        if one.operands:
            body.give(number, one, f", all{number}[{one.results}][CELLS]")
            body.exchange("reduce", number, one, f"of{number}, all{number}")
        else:
            body.loop([])
        body.take(phase.reductions, one, number)
        number += bool(one.operands)
    return body.whole()


def _overlapping_function(function: Function, late: Late) -> str:
    """Return the device function of a graph without nested reductions. The reductions that do not depend on `late` are
    begun before it is called, and end when the others have been begun."""
    graph, body = function.graph, _Phases(function, late)
    depends = graph.depending(lambda node: node.value in late.names or node.op in REDUCTIONS)
    found = [(some, _exchange(graph, some)) for some in _early_and_late_reductions(graph, late)]
    body.define([k for k in graph.needed(graph.outputs.values()) if not depends[k]])
    for number, (reductions, one) in enumerate(found):
        body.define(graph.needed(graph.nodes[k].args[0] for k in reductions))
        body.give(number, one)
        body.exchange("begin", number, one, f"of{number}")
        if number == 0:
            body.request_late()
    for number, (reductions, one) in enumerate(found):
        body.lines.append(f"  float all{number}[{one.results}][CELLS];")
        body.exchange("end", number, one, f"all{number}")
        body.take(reductions, one, number)
    body.define(graph.needed(graph.outputs.values()))
    return body.whole()


class _Phases:
    """The text of a device function, in which every node of a graph is an array over the cells of a thread."""

    def __init__(self, function: Function, late: Late) -> None:
        self.lines: list[str] = []
        self._function, self._graph, self._late = function, function.graph, late
        self._places = {
            name: f"{group}[{k}][q]" for group, names in function.inputs.items() for k, name in enumerate(names)
        }
        self._waits = True
        self._defined: set[int] = set()
        self._pending: list[str] = []  # of the next loop

    def text(self, index: int) -> str:
        node = self._graph.nodes[index]
        if node.op == "input":
            return self._places[node.value]
        return _literal(node.value) if node.op == "const" else f"v{index}[q]"

    def wait_for_late(self, nodes: Sequence[int]) -> None:
        """Request the late inputs before the first loop that needs them."""
        if self._waits and any(self._graph.nodes[k].value in self._late.names for k in nodes):
            self.request_late()

    def request_late(self) -> None:
        self.lines.append(f"  late({self._late.group});")
        self._waits = False

    def define(self, nodes: Sequence[int]) -> None:
        """Compute the nodes in the next loop, except those that have been computed."""
        for k in nodes:
            node = self._graph.nodes[k]
            if k in self._defined or node.op in ("input", "const", *REDUCTIONS):
                continue
            self._defined.add(k)
            self.lines.append(f"  {'bool' if node.op in TRUTH else 'float'} v{k}[CELLS];")
            self._pending.append(f"{self.text(k)} = {_expression(node, [self.text(a) for a in node.args])};")

    def give(self, number: int, one: Exchange, more: str = "") -> None:
        """Write a loop that computes the operands of an exchange. `more`: further declarations."""
        self.lines.append(f"  float of{number}[{len(one.operands)}][CELLS]{more};")
        self.loop([f"of{number}[{k}][q] = {self.text(a)};" for k, a in enumerate(one.operands)])

    def exchange(self, function: str, number: int, one: Exchange, arguments: str) -> None:
        kinds = ", ".join(map(str, (number, *map(len, one))))
        self.lines.append(f"  units.template {function}<{kinds}>({arguments});")

    def take(self, reductions: Sequence[int], one: Exchange, number: int) -> None:
        """Write a loop that computes reductions from the results of an exchange."""
        self.lines.append(f"  float {', '.join(f'v{k}[CELLS]' for k in reductions)};")
        self.loop([f"{self.text(k)} = {_reduced(self._graph, k, one, number, self.text)};" for k in reductions])

    def _results(self) -> list[str]:
        outputs = self._function.outputs.items()
        return [
            f"{group}[{k}][q] = {self.text(self._graph.outputs[name])};"
            for group, names in outputs
            for k, name in enumerate(names)
        ]

    def loop(self, statements: list[str]) -> None:
        """Write a loop over cells that computes the pending nodes, followed by `statements`."""
        body, self._pending = [*self._pending, *statements], []
        if body:
            self.lines += ["#pragma unroll", "  for (int q = 0; q < CELLS; q++) {"]
            self.lines += [*(f"    {statement}" for statement in body), "  }"]

    def whole(self) -> str:
        """Return the complete function with its results."""
        inputs, outputs = self._function.inputs, self._function.outputs
        self.wait_for_late([k for k, node in enumerate(self._graph.nodes) if node.op == "input"])
        self.loop(self._results())
        arguments = [
            f"{'' if group == self._late.group else 'const '}float (&{group})[{max(len(names), 1)}][CELLS]"
            for group, names in inputs.items()
        ]
        arguments.append("const Late& late")
        arguments += [f"float (&{group})[{max(len(names), 1)}][CELLS]" for group, names in outputs.items()]
        head = f"DEVICE void {self._function.name}({', '.join(arguments)}, const Units& units) {{"
        return "\n".join(["template <int CELLS, class Late, class Units>", head, *self.lines, "}"])


def _reduced(graph: Graph, index: int, exchange: Exchange, number: int, text: Callable[[int], str]) -> str:
    """Return the text of a reduction, given the number of its exchange."""
    node, sums, moments = graph.nodes[index], len(exchange.sums), len(exchange.moments)
    (a,) = node.args
    if graph.is_uniform(a):  # a sum
        return f"{text(a)} * float(D)"
    if node.op == "unit_max":
        return f"all{number}[{sums + 2 * moments + exchange.maxima.index(a)}][q]"
    if node.op == "unit_variance" or a in exchange.moments:
        mean = sums + 2 * exchange.moments.index(a)
        return f"all{number}[{mean + (node.op == 'unit_variance')}][q]{' * D' * (node.op == 'unit_sum')}"
    return f"all{number}[{exchange.sums.index(a)}][q]" + " * (1.0f / D)" * (node.op == "unit_mean")


def _literal(value: float) -> str:
    if math.isinf(value):
        return "-INFINITY" if value < 0 else "INFINITY"
    return "NAN" if math.isnan(value) else f"{value!r}f"


def _expression(node: Node, args: list[str]) -> str:
    return write(node.op, args, _FORMULA, "op_")
