"""Makes the scalar graphs of a cell from its PyTorch step.

The backward of a step, dg_t and ds_{t-1} from ds_t, is linear in ds_t. It is split in two: factors that depend on
gates and states alone, which a kernel computes before ds_t arrives (off the chain of dependent steps), and the few
multiplications and additions that have to wait for ds_t.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from flashrnn.cells import Cell
from flashrnn.codegen.graph import OPERATORS, TRUTH, Graph
from flashrnn.codegen.torch_source import torch_function
from flashrnn.trace import Trace, UntraceableCell


def make_trace(cell: Cell, dtype: torch.dtype) -> Trace:
    """Scalar graphs of `cell` for numbers of this dtype; raises UntraceableCell naming the operator that has none."""
    names = (*cell.gates, *cell.states)
    cotangents = tuple(f"d_new_{state}" for state in cell.states)

    def forward(primals: list[Tensor]) -> tuple[Tensor, ...]:
        primals = [value.clone() for value in primals]  # a step may work in place
        return cell.update(primals[: len(cell.gates)], primals[len(cell.gates) :])

    def vjp(primals: list[Tensor], cotangents: list[Tensor]) -> tuple[Tensor, ...]:
        primals = [value.requires_grad_() for value in primals]
        new = forward(primals)
        # One number that depends on every value: for anything else, autograd imports what takes longer than the trace.
        total = sum(n * d for n, d in zip(new, cotangents, strict=True)) + sum(0.0 * value for value in primals)
        return torch.autograd.grad(total, primals)

    new = _scalar_graph(cell, dtype, forward, (names,), [f"new_{state}" for state in cell.states])
    joint = _scalar_graph(cell, dtype, vjp, (names, cotangents), [f"d_{name}" for name in names])
    factors, backward = _split(cell, joint, cotangents)
    return Trace(new, factors, backward)


_aten = torch.ops.aten
_ATEN = {
    name: op
    for op, names in {
        "neg": "neg", "add": "add", "sub": "sub", "mul": "mul", "div": "div", "pow": "pow", "max": "maximum",
        "min": "minimum", "abs": "abs", "exp": "exp", "log": "log", "sqrt": "sqrt", "sign": "sign sgn",
        "expm1": "expm1", "log1p": "log1p", "rsqrt": "rsqrt", "tanh": "tanh", "sigmoid": "sigmoid", "sin": "sin",
        "cos": "cos", "erf": "erf", "eq": "eq", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge",
        "ne": "ne logical_xor bitwise_xor",
        "and": "logical_and bitwise_and", "or": "logical_or bitwise_or", "not": "logical_not bitwise_not",
        "where": "where",
    }.items()
    for name in names.split()
}  # fmt: skip
assert set(_ATEN.values()) == set(OPERATORS)

_PASS_THROUGH = {"clone", "detach", "alias", "view", "lift_fresh", "expand"}
_TAKES_TRUTH = {
    "and": (0, 1),
    "or": (0, 1),
    "not": (0,),
    "where": (0,),
}  # operator -> its operands that are truth values


def _scalar_graph(
    cell: Cell, dtype: torch.dtype, function: Callable, input_names: tuple, output_names: list[str]
) -> Graph:
    # 0-dimensional inputs keep shapes out of the graph; the values stay clear of where steps branch on zero.
    options = {"dtype": dtype, "device": "cpu"}
    examples = [[torch.tensor(0.5 + 0.01 * k, **options) for k in range(len(names))] for names in input_names]
    inputs = dict(zip(chain(*input_names), chain(*examples), strict=True))
    recorder = _Recorder(cell)
    for name, value in inputs.items():
        recorder.record(value, recorder.graph.input(name))
    try:
        with recorder:
            outputs = function(*examples)
    except UntraceableCell:
        raise
    except Exception as error:
        raise UntraceableCell(
            f"cell {cell.name!r} cannot be traced: a step may use element-wise PyTorch operations only, and no Python "
            f"branches on values (use torch.where). PyTorch says: {error}"
        ) from error
    graph = recorder.graph.extract(dict(zip(output_names, map(recorder.operand, outputs), strict=True)))
    _check(cell, graph, inputs, outputs)
    return graph


def _check(cell: Cell, graph: Graph, inputs: dict[str, Tensor], outputs: Sequence[Tensor]) -> None:
    """Raise UntraceableCell if the graph computes something else, as it might where PyTorch's operators change."""
    computed = torch_function(graph, list(inputs), list(graph.outputs))(*inputs.values())
    for name, ours, theirs in zip(graph.outputs, computed, outputs, strict=True):
        # to two digits: a step may round to half types, which graphs leave out
        if not torch.allclose(torch.as_tensor(ours).to(theirs), theirs, rtol=1e-2, equal_nan=True):
            raise UntraceableCell(f"cell {cell.name!r} cannot be traced: {name} is {theirs}, but by its graph {ours}")


