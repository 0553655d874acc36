"""Chains of operations in the order in which their operands are known."""

import torch

from flashrnn.cells.graph import Graph
from flashrnn.cells.printers.pytorch import torch_function
from flashrnn.cells.regrouping import regrouped

KNOWN = {"constant": 0, "early": 1, "late": 2, "later": 3, "last": 4}


def order(graph: Graph) -> list[int]:
    """Return when each node is known, by the names of the inputs."""
    found: list[int] = []
    for node in graph.nodes:
        found.append(max([KNOWN.get(str(node.value), 0), *(found[a] for a in node.args)]))
    return found


def waiting(graph: Graph, output: str) -> int:
    """Return the number of operations that wait for the input `last`."""
    depends = graph.depending(lambda node: node.value == "last")
    needed = graph.needed([graph.outputs[output]])
    return sum(depends[k] and graph.nodes[k].op != "input" for k in needed)


def check(graph: Graph) -> Graph:
    """Return the graph regrouped, with the same results."""
    found = regrouped(graph, order, late=2)
    numbers = torch.linspace(0.3, 2, len(KNOWN), dtype=torch.float64).tolist()
    outputs = list(graph.outputs)
    results = [torch_function(g, list(KNOWN), outputs)(*map(torch.tensor, numbers)) for g in (graph, found)]
    torch.testing.assert_close(*results)
    return found


def test_one_operation_of_a_chain_waits_for_the_last_operand():
    graph = Graph()
    constant, early, late, last = map(graph.input, ("constant", "early", "late", "last"))
    graph.outputs["sum"] = graph.add("add", graph.add("add", last, early), graph.add("add", late, constant))
    graph.outputs["product"] = graph.add("mul", graph.add("mul", graph.add("mul", last, late), early), constant)
    found = check(graph)
    assert [waiting(graph, name) for name in graph.outputs] == [2, 3]
    assert [waiting(found, name) for name in found.outputs] == [1, 1]


def test_value_used_twice_is_part_of_a_chain_only_if_all_of_it_is_late():
    graph = Graph()
    constant, early, late, later, last = map(graph.input, KNOWN)
    for name, operand in (("late", later), ("early", early)):
        product = graph.add("mul", operand, last)
        graph.outputs[name] = product
        graph.outputs[f"scaled_{name}"] = graph.add("mul", graph.add("add", constant, late), product)
    found = check(graph)
    assert waiting(found, "scaled_late") == 1
    assert waiting(found, "scaled_early") == 2
