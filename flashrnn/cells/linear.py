"""The gradient of a step, split in two parts. It is linear in the gradients ds_t of the new states.

The factors depend only on gates and states, so that a kernel can compute them before ds_t arrives, off the critical
path. Only the few remaining multiplications and additions wait for ds_t.
"""

from flashrnn.cells.definition import Cell
from flashrnn.cells.graph import Graph, UntraceableCell


def split(cell: Cell, joint: Graph, cotangents: tuple[str, ...]) -> tuple[Graph, Graph]:
    """Split `joint` into a graph of factors without cotangents, and a graph that is linear in the cotangents."""
    linear = _Linear(cell, joint, cotangents)
    terms = {name: linear.term(index) for name, index in joint.outputs.items()}
    outputs = {name: linear.value(term) for name, term in terms.items()}
    return linear.primal.extract(linear.factors), linear.backward.extract(outputs)


_Term = tuple[int, int] | None  # the product of a node of the backward graph and one of the primal graph; None: zero


class _Linear:
    """Rewrites a graph that is linear in its cotangents, such that every value is a sum of products (node, factor).

    Factors are multiplied with each other first, so that only one multiplication per product remains when the
    cotangents arrive.
    """

    def __init__(self, cell: Cell, joint: Graph, cotangents: tuple[str, ...]):
        self.cell, self.joint = cell, joint
        self.primal, self.backward = Graph(), Graph()
        self.factors: dict[str, int] = {}
        self._one = self.primal.const(1)
        self._zero = self.primal.const(0)
        self._terms: dict[int, _Term] = {}
        self._depends = joint.depending(lambda node: node.value in cotangents)

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
            case (("unit_sum" | "unit_mean"), True):
                term = self.term(node.args[0])
                return None if term is None else (self.backward.add(node.op, self.value(term)), self._one)
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
        """Return the node of the backward graph with the value of the product."""
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
