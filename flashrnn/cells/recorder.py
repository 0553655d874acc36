"""Recording of a step on scalars, operator by operator, as a scalar graph."""

import inspect
import linecache
import math
from collections.abc import Callable
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor

from flashrnn._torch_private import DispatchMode, OpOverload, decompositions
from flashrnn.cells.definition import Cell
from flashrnn.cells.graph import REDUCTIONS, TRUTH, Graph, Norm, UntraceableCell
from flashrnn.cells.operators import OPERATORS, PARTS


def recorded(
    cell: Cell, function: Callable[[], tuple[Tensor, ...]], inputs: dict[str, Tensor], outputs: list[str]
) -> Graph:
    """Call a function of `inputs`, tensors without dimensions, and return the graph of its results, named `outputs`.

    Raises:
        UntraceableCell: an operator has no scalar form, or the function fails on such tensors.
    """
    recorder = _Recorder(cell)
    for name, value in inputs.items():
        recorder.record(value, recorder.graph.input(name))
    try:
        # in anomaly mode, the checks for NaN would be recorded too
        with torch.autograd.set_detect_anomaly(False), recorder:
            results = function()
    except UntraceableCell as error:
        raise UntraceableCell(f"{error}{_line_of_step(cell, error)}") from error
    except Exception as error:
        raise UntraceableCell(
            f"cell {cell.name!r} cannot be traced: a step may use element-wise PyTorch operations and flashrnn's "
            f"reductions only, and no Python branches on values (use torch.where). PyTorch says: {error}"
            f"{_line_of_step(cell, error)}"
        ) from error
    return recorder.graph.extract(dict(zip(outputs, map(recorder.operand, results), strict=True)))


def _line_of_step(cell: Cell, error: Exception) -> str:
    """Return the line of the step that raised an error, to be appended to a message; "" if the gradient raised it."""
    code = getattr(inspect.unwrap(cell.step), "__code__", None)
    lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code is code]
    if not lines:
        return ""
    text = linecache.getline(code.co_filename, lines[-1]).strip()
    return f" ({code.co_filename}, line {lines[-1]}: {text})"


_aten = torch.ops.aten
_PASS_THROUGH = {"clone", "detach", "alias", "view", "lift_fresh", "expand"}
_TAKES_TRUTH = {"and": (0, 1), "or": (0, 1), "not": (0,), "where": (0,)}
"""The operands of these operators that are truth values."""


def _in_parts(function: OpOverload, args: tuple, options: dict) -> Any:
    """Return the result computed by simpler operators; NotImplemented if there is no decomposition."""
    name = function.overloadpacket.__name__
    if name in PARTS:
        return PARTS[name](*args, **options)
    table = decompositions()
    if function in table:
        # without PyTorch's wrapper for dtypes, which imports SymPy
        return inspect.unwrap(table[function])(*args, **options)
    return function.decompose(*args, **options)


class _Recorder(DispatchMode):
    """Records PyTorch's operators on 0-dimensional tensors in a graph, including those of the backward pass."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.graph = Graph()
        self._cell = cell
        # by the address of the number: a view shares that of its base, and a tensor changed in place keeps its own
        self._nodes: dict[int, int] = {}
        self._recorded: list[Tensor] = []  # keeps tensors alive, so that their addresses are not reused

    def record(self, value: Tensor, node: int) -> None:
        self._nodes[value.data_ptr()] = node
        self._recorded.append(value)

    def operand(self, value: Any) -> int:
        """Return the node of an operand: a tensor, or a constant."""
        if not isinstance(value, Tensor):
            return self.graph.const(value)
        node = self._nodes.get(value.data_ptr())
        if node is not None:
            return node
        if value.ndim:  # results would have its shape
            raise UntraceableCell(
                f"cell {self._cell.name!r} captures a tensor of shape {list(value.shape)}: make it a number, or a "
                "tensor without dimensions"
            )
        return self.graph.const(value.item())

    def __torch_dispatch__(self, function: OpOverload, types: Any, args: tuple = (), options: Any = None) -> Any:
        options, name = options or {}, function.overloadpacket.__name__
        if name.endswith("_") and not name.endswith("__") and name != "copy_":
            with self:
                return args[0].copy_(getattr(_aten, name[:-1])(*args, **options))
        result = function(*args, **options)
        if name == "unit_norm":
            values, normalised, eps, centered = args
            nodes = (tuple(map(self.operand, group)) for group in (values, normalised))
            self.graph.norms.append(Norm(*nodes, eps, centered))
            return result
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
                f"element-wise operators that have one: {', '.join(sorted({*OPERATORS, *PARTS, 'clamp'}))}"
            )
        return parts

    def _node(self, name: str, args: tuple, options: dict, result: Tensor) -> int | None:
        """Return the node of the operator's result; None if graphs have no such operator."""
        if name in OPERATORS:
            operands = [self.operand(a) for a in args]
            others = {key: value for key, value in options.items() if value is not None}
            if "alpha" in others:
                operands[1] = self.graph.add("mul", operands[1], self.graph.const(others.pop("alpha")))
            if not others:
                return _add(self.graph, OPERATORS[name], operands)
        if name in REDUCTIONS:
            return _add(self.graph, name, [self.operand(args[0])])
        match name:
            case "full" | "full_like":
                return self.graph.const(args[1])
            case "scalar_tensor":
                return self.graph.const(args[0])
            case "zeros" | "zeros_like" | "ones_like":
                return self.graph.const(name == "ones_like")
            case "empty" | "empty_permuted":
                return self.graph.const(math.nan)  # overwritten before it is read
            case "copy" | "copy_":
                return self.operand(args[1])
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
                if dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize:
                    raise UntraceableCell(
                        f"cell {self._cell.name!r} casts to {dtype} within its step, which kernels cannot do: they "
                        "compute in float32 whatever the dtype of inputs and outputs is. Leave the cast out"
                    )
                if dtype.is_floating_point or self.graph.nodes[value].op in TRUTH:
                    return value
        if name in _PASS_THROUGH:
            return self.operand(args[0])
        return None


def _add(graph: Graph, op: str, operands: list[int]) -> int:
    """Add `op` like `graph.add`, converting truth values to 0 and 1 and numbers to truth values where necessary."""
    truths = _TAKES_TRUTH.get(op, ())
    return graph.add(op, *((_as_truth if k in truths else _as_number)(graph, a) for k, a in enumerate(operands)))


def _as_truth(graph: Graph, value: int) -> int:
    return value if graph.nodes[value].op in TRUTH else graph.add("ne", value, graph.const(0))


def _as_number(graph: Graph, value: int) -> int:
    is_truth = graph.nodes[value].op in TRUTH
    return graph.add("where", value, graph.const(1), graph.const(0)) if is_truth else value
