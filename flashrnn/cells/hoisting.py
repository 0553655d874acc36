"""Moves the part of a step that depends on no state and no recurrent sum before the time loop (loop hoisting).

There it is computed for all time steps at once. An example is the norm of an LSTM's inputs, after which the loop reads
normalised inputs. Only reductions over units are worth this: other operations take less time than writing their results
to memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import Parameter, Signature

import torch
from torch import Tensor

from flashrnn.cells import reductions
from flashrnn.cells.definition import Cell
from flashrnn.cells.graph import OPERATORS, REDUCTIONS, Graph, Node, moved
from flashrnn.cells.recorder import recorded
from flashrnn.cells.trace import trace, untraceable, without_modes


class LoopCell(Cell):
    """The cell of the remaining time loop. Its inputs are stored like gates, in `residual_dtype`."""


@dataclass(frozen=True, eq=False)
class Hoisted:
    """A cell in two parts.

    cell: the original cell.
    gates: the gates that the first part reads, in the cell's order; they include all gates with an input.
    values: the names of the results of the first part, which are gates of `loop` with an input part only and no bias.
    forward: the first part, gates -> values.
    gradient: gates and `d_<value>` -> `d_<gate>` of every gate.
    loop: the cell of the time loop. Its gates are the values, followed by the gates of the cell that it needs; its
        recurrent gates and states are those of the cell.
    """

    cell: Cell
    gates: tuple[str, ...]
    values: tuple[str, ...]
    forward: Graph
    gradient: Graph
    loop: LoopCell

    @property
    def remaining(self) -> tuple[str, ...]:
        """Return the gates of the cell that are also gates of the loop."""
        return self.loop.gates[len(self.values) :]


@cache
def hoisted(cell: Cell) -> Hoisted | None:
    """Return the cell in two parts; None if this moves no reduction, or if the loop would have more inputs.

    Return None, too, if a gate with an input also has a recurrent part, because its input is needed in the loop.
    """
    if untraceable(cell) or not trace(cell).reduces or set(cell.input_gates).intersection(cell.recurrent_gates):
        return None

    def of_loop(node: Node) -> bool:
        return node.op == "input" and node.value in (*cell.recurrent_gates, *cell.states)

    step = _regrouped(trace(cell).forward, of_loop)
    in_loop = step.depending(of_loop)
    with_inputs = step.depending(lambda node: node.op == "input" and node.value in cell.input_gates)
    read = {a for k, node in enumerate(step.nodes) if in_loop[k] for a in node.args} | set(step.outputs.values())
    found = sorted(k for k in read if with_inputs[k] and not in_loop[k])
    values = {f"hoisted{i}": k for i, k in enumerate(found)}
    forward = step.extract(values)
    if not forward.reduces or len(found) > len(cell.input_gates):
        return None
    names = {k: name for name, k in values.items()}
    rest = step.extract(step.outputs, names)
    remaining = tuple(gate for gate in cell.gates if gate in rest.inputs or gate in cell.recurrent_gates)
    function = _function(rest, (*values, *remaining, *cell.states), tuple(f"new_{state}" for state in cell.states))
    kinds = tuple(values), cell.recurrent_gates, cell.float16_states
    loop = LoopCell(f"{cell.name}_loop", function, cell.states, *kinds)
    gates = tuple(gate for gate in cell.gates if gate in forward.inputs or gate in cell.input_gates)
    gradient = without_modes(_gradient, cell, forward, gates)
    return Hoisted(cell, gates, tuple(values), forward, gradient, loop)


def _regrouped(step: Graph, of_loop: Callable[[Node], bool]) -> Graph:
    """Return the step with (a + x) + b written as (a + b) + x if only x belongs to the loop, to hoist one sum."""
    graph, here, in_loop = Graph(), {}, step.depending(of_loop)
    sums: dict[int, tuple[int, int]] = {}  # node of `graph` -> summand outside of the loop, summand inside
    for index in step.needed(step.outputs.values()):
        node = step.nodes[index]
        if node.op == "add" and in_loop[node.args[0]] != in_loop[node.args[1]]:
            outside, inside = sorted(node.args, key=lambda k: in_loop[k])
            outside, inside = here[outside], here[inside]
            if inside in sums:
                more, inside = sums[inside]
                outside = graph.add("add", more, outside)
            here[index] = graph.add("add", outside, inside)
            sums[here[index]] = outside, inside
        else:
            here[index] = graph.copied(node, here)
    graph.norms = moved(step.norms, here)
    return graph.extract({name: here[index] for name, index in step.outputs.items()})


def _function(graph: Graph, arguments: Sequence[str], results: Sequence[str]) -> Callable[..., tuple[Tensor, ...]]:
    """Return a graph as a function of the tensors `arguments`, with norms as single operations, to trace it again."""
    norm_of = {k: norm for norm in graph.norms for k in norm.normalised}

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        given, found = dict(zip(arguments, tensors, strict=True)), {}

        def value(index: int) -> Tensor:
            if index not in found:
                found.update(computed(index))
            return found[index]

        def computed(index: int) -> dict[int, Tensor]:
            if index in norm_of:
                values, normalised, eps, centered = norm_of[index]
                norm = reductions.layer_norm if centered else reductions.rms_norm
                done = norm(*map(value, values), eps=eps)
                return dict(zip(normalised, (done,) if isinstance(done, Tensor) else done, strict=True))
            node = graph.nodes[index]
            if node.op == "input":
                return {index: given[node.value]}
            if node.op == "const":
                return {index: torch.tensor(node.value, dtype=tensors[0].dtype, device="cpu")}
            of = list(map(value, node.args))
            if node.op in REDUCTIONS:
                return {index: getattr(reductions, node.op.removeprefix("unit_"))(*of)}
            return {index: torch.where(*of) if node.op == "where" else OPERATORS[node.op](*of)}

        return tuple(value(graph.outputs[name]) for name in results)

    parameters = [Parameter(name, Parameter.POSITIONAL_ONLY) for name in arguments]
    function.__signature__ = Signature(parameters)
    return function


def _gradient(cell: Cell, forward: Graph, gates: tuple[str, ...]) -> Graph:
    """Return the gradient of the first part, given gates and the gradients of its results."""
    names = (*gates, *(f"d_{value}" for value in forward.outputs))
    numbers = [torch.tensor(0.5 + 0.01 * k, device="cpu") for k in range(len(names))]
    function = _function(forward, gates, tuple(forward.outputs))

    def gradients() -> tuple[Tensor, ...]:
        given = [x.detach().requires_grad_() for x in numbers[: len(gates)]]
        total = sum(x * d for x, d in zip(function(*given), numbers[len(gates) :], strict=True))
        total = total + sum(0.0 * x for x in given)  # an input may be without effect
        return torch.autograd.grad(total, given)

    return recorded(cell, gradients, dict(zip(names, numbers, strict=True)), [f"d_{gate}" for gate in gates])
