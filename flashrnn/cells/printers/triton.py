"""Scalar graphs as Triton device functions, which call those of flashrnn/triton/math.py."""

import math

from flashrnn.cells.definition import Cell
from flashrnn.cells.graph import REDUCTIONS, Node
from flashrnn.cells.printers.functions import Function, functions
from flashrnn.cells.printers.printing import PYTHON, operations, python_function, variables, write

_FORMULA = PYTHON | {"where": "tl.where({0}, {1}, {2})"}
_OF_BLOCKS = ("pow", "fmod", "copysign")  # operators that do not accept plain numbers


def device_function(function: Function, head_dim: int | None = None) -> str:
    """Return a function of float32 blocks, with an argument per element of its groups, that returns a tuple.

    If it reduces over units, blocks are [sequences, units], of which the first `head_dim` units belong to the head.
    """
    arguments = [name for group in function.inputs.values() for name in group]
    results = [name for group in function.outputs.values() for name in group]
    inputs = variables(arguments)

    def full(literal: str) -> str:
        return f"tl.full({inputs[arguments[0]]}.shape, {literal}, tl.float32)"

    def text_of(node: Node, args: list[str]) -> str:
        if node.op in _OF_BLOCKS:
            args = [full(arg) if is_constant(a) else arg for a, arg in zip(node.args, args, strict=True)]
        if node.op in REDUCTIONS:
            args = [full(args[0]) if is_constant(node.args[0]) else args[0], str(head_dim)]
        return write(node.op, args, _FORMULA, "op_")

    def of_block(index: int, text: str) -> str:
        """Return a result with the shape of the arguments."""
        if is_constant(index):
            return full(text)
        return f"tl.broadcast_to({text}, {inputs[arguments[0]]}.shape)" if function.graph.is_uniform(index) else text

    def is_constant(index: int) -> bool:
        return function.graph.constant(index) is not None

    printed, texts = operations(function.graph, results, inputs, _literal, text_of)
    indices = (function.graph.outputs[name] for name in results)
    texts = [of_block(index, text) for index, text in zip(indices, texts, strict=True)]
    return python_function(function.name, inputs.values(), printed, texts)


def cell_functions(cell: Cell, head_dim: int | None = None) -> str:
    """Return `cell_forward`, `cell_factors` and `cell_backward` of a cell (see `trace.Trace`) as the text of a module.

    If the cell reduces over units, the functions are for heads of `head_dim` units.
    """
    return "\n\n\n".join(device_function(function, head_dim) for function in functions(cell)) + "\n"


def _literal(value: float) -> str:
    return f"({value!r})" if math.isfinite(value) else f"float('{value}')"