def _in_parts(function: OpOverload, args: tuple, options: dict) -> Any:
    """The result by simpler operators; NotImplemented if there are none."""
    if function in decomposition_table:
        # without what PyTorch wraps around it for the sake of dtypes, which imports SymPy
        return inspect.unwrap(decomposition_table[function])(*args, **options)
    return function.decompose(*args, **options)


class _Recorder(TorchDispatchMode):
    """Writes PyTorch's operators on 0-dimensional tensors down in a graph, those of the backward pass too."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.graph = Graph()
        self._cell = cell
        # By the address of the number: views have that of what they view, and what is changed in place keeps its own.
        self._nodes: dict[int, int] = {}
        self._recorded: list[Tensor] = []  # or their addresses would be used again

    def record(self, value: Tensor, node: int) -> None:
        self._nodes[value.data_ptr()] = node
        self._recorded.append(value)

    def operand(self, value: Any) -> int:
        """The node of an operand: a tensor, or a constant."""
        if not isinstance(value, Tensor):
            return self.graph.const(value)
        node = self._nodes.get(value.data_ptr())
        if node is not None:
            return node
        if value.ndim:  # results would take its shape
            raise UntraceableCell(
                f"cell {self._cell.name!r} captures a tensor of shape {list(value.shape)}: make it a number, or a "
                "tensor without dimensions"
            )
        return self.graph.const(value.item())

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping it would import it

    def __torch_dispatch__(self, function: OpOverload, types: Any, args: tuple = (), options: Any = None) -> Any:
        options, name = options or {}, function.overloadpacket.__name__
        if function._schema.is_mutable and name.endswith("_") and name != "copy_":
            with self:
                return args[0].copy_(getattr(_aten, name[:-1])(*args, **options))
        result = function(*args, **options)
        node = self._node(name, args, options, result)
        if node is not None:
            self.record(result, node)
            return result
        try:
            with self:
                parts = _in_parts(function, args, options)
        except UntraceableCell:  # which names a part: name the whole
            parts = NotImplemented
        if parts is NotImplemented:
            raise UntraceableCell(
                f"cell {self._cell.name!r} uses the operator {function}{options or ''}, which has no scalar form; "
                f"element-wise operators that have one: {', '.join(sorted(_ATEN))}, clamp, relu, reciprocal"
            )
        return parts

    def _node(self, name: str, args: tuple, options: dict, result: Tensor) -> int | None:
        """What the operator does to numbers; None if that is nothing a graph has."""
        if name in _ATEN:
            operands, others = [self.operand(a) for a in args], dict(options)
            if "alpha" in others:
                operands[1] = self.graph.add("mul", operands[1], self.graph.const(others.pop("alpha")))
            if not others:
                return _add(self.graph, _ATEN[name], operands)
        match name:
            case "full" | "full_like":
                return self.graph.const(args[1])
            case "scalar_tensor":
                return self.graph.const(args[0])
            case "zeros_like" | "ones_like":
                return self.graph.const(name == "ones_like")
            case "empty" | "empty_permuted":
                return self.graph.const(math.nan)  # overwritten before it is read
            case "copy" | "copy_":
                return self.operand(args[1])
            case "reciprocal":
                return self.graph.add("div", self.graph.const(1), self.operand(args[0]))
            case "relu":
                return self.graph.add("max", self.operand(args[0]), self.graph.const(0))
            case "clamp" | "clamp_min" | "clamp_max":
                bounds = {"clamp": args[1:], "clamp_min": args[1:], "clamp_max": (None, *args[1:])}[name]
                value = self.operand(args[0])
                for op, bound in zip(("max", "min"), bounds, strict=False):
                    value = value if bound is None else self.graph.add(op, value, self.operand(bound))
                return value
            case "_to_copy":
                value, dtype = self.operand(args[0]), result.dtype
                if dtype == torch.bool:
                    return _as_truth(self.graph, value)
                if dtype.is_floating_point or self.graph.nodes[value].op in TRUTH:
                    return value
        if name in _PASS_THROUGH:
            return self.operand(args[0])
        return None


def _add(graph: Graph, op: str, operands: list[int]) -> int:
    """As `graph.add`, with truth values as the numbers 0 and 1 where `op` takes numbers, and the reverse."""
    truths = _TAKES_TRUTH.get(op, ())
    return graph.add(op, *((_as_truth if k in truths else _as_number)(graph, a) for k, a in enumerate(operands)))


def _as_truth(graph: Graph, value: int) -> int:
    return value if graph.nodes[value].op in TRUTH else graph.add("ne", value, graph.const(0))


def _as_number(graph: Graph, value: int) -> int:
    is_truth = graph.nodes[value].op in TRUTH
    return graph.add("where", value, graph.const(1), graph.const(0)) if is_truth else value


def _split(cell: Cell, joint: Graph, cotangents: tuple[str, ...]) -> tuple[Graph, Graph]:
    """`joint` as a graph of factors, free of cotangents, and a graph linear in the cotangents."""
    linear = _Linear(cell, joint, cotangents)
    terms = {name: linear.term(index) for name, index in joint.outputs.items()}
    outputs = {name: linear.value(term) for name, term in terms.items()}
    return linear.primal.extract(linear.factors), linear.backward.extract(outputs)


_Term = tuple[int, int] | None  # (node of the backward graph, factor of the primal graph), their product; None: zero


class _Linear:
    """Rewrites a graph that is linear in its cotangents: every value is a sum of (node, factor) products.

    Factors are multiplied with each other, not with cotangents, so that one multiplication per product is left to do
    when the cotangents arrive.
    """

    def __init__(self, cell: Cell, joint: Graph, cotangents: tuple[str, ...]):
        self.cell, self.joint = cell, joint
        self.primal, self.backward = Graph(), Graph()
        self.factors: dict[str, int] = {}
        self._one = self.primal.const(1)
        self._zero = self.primal.const(0)
        self._terms: dict[int, _Term] = {}
        self._depends: list[bool] = []
        for node in joint.nodes:
            self._depends.append(node.value in cotangents or any(self._depends[a] for a in node.args))

    def factor(self, index: int) -> int:
        return self.primal.copy([index], self.joint)[index]

    def term(self, index: int) -> _Term:
        if index not in self._terms:
            self._terms[index] = self._make_term(index)
        return self._terms[index]

    def _make_term(self, index: int) -> _Term:
        if self.joint.constant(index) == 0:
            return None
        node = self.joint.nodes[index]
        if node.op == "input" and self._depends[index]:
            return self.backward.input(node.value), self._one
        match node.op, *(self._depends[a] for a in node.args):
            case "neg", True:
                return self._scale(self.term(node.args[0]), lambda f: self.primal.add("neg", f))
            case "mul", True, False:
                return self._multiply("mul", *node.args)
            case "mul", False, True:
                return self._multiply("mul", *reversed(node.args))
            case "div", True, False:
                return self._multiply("div", *node.args)
            case "add", _, _:
                return self._sum(*map(self.term, node.args))
            case "sub", _, _:
                a, b = map(self.term, node.args)
                return self._sum(a, self._scale(b, lambda f: self.primal.add("neg", f)))
            case "where", False, _, _:
                condition = self.factor(node.args[0])
                chosen = [self.term(a) for a in node.args[1:]]
                first = self._scale(chosen[0], lambda f: self.primal.add("where", condition, f, self._zero))
                second = self._scale(chosen[1], lambda f: self.primal.add("where", condition, self._zero, f))
                return self._sum(first, second)
        raise UntraceableCell(f"cell {self.cell.name!r}: its gradient is not linear in what {node.op!r} is applied to")

    def _multiply(self, op: str, cotangent: int, factor: int) -> _Term:
        return self._scale(self.term(cotangent), lambda f: self.primal.add(op, f, self.factor(factor)))

    def _scale(self, term: _Term, change) -> _Term:
        if term is None:
            return None
        node, factor = term
        factor = change(factor)
        return None if factor == self._zero else (node, factor)

    def _sum(self, a: _Term, b: _Term) -> _Term:
        if a is None or b is None:
            return a or b
        if a[0] == b[0]:
            return a[0], self.primal.add("add", a[1], b[1])
        return self.backward.add("add", self.value(a), self.value(b)), self._one

    def value(self, term: _Term) -> int:
        """The node of the backward graph that holds the product."""
        if term is None:
            return self.backward.const(0)
        node, factor = term
        constant = self.primal.constant(factor)
        if constant is not None:
            return self.backward.add("mul", node, self.backward.const(constant))
        if self.primal.nodes[factor].op == "neg":
            return self.backward.add("neg", self.value((node, self.primal.nodes[factor].args[0])))
        known = {index: name for name, index in self.factors.items()}
        name = known.get(factor, f"factor{len(self.factors)}")
        self.factors[name] = factor
        return self.backward.add("mul", node, self.backward.input(name))
