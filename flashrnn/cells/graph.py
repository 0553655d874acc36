"""Scalar graphs: the step of a cell for one unit, as operations on numbers and reductions over the units of a head."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

OPERATORS: dict[str, Callable[..., Tensor]] = {
    "neg": torch.neg, "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "pow": torch.pow,
    "max": torch.maximum, "min": torch.minimum, "abs": torch.abs, "sign": torch.sign, "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt, "exp": torch.exp, "expm1": torch.expm1, "log": torch.log, "log1p": torch.log1p,
    "exp2": torch.exp2, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "sin": torch.sin, "cos": torch.cos,
    "atan": torch.atan, "erf": torch.erf, "erfc": torch.erfc, "floor": torch.floor, "round": torch.round,
    "fmod": torch.fmod, "copysign": torch.copysign,
    "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
    "and": torch.logical_and, "or": torch.logical_or, "not": torch.logical_not,
    "where": lambda condition, a, b: torch.where(condition != 0, a, b),
}  # fmt: skip
"""Every operator that a printer must know, with its function of constants; a constant truth value is 0 or 1."""

TRUTH = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not"})
"""Operators whose result is a truth value, an operand of `and`, `or`, `not` and the condition of `where`."""

REDUCTIONS = ("unit_sum", "unit_mean", "unit_max", "unit_variance")
"""Operators that read their operand in all units of the head; every unit gets the same result."""

COMMUTATIVE = frozenset({"add", "mul", "max", "min", "eq", "ne", "and", "or"})


class UntraceableCell(ValueError):
    """Error: the step of a cell uses something that has no scalar graph."""


@dataclass(frozen=True)
class Node:
    """A number: an input (`value` is its name), a constant (`value`), or an operator on earlier nodes."""

    op: str
    args: tuple[int, ...] = ()
    value: str | float | None = None


class Norm(NamedTuple):
    """A norm over the units of several values at once: `reductions.layer_norm`, or `rms_norm` if not `centered`."""

    values: tuple[int, ...]
    normalised: tuple[int, ...]  # the results
    eps: float
    centered: bool


@dataclass
class Graph:
    """Operations in execution order. Equal ones are stored once, and constants and neutral operands are folded.

    Norms are stored both as operations and as a whole, because their known gradients have fewer operations than derived
    ones.
    """

    nodes: list[Node] = field(default_factory=list)
    outputs: dict[str, int] = field(default_factory=dict)
    norms: list[Norm] = field(default_factory=list)
    _known: dict[Node, int] = field(default_factory=dict, repr=False)
    _uniform: list[bool] = field(default_factory=list, repr=False)

    def _insert(self, node: Node) -> int:
        if node not in self._known:
            self._known[node] = len(self.nodes)
            self.nodes.append(node)
            of_uniform = bool(node.args) and all(self._uniform[a] for a in node.args)
            self._uniform.append(node.op == "const" or node.op in REDUCTIONS or of_uniform)
        return self._known[node]

    def input(self, name: str) -> int:
        return self._insert(Node("input", value=name))

    def const(self, value: float) -> int:
        return self._insert(Node("const", value=float(value)))

    def constant(self, index: int) -> float | None:
        """Return the value of a constant node; None for other nodes."""
        node = self.nodes[index]
        return node.value if node.op == "const" else None

    def is_uniform(self, index: int) -> bool:
        """Return whether a node has the same value in all units of a head."""
        return self._uniform[index]

    def add(self, op: str, *args: int) -> int:
        """Add `op` on `args`, simplified; return its node."""
        if op in REDUCTIONS:
            return self._reduce(op, *args)
        values = [self.constant(a) for a in args]
        if None not in values:
            operands = (torch.tensor(value, dtype=torch.float64, device="cpu") for value in values)
            return self.const(OPERATORS[op](*operands).item())
        simple = self._simplify(op, args, values)
        if simple is not None:
            return simple
        if op in COMMUTATIVE:
            args = tuple(sorted(args))
        return self._insert(Node(op, tuple(args)))

    def _reduce(self, op: str, arg: int) -> int:
        if self.is_uniform(arg) and op != "unit_sum":
            return self.const(0.0) if op == "unit_variance" else arg
        return arg if self.constant(arg) == 0 else self._insert(Node(op, (arg,)))

    def _simplify(self, op: str, args: Sequence[int], values: Sequence[float | None]) -> int | None:
        match op, *values:
            case ("add" | "sub", _, 0.0):
                return args[0]
            case "add", 0.0, _:
                return args[1]
            case "sub", 0.0, _:
                return self.add("neg", args[1])
            case ("mul", 0.0, _) | ("mul", _, 0.0) | ("div", 0.0, _):
                return self.const(0.0)
            case ("mul" | "div" | "pow", _, 1.0):
                return args[0]
            case "mul", 1.0, _:
                return args[1]
            case ("mul" | "div", _, -1.0):
                return self.add("neg", args[0])
            case "mul", -1.0, _:
                return self.add("neg", args[1])
            case "pow", _, 2.0:
                return self.add("mul", args[0], args[0])
            case "pow", _, 3.0 if self.is_uniform(args[0]):
                return self.add("mul", args[0], self.add("mul", args[0], args[0]))
            case "where", _, _, _ if args[1] == args[2]:
                return args[1]
            case "where", float(condition), _, _:
                return args[1] if condition else args[2]
            case ("and", 0.0, _) | ("or", _, 0.0) | ("and", _, 1.0) | ("or", 1.0, _):
                return args[0]
            case ("and", _, 0.0) | ("or", 0.0, _) | ("and", 1.0, _) | ("or", _, 1.0):
                return args[1]
            case "neg", None if self.nodes[args[0]].op == "neg":
                return self.nodes[args[0]].args[0]
        if op == "add":
            for a, b in (args, reversed(args)):
                if self.nodes[b].op == "neg":
                    return self.add("sub", a, self.nodes[b].args[0])
        return None

    def copy(self, indices: Iterable[int], source: "Graph") -> dict[int, int]:
        """Copy nodes of `source`, and all that they depend on, into this graph; return index there -> index here."""
        here: dict[int, int] = {}
        for index in source.needed(indices):
            here[index] = self.copied(source.nodes[index], here)
        return here

    def copied(self, node: Node, here: dict[int, int]) -> int:
        """Return a node of another graph as one of this, where its operands are `here`."""
        leaf = node.op in ("input", "const")
        return self._insert(node) if leaf else self.add(node.op, *(here[a] for a in node.args))

    def joined(self, other: "Graph") -> "Graph":
        """Return a graph with the outputs of both graphs."""
        both = Graph()
        for graph in (self, other):
            here = both.copy(graph.outputs.values(), graph)
            both.outputs |= {name: here[index] for name, index in graph.outputs.items()}
        return both

    def extract(self, outputs: Mapping[str, int], inputs: Mapping[int, str] | None = None) -> "Graph":
        """Return the part of this graph that `outputs` depend on, as a separate graph.

        Args:
            outputs: the nodes of its outputs, by name.
            inputs: names of nodes that become its inputs; None means none.
        """
        part, here, names = Graph(), {}, inputs or {}
        for index in self.needed(outputs.values(), given=names):
            here[index] = part.input(names[index]) if index in names else part.copied(self.nodes[index], here)
        part.outputs = {name: here[index] for name, index in outputs.items()}
        part.norms = moved(self.norms, here)
        return part

    def needed(self, outputs: Iterable[int], given: Collection[int] = ()) -> list[int]:
        """Return the nodes that `outputs` depend on, in execution order, without what `given` nodes depend on."""
        todo, seen = list(outputs), set()
        while todo:
            index = todo.pop()
            if index not in seen:
                seen.add(index)
                todo.extend(() if index in given else self.nodes[index].args)
        return sorted(seen)

    def depending(self, on: Callable[[Node], bool]) -> list[bool]:
        """Return for every node whether `on` is true for it or for a node that it depends on."""
        found: list[bool] = []
        for node in self.nodes:
            found.append(on(node) or any(found[a] for a in node.args))
        return found

    @property
    def reduces(self) -> bool:
        """Return whether an operator reads other units of the head."""
        return any(node.op in REDUCTIONS for node in self.nodes)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of the inputs that the outputs depend on."""
        nodes = (self.nodes[i] for i in self.needed(self.outputs.values()))
        return tuple(node.value for node in nodes if node.op == "input")


def moved(norms: Iterable[Norm], here: Mapping[int, int]) -> list[Norm]:
    """Return the norms whose nodes all exist in another graph, as norms of that graph; `here` maps the nodes."""
    return [
        one._replace(values=tuple(here[k] for k in one.values), normalised=tuple(here[k] for k in one.normalised))
        for one in norms
        if all(k in here for k in (*one.values, *one.normalised))
    ]
