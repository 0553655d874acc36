"""The scalar graphs of a cell: made by `flashrnn.tracer` once, and then kept on disk.

Making them takes a second or more, most of it for importing PyTorch's tracing machinery; a process that finds them on
disk starts that much sooner. They are found by what the step's Python code says, and used only if they compute what the
step computes now, on random numbers.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from threading import Lock
from types import CodeType, FunctionType, ModuleType

import torch
from torch import Tensor

from flashrnn.cache import cache_folder, store
from flashrnn.cells import Cell
from flashrnn.codegen.graph import Graph, Node
from flashrnn.codegen.torch_source import torch_function


@dataclass(frozen=True)
class Trace:
    """A cell as scalar graphs. Inputs and outputs go by the names of gates and states.

    forward: gates and previous states -> `new_<state>` for every state.
    factors: gates and previous states -> `factor<k>`.
    backward: `factor<k>` and `d_new_<state>` -> `d_<gate>` for every gate and `d_<state>` for every previous state.
    """

    forward: Graph
    factors: Graph
    backward: Graph


class UntraceableCell(ValueError):
    """The step of a cell uses something that has no scalar graph."""


@cache
def trace(cell: Cell) -> Trace:
    """Scalar graphs of `cell`; raises UntraceableCell naming the operator that has none.

    In a thread of its own, which starts without the modes of the caller: a trace is the same at inference and under
    autocast, and within an operator of a compiled model, where PyTorch's tracing modes do not nest.
    """
    with _TRACING, ThreadPoolExecutor(1) as thread:
        return thread.submit(_kept_or_made, cell).result()


_TRACING = Lock()  # PyTorch's tracing machinery is one for all threads


def untraceable(cell: Cell) -> str | None:
    """Why the cell has no scalar graphs, and so no printed kernels; None if it has."""
    try:
        trace(cell)
    except UntraceableCell as reason:
        return str(reason)
    return None


def _kept_or_made(cell: Cell) -> Trace:
    path = _place(cell)
    kept = _read(path) if path else None
    if kept is not None and _computes_the_step(kept, cell):
        return kept
    from flashrnn.tracer import make_trace

    made = make_trace(cell)
    graphs = {"forward": made.forward, "factors": made.factors, "backward": made.backward}
    content = {name: {"nodes": [asdict(n) for n in g.nodes], "outputs": g.outputs} for name, g in graphs.items()}
    if path:
        store({path: json.dumps(content).encode()})
    return made


def _place(cell: Cell) -> Path | None:
    """Of the trace on disk; None if the step uses something that only this process can tell from others."""
    sources = [Path(__file__).parent / name for name in ("trace.py", "tracer.py", "codegen/graph.py")]
    parts = [torch.__version__, *(path.read_text() for path in sources), repr(cell.gates), repr(cell.states)]
    described = list(_describe(cell.step, set()))
    if any(" at 0x" in part for part in described):
        return None
    fingerprint = hashlib.sha256("\n".join([*parts, *described]).encode()).hexdigest()[:32]
    return cache_folder() / f"trace-{fingerprint}.json"


def _describe(value: object, seen: set[int]) -> Iterator[str]:
    """What a function does, as far as Python shows it: its code, its constants, and what it refers to by name."""
    if isinstance(value, FunctionType) and not _of_torch(value):
        if id(value) in seen:
            return
        seen.add(id(value))
        yield from _describe(value.__code__, seen)
        closure = (cell.cell_contents for cell in value.__closure__ or ())
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items())
        yield from _describe((*_referred(value.__globals__, value.__code__.co_names), *closure, *defaults), seen)
    elif isinstance(value, partial):
        yield from _describe((value.func, *value.args, *value.keywords.items()), seen)
    elif isinstance(value, tuple):
        for part in value:
            yield from _describe(part, seen)
    elif isinstance(value, CodeType):
        yield value.co_code.hex()
        yield repr(value.co_names)
        for constant in value.co_consts:
            yield from _describe(constant, seen)
    else:  # a built-in function's repr has its address
        yield getattr(value, "__qualname__", None) or repr(value)


def _referred(namespace: Mapping[str, object], names: Sequence[str]) -> Iterator[object]:
    """What `names` stand for, also as attributes of the modules among them."""
    for name in names:
        value = namespace.get(name)
        if isinstance(value, ModuleType) and not _of_torch(value):
            yield value.__name__
            yield from _referred(vars(value), [other for other in names if other != name])
        else:
            yield value


def _of_torch(value: FunctionType | ModuleType) -> bool:
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return (name or "").partition(".")[0] == "torch"  # whose version is known


def _read(path: Path) -> Trace | None:
    try:
        content = json.loads(path.read_bytes())
        return Trace(**{name: _graph(content[name]) for name in ("forward", "factors", "backward")})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _graph(content: dict) -> Graph:
    nodes = [Node(node["op"], tuple(node["args"]), node["value"]) for node in content["nodes"]]
    return Graph(nodes, content["outputs"], {node: index for index, node in enumerate(nodes)})


def _computes_the_step(graphs: Trace, cell: Cell) -> bool:
    generator, sizes = torch.Generator().manual_seed(0), torch.linspace(0.5, 30, 256, dtype=torch.float64)

    def randn(count: int) -> list[Tensor]:
        return list(torch.randn(count, 256, generator=generator, dtype=torch.float64) * sizes)

    values, d_new = [x.requires_grad_() for x in randn(len(cell.gates) + len(cell.states))], randn(len(cell.states))
    copies = [x.clone() for x in values]  # a step may work in place
    new = cell.update(copies[: len(cell.gates)], copies[len(cell.gates) :])
    # One number that depends on every value: for anything else, autograd imports what takes as long as tracing.
    total = sum((n * d).sum() for n, d in zip(new, d_new, strict=True)) + 0.0 * sum(v.sum() for v in values)
    gradients = torch.autograd.grad(total, values)
    names, states = (*cell.gates, *cell.states), [f"new_{state}" for state in cell.states]
    cotangents = [f"d_new_{state}" for state in cell.states]
    found = torch_function(graphs.forward, names, states)(*values)
    factors = torch_function(graphs.factors, names, list(graphs.factors.outputs))(*values)
    backward = torch_function(graphs.backward, (*graphs.factors.outputs, *cotangents), [f"d_{name}" for name in names])
    found += backward(*factors, *d_new)
    return all(
        torch.allclose(torch.as_tensor(ours, dtype=torch.float64).expand(256), theirs, equal_nan=True)
        for ours, theirs in zip(found, (*new, *gradients), strict=True)
    )
