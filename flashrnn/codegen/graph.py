"""Scalar graphs: what a cell computes for one unit, as a list of operations on single numbers."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

FOLD: dict[str, Callable[..., float]] = {
    "neg": lambda a: -a,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b if b else math.copysign(math.inf, a) if a else math.nan,
    "pow": lambda a, b: a**b,
    "max": max,
    "min": min,
    "abs": abs,
    "exp": math.exp,
    "log": math.log,
    "sqrt": math.sqrt,
}
"""How operations on constants alone are computed while a graph is built."""

OPERATORS = (
    *FOLD, "sign", "expm1", "log1p", "rsqrt", "tanh", "sigmoid", "sin", "cos", "erf",
    "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "where",
)  # fmt: skip
"""Every operator a printer must know; `where`, `and`, `or`, `not` and comparisons handle truth values."""

COMMUTATIVE = frozenset({"add", "mul", "max", "min", "eq", "ne", "and", "or"})


@dataclass(frozen=True)
class Node:
    """One number: an input (`value` is its name), a constant (`value`), or an operator on earlier nodes."""

    op: str
    args: tuple[int, ...] = ()
    value: str | float | None = None


@dataclass
class Graph:
    """Operations in execution order; equal ones are stored once, constants and neutral operands fold away."""

    nodes: list[Node] = field(default_factory=list)
    outputs: dict[str, int] = field(default_factory=dict)
    _known: dict[Node, int] = field(default_factory=dict, repr=False)

    def _insert(self, node: Node) -> int:
        if node not in self._known:
            self._known[node] = len(self.nodes)
            self.nodes.append(node)
        return self._known[node]

    def input(self, name: str) -> int:
        return self._insert(Node("input", value=name))

    def const(self, value: float) -> int:
        return self._insert(Node("const", value=float(value)))

    def constant(self, index: int) -> float | None:
        """The value of a node that is a constant, else None."""
        node = self.nodes[index]
        return node.value if node.op == "const" else None

    def add(self, op: str, *args: int) -> int:
        """The node of `op` on `args`, simplified."""
        values = [self.constant(a) for a in args]
        if op in FOLD and None not in values:
            return self.const(FOLD[op](*values))
        simple = self._simplify(op, args, values)
        if simple is not None:
            return simple
        if op in COMMUTATIVE:
            args = tuple(sorted(args))
        return self._insert(Node(op, tuple(args)))

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
            case "where", _, _, _ if args[1] == args[2]:
                return args[1]
            case "neg", None if self.nodes[args[0]].op == "neg":
                return self.nodes[args[0]].args[0]
        if op == "add":
            for a, b in (args, reversed(args)):
                if self.nodes[b].op == "neg":
                    return self.add("sub", a, self.nodes[b].args[0])
        return None

    def copy(self, index: int, source: "Graph") -> int:
        """Node `index` of `source`, with all it depends on, as a node of this graph."""
        node = source.nodes[index]
        if node.op in ("input", "const"):
            return self._insert(node)
        return self.add(node.op, *(self.copy(a, source) for a in node.args))

    def extract(self, outputs: dict[str, int]) -> "Graph":
        """The part of this graph that `outputs` need, as a graph of its own."""
        part = Graph()
        for index in self.needed(outputs.values()):
            part.copy(index, self)
        part.outputs = {name: part.copy(index, self) for name, index in outputs.items()}
        return part

    def needed(self, outputs: Iterable[int]) -> list[int]:
        """The nodes that `outputs` depend on, in execution order."""
        todo, seen = list(outputs), set()
        while todo:
            index = todo.pop()
            if index not in seen:
                seen.add(index)
                todo.extend(self.nodes[index].args)
        return sorted(seen)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs that the outputs depend on."""
        nodes = (self.nodes[i] for i in self.needed(self.outputs.values()))
        return tuple(node.value for node in nodes if node.op == "input")
