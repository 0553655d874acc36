"""Makes the scalar graphs of a cell from its PyTorch step.

The backward of a step, dg_t and ds_{t-1} from ds_t, is linear in ds_t. It is split in two: factors that depend on
gates and states alone, which a kernel computes before ds_t arrives (off the chain of dependent steps), and the few
multiplications and additions that have to wait for ds_t.
"""

import math

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from flashrnn.cells import Cell
from flashrnn.codegen.graph import OPERATORS, TRUTH, Graph
from flashrnn.trace import Trace, UntraceableCell


def make_trace(cell: Cell) -> Trace:
    """Scalar graphs of `cell`; raises UntraceableCell naming the operator that has none."""
    names = (*cell.gates, *cell.states)
    cotangents = tuple(f"d_new_{state}" for state in cell.states)

    def forward(primals, _):
        primals = [value.clone() for value in primals]  # a step may work in place
        return cell.update(primals[: len(cell.gates)], primals[len(cell.gates) :])

    def vjp(primals, cotangents):
        _, pull = torch.func.vjp(lambda *p: forward(p, None), *primals)
        return pull(tuple(cotangents))

    new = _scalar_graph(cell, forward, (names, cotangents), [f"new_{state}" for state in cell.states])
    joint = _scalar_graph(cell, vjp, (names, cotangents), [f"d_{name}" for name in names])
    factors, backward = _split(cell, joint, cotangents)
    return Trace(new, factors, backward)


_aten = torch.ops.aten
_ACTIVATIONS = get_decompositions(
    [
        _aten.elu, _aten.elu_backward, _aten.gelu, _aten.gelu_backward, _aten.hardtanh, _aten.hardtanh_backward,
        _aten.leaky_relu, _aten.leaky_relu_backward, _aten.mish, _aten.mish_backward, _aten.silu, _aten.silu_backward,
    ]
)  # fmt: skip
_DECOMPOSITIONS = {**core_aten_decompositions(), **_ACTIVATIONS}


def _scalar_graph(cell: Cell, function, input_names, output_names: list[str]) -> Graph:
    # 0-dimensional inputs keep shapes out of the graph; the values stay clear of where steps branch on zero.
    options = {"dtype": torch.float64, "device": "cpu"}
    examples = [[torch.tensor(0.5 + 0.01 * k, **options) for k in range(len(names))] for names in input_names]
    function = torch.func.functionalize(function, remove="mutations")
    try:
        module = make_fx(function, decomposition_table=_DECOMPOSITIONS)(*examples)
    except Exception as error:
        raise UntraceableCell(
            f"cell {cell.name!r} cannot be traced: a step may use element-wise PyTorch operations only, and no Python "
            f"branches on values (use torch.where). PyTorch says: {error}"
        ) from error
    return _convert(cell, module, [name for names in input_names for name in names], output_names)


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

_PASS_THROUGH = {"clone", "detach", "alias", "view", "lift_fresh_copy", "expand"}
_TAKES_TRUTH = {
    "and": (0, 1),
    "or": (0, 1),
    "not": (0,),
    "where": (0,),
}  # operator -> its operands that are truth values


def _convert(cell: Cell, module: GraphModule, input_names: list[str], output_names: list[str]) -> Graph:
    graph, index = Graph(), {}
    names = iter(input_names)

    def operand(value) -> int:
        return index[value] if isinstance(value, torch.fx.Node) else graph.const(value)

    for node in module.graph.nodes:
        if node.op == "placeholder":
            index[node] = graph.input(next(names))
        elif node.op == "get_attr":
            index[node] = graph.const(getattr(module, node.target).item())
        elif node.op == "call_function":
            index[node] = _convert_call(cell, graph, node, operand)
        elif node.op == "output":
            outputs = torch.utils._pytree.tree_leaves(node.args[0])
            graph.outputs = {name: operand(value) for name, value in zip(output_names, outputs, strict=True)}
    return graph.extract(graph.outputs)


def _convert_call(cell: Cell, graph: Graph, node: torch.fx.Node, operand) -> int:
    name = node.target.overloadpacket.__name__
    args, options = node.args, dict(node.kwargs)
    if name in _ATEN:
        operands = [operand(a) for a in args]
        if "alpha" in options:
            operands[1] = graph.add("mul", operands[1], graph.const(options.pop("alpha")))
        if not options:
            return _add(graph, _ATEN[name], operands)
    match name:
        case "full" | "full_like":
            return graph.const(args[1])
        case "scalar_tensor":
            return graph.const(args[0])
        case "zeros_like" | "ones_like":
            return graph.const(name == "ones_like")
        case "_efficientzerotensor":
            return graph.const(0)
        case "empty" | "empty_permuted":
            return graph.const(math.nan)  # overwritten before it is read
        case "copy":
            return operand(args[1])
        case "reciprocal":
            return graph.add("div", graph.const(1), operand(args[0]))
        case "relu":
            return graph.add("max", operand(args[0]), graph.const(0))
        case "clamp" | "clamp_min" | "clamp_max":
            bounds = {"clamp": args[1:], "clamp_min": args[1:], "clamp_max": (None, *args[1:])}[name]
            value = operand(args[0])
            for op, bound in zip(("max", "min"), bounds, strict=False):
                value = value if bound is None else graph.add(op, value, operand(bound))
            return value
        case "_to_copy":
            value, dtype = operand(args[0]), node.meta["val"].dtype
            if dtype == torch.bool:
                return _as_truth(graph, value)
            if dtype.is_floating_point or graph.nodes[value].op in TRUTH:
                return value
    if name in _PASS_THROUGH:
        return operand(args[0])
    raise UntraceableCell(
        f"cell {cell.name!r} uses the operator {node.target}{node.kwargs or ''}, which has no scalar form; "
        f"element-wise operators that have one: {', '.join(sorted(_ATEN))}, clamp, relu, reciprocal"
    )


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
