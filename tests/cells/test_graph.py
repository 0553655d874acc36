import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrnn.cells.graph import OPERATORS, TRUTH, Graph
from flashrnn.cells.printers.pytorch import torch_function

ARITY = {"where": 3} | dict.fromkeys(
    (
        "add",
        "sub",
        "mul",
        "div",
        "pow",
        "fmod",
        "copysign",
        "max",
        "min",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "and",
        "or",
    ),
    2,
)
INPUTS = {"x": torch.tensor([0.7, -1.3, 0.0, 2.1]), "y": torch.tensor([-0.4, 0.7, 0.0, 1.6])}
INPUTS = {name: value.double() for name, value in INPUTS.items()}


def truths(numbers):
    compare = st.tuples(st.sampled_from(["eq", "ne", "lt", "le", "gt", "ge"]), numbers, numbers)
    return st.one_of(
        compare,
        st.tuples(st.just("not"), compare),
        st.tuples(st.sampled_from(["and", "or"]), compare, compare),
    )


# Expressions that are finite everywhere, because graphs simplify 0 * x to 0.
numbers = st.recursive(
    st.sampled_from(["x", "y", 0.0, 1.0, -1.0, 2.0, 0.1, -3.0]),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["neg", "abs", "sign", "tanh", "sigmoid", "sin", "cos", "erf"]), inner),
        st.tuples(st.sampled_from(["add", "sub", "mul", "max", "min"]), inner, inner),
        st.tuples(st.just("div"), inner, st.sampled_from([1.0, -1.0, 2.0, 0.1])),
        st.tuples(st.just("pow"), st.tuples(st.just("tanh"), inner), st.sampled_from([1.0, 2.0, 3.0])),
        st.tuples(st.sampled_from(["exp", "expm1"]), st.tuples(st.just("tanh"), inner)),
        st.tuples(st.just("where"), truths(inner), inner, inner),
    ),
    max_leaves=12,
)


def build(graph: Graph, expression) -> int:
    if isinstance(expression, tuple):
        op, *args = expression
        return graph.add(op, *(build(graph, a) for a in args))
    return graph.input(expression) if isinstance(expression, str) else graph.const(expression)


def evaluate(expression) -> torch.Tensor:
    if isinstance(expression, tuple):
        op, *args = expression
        return OPERATORS[op](*map(evaluate, args))
    return INPUTS[expression] if isinstance(expression, str) else torch.full((4,), expression, dtype=torch.float64)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(numbers)
def test_simplified_graph_has_the_values_of_the_expression(expression):
    graph = Graph()
    graph.outputs = {"out": build(graph, expression)}
    (out,) = torch_function(graph, ("x", "y"), ("out",))(**{f"x_{name}": value for name, value in INPUTS.items()})
    torch.testing.assert_close(torch.as_tensor(out, dtype=torch.float64).expand(4), evaluate(expression))


@pytest.mark.parametrize("op", OPERATORS)
def test_operators_on_constants_are_folded(op):
    values = [0.5, 2.0, 3.0][: ARITY.get(op, 1)]
    graph = Graph()
    folded = graph.constant(graph.add(op, *map(graph.const, values)))
    assert folded == OPERATORS[op](*(torch.tensor(v, dtype=torch.float64) for v in values)).item()


@pytest.mark.parametrize(
    ("op", "values", "folded"),
    [("exp", [1000.0], math.inf), ("log", [0.0], -math.inf), ("div", [-1.0, 0.0], -math.inf), ("sqrt", [-1.0], None)],
)
def test_folding_follows_floating_point_arithmetic(op, values, folded):
    graph = Graph()
    graph.outputs = {"out": graph.add(op, *map(graph.const, values))}
    (out,) = torch_function(graph, (), ("out",))()
    assert math.isnan(out) if folded is None else out == folded


@pytest.mark.parametrize("op", sorted(TRUTH))
def test_truth_values_are_bool_tensors(op):
    graph = Graph()
    x = graph.input("x")
    args = [x, graph.const(0.25)] if op not in ("and", "or", "not") else [graph.add("gt", x, graph.const(0.0))] * 2
    graph.outputs = {"out": graph.add(op, *args[: ARITY.get(op, 1)])}
    (out,) = torch_function(graph, ("x",), ("out",))(INPUTS["x"])
    assert out.dtype == torch.bool


def test_equal_operations_are_stored_once():
    graph = Graph()
    x, y = graph.input("x"), graph.input("y")
    assert graph.add("mul", x, y) == graph.add("mul", y, x)
    assert graph.add("sub", x, y) != graph.add("sub", y, x)
    assert graph.add("add", x, graph.add("neg", y)) == graph.add("sub", x, y)


def test_extract_takes_linear_time():
    graph = Graph()
    value = graph.input("x")
    for _ in range(100):  # 2^100 paths lead from the output to x
        value = graph.add("add", graph.add("tanh", value), graph.add("sin", value))
    graph.add("exp", graph.input("unused"))
    part = graph.extract({"out": value})
    assert part.inputs == ("x",)
    assert len(part.nodes) == 301


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_with_two_constants_has_the_dtype_of_the_inputs(dtype):
    graph = Graph()
    truth = graph.add("gt", graph.input("x"), graph.const(0.0))
    graph.outputs = {"out": graph.add("where", truth, graph.const(0.1), graph.const(0.2))}
    (out,) = torch_function(graph, ("x",), ("out",))(torch.tensor([1.0, -1.0], dtype=dtype))
    torch.testing.assert_close(out, torch.tensor([0.1, 0.2], dtype=dtype), rtol=0, atol=0)


def test_power_of_a_negative_constant():
    graph = Graph()
    graph.outputs = {"out": graph.add("pow", graph.const(-2.0), graph.input("x"))}
    (out,) = torch_function(graph, ("x",), ("out",))(torch.tensor([2.0, 3.0]))
    assert out.tolist() == [4.0, -8.0]


def test_constant_outputs_are_floats():
    graph = Graph()
    graph.outputs = {"one": graph.const(1.0), "x": graph.input("x")}
    one, x = torch_function(graph, ("x",), ("one", "x"))(INPUTS["x"])
    assert one == 1.0
    assert x is INPUTS["x"]
