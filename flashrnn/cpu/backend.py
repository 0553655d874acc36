"""Backend `cpu_fused`: the whole time loop of a head compiled for the CPU, its weights and gates in the caches."""

from functools import cache
from importlib.util import find_spec
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashrnn.cells import Cell
from flashrnn.cells.trace import not_element_wise
from flashrnn.cpu import build, threads
from flashrnn.memory_format import batch_time_strides, empty_in_format, in_format
from flashrnn.problem import Gradients, Inputs, Problem, StateGradients, States, aux_gradient, empty_aux, initial_states
from flashrnn.products import places
from flashrnn.residual import GateFormat, Residual, empty_gates

_LARGEST = 384  # head size; for larger ones R comes from the third cache, and PyTorch's products are as fast


class CpuFused:
    name = "cpu_fused"

    def gate_format(self, cell: Cell, head_dim: int, dtype: torch.dtype) -> GateFormat:
        return "NGD"

    def unsupported_reason(self, problem: Problem) -> str | None:
        if problem.device.type != "cpu":
            return f"it runs on CPUs, not on {problem.device.type}"
        if reason := problem.dtype_reason((torch.float32, torch.float64)):
            return reason
        if problem.head_dim > _LARGEST:
            return f"it serves head sizes up to {_LARGEST}, got {problem.head_dim}; larger ones are faster by vanilla"
        if not _installed():
            return "numba is not installed: pip install '.[cpu]' in a clone of flashrnn-lm"
        return not_element_wise(problem.cell)

    def forward(self, cell: Cell, inputs: Inputs, all_states: bool, training: bool) -> tuple[States, Tensor]:
        Wx, R, b, states, reset = inputs
        for direction in ("forward", "backward") if training else ("forward",):
            _kernel(direction, cell, Wx.shape[4], Wx.dtype)
        states = initial_states(cell, states, Wx)
        b = b.to(states.dtype)
        h = empty_in_format(Wx, *Wx.shape[3:])
        aux, gates = empty_aux(cell, Wx, all_states, training), empty_gates(cell, Wx, training, "NGD")
        given = {"x": in_format(Wx, Wx), "weights": columns(R.transpose(2, 3)), "b": b.contiguous()}
        last = torch.empty_like(states)
        _run("forward", cell, h, reset, initial=states, aux=aux, pre=gates, **given, last=last)
        return States(h, aux, last), gates

    def backward(self, cell: Cell, residual: Residual, grads: StateGradients) -> Gradients:
        R, states, reset, h, aux, *_ = residual
        states = initial_states(cell, states, h)
        given = {
            "R": columns(R),
            "d_h": None if grads.h is None else in_format(grads.h, h),
            "d_aux": aux_gradient(grads, aux, states.dtype),
        }
        d_states = torch.zeros_like(states) if grads.last is None else torch.empty_like(states).copy_(grads.last)
        (N, D), parts = h.shape[2:], _parts(h).count
        d_x, d_R = empty_in_format(h, len(cell.input_gates), N, D), h.new_zeros(parts, *given["R"].shape)
        d_b = h.new_zeros(parts, len(cell.gates), N, d_R.shape[-1])
        given |= {"initial": states, "aux": aux, "pre": residual.gates_in("NGD")}
        _run("backward", cell, h, reset, **given, d_x=d_x, d_R=d_R, d_b=d_b, one=h.new_ones(1), d_states=d_states)
        return Gradients(d_x, d_R.sum(0)[..., :D].contiguous(), d_b.sum(0)[..., :D].contiguous(), d_states)


@cache
def _installed() -> bool:
    return find_spec("numba") is not None


class _Kernel(NamedTuple):
    """The compiled parts of a kernel."""

    loop: build.Part
    multiply: build.Part
    cell: build.Part


@cache
def _kernel(direction: str, cell: Cell, head_dim: int, dtype: torch.dtype) -> _Kernel:
    layout = build.layout(head_dim)
    return _Kernel(
        build.time_loop(direction, dtype),
        build.matrix_product(layout.width, dtype),
        build.cell_step(direction, cell, layout.stride, dtype),
    )


def columns(R: Tensor) -> Tensor:
    """R [Gr, N, D, D] -> [Gr, N, D, width], filled with zeros to the width that is computed with."""
    return pad(R, (0, build.layout(R.shape[3]).width - R.shape[3])).contiguous()


class _Parts(NamedTuple):
    """How the batch is divided, so that the heads' parts keep all threads busy."""

    count: int
    size: int  # sequences in each, but for the last


def _parts(h: Tensor) -> _Parts:
    B, N, available = h.shape[0], h.shape[2], torch.get_num_threads()
    size = -(-B // (available // gcd(N, available)))
    size += size % 2  # sequences are worked on in pairs
    return _Parts(-(-B // size), size)


class Call(NamedTuple):
    """A kernel on every head of every part of a batch, with its arguments."""

    function: int
    data: threads.Data
    tasks: int
    fields: tuple[str, ...]  # what the words of the data are
    counters: Tensor  # zeros before the call

    def run(self) -> None:
        threads.run(self.function, self.data, self.tasks)


def _run(direction: str, cell: Cell, h: Tensor, reset: Tensor | None, **others: Tensor | None) -> None:
    prepared(direction, cell, h, reset, **others).run()


def prepared(direction: str, cell: Cell, h: Tensor, reset: Tensor | None, **others: Tensor | None) -> Call:
    """Return the call of a direction's kernel; `others` go by their names in the kernels."""
    B, T, N, D = h.shape
    reset = h.new_zeros(B, T, dtype=torch.bool) if reset is None else reset
    layout, kernel, parts = build.layout(D), _kernel(direction, cell, D, h.dtype), _parts(h)
    tasks = parts.count * N
    buffers = len(cell.gates) + len(cell.states) * (1 if direction == "forward" else 2)
    threads_with_room = min(tasks, torch.get_num_threads())
    arguments = {
        "counters": torch.zeros(2, dtype=torch.int64),
        "tasks": tasks,
        "part": parts.size,
        "room": h.new_zeros(threads_with_room, buffers * layout.stride),  # zeros: no number is slow to work on
        "room_size": buffers * layout.stride,
        **dict(zip(("batch", "steps", "heads", "D"), (B, T, N, D), strict=True)),
        **dict(zip(("batch_stride", "time_stride"), batch_time_strides(h), strict=True)),
        **layout._asdict(),
        "gates": len(cell.gates),
        "states": len(cell.states),
        "inputs": len(cell.input_gates),
        "matrices": len(cell.recurrent_gates),
        "input_of": torch.tensor(places(cell.gates, cell.input_gates)),
        "recurrent_of": torch.tensor(places(cell.gates, cell.recurrent_gates)),
        "multiply": kernel.multiply.address,
        "cell": kernel.cell.address,
        **{"reset": in_format(reset, h), "h": h},
        **others,
    }
    words = [_word(arguments[name]) for name in kernel.loop.module.FIELDS]
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    data = threads.Data(torch.tensor(words), tensors)
    return Call(kernel.loop.address, data, tasks, kernel.loop.module.FIELDS, arguments["counters"])


def _word(value: Tensor | int | None) -> int:
    """An address, or a number."""
    return 0 if value is None else value.data_ptr() if isinstance(value, Tensor) else int(value)
