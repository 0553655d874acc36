"""Backend `cpu_fused`: the whole time loop of a head compiled for the CPU, its weights and gates in the caches."""

from functools import cache
from importlib.util import find_spec
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashrnn.cells import Cell
from flashrnn.cpu import build, threads
from flashrnn.problem import Gradients, Inputs, Problem, States, as_rows, empty_aux, rows_like
from flashrnn.products import places, row_strides
from flashrnn.trace import untraceable

_LARGEST = 384  # head size; for larger ones R comes from the third cache, and PyTorch's products are as fast


class CpuFused:
    name = "cpu_fused"

    def supports(self, problem: Problem) -> str | None:
        if problem.device.type != "cpu":
            return f"it runs on CPUs, not on {problem.device.type}"
        if reason := problem.wrong_dtype((torch.float32, torch.float64)):
            return reason
        if problem.head_dim > _LARGEST:
            return f"it serves head sizes up to {_LARGEST}, got {problem.head_dim}; larger ones are faster by vanilla"
        if not _installed():
            return "numba is not installed: pip install '.[cpu]' in a clone of flashrnn-lm"
        return untraceable(problem.cell)

    def forward(self, cell: Cell, inputs: Inputs, all_states: bool) -> States:
        inputs = _dense(inputs)
        Wx, states = inputs.Wx, inputs.states
        h, aux, last = rows_like(Wx, *Wx.shape[3:]), empty_aux(cell, Wx, all_states), torch.empty_like(states)
        _run("forward", cell, inputs, h=h, aux=aux, last=last)
        return States(h, aux, last)

    def backward(self, cell: Cell, inputs: Inputs, h: Tensor, aux: Tensor, grads: States) -> Gradients:
        inputs = _dense(inputs)
        Wx, R, b, states, _ = inputs
        given = {
            "d_h": None if grads.h is None else as_rows(grads.h, Wx),
            "d_aux": None if grads.aux is None else torch.empty_like(aux).copy_(grads.aux),
        }
        d_states = torch.zeros_like(states) if grads.last is None else torch.empty_like(states).copy_(grads.last)
        parts, matrix, d_x = _parts(Wx), _columns(R), rows_like(Wx, *Wx.shape[2:])
        d_R, d_b = matrix.new_zeros(parts.count, *matrix.shape), b.new_zeros(parts.count, *b.shape)
        results = {"d_x": d_x, "d_R": d_R, "d_b": d_b, "d_states": d_states}
        _run("backward", cell, inputs, h=h, aux=aux, R=matrix, **given, **results)
        return Gradients(d_x, d_R.sum(0)[..., : R.shape[3]].contiguous(), d_b.sum(0), d_states)


@cache
def _installed() -> bool:
    return find_spec("numba") is not None


def _dense(inputs: Inputs) -> Inputs:
    """Inputs as the kernels read them: dense, and with a mask of resets in any case."""
    Wx, R, b, states, reset = inputs
    reset = Wx.new_zeros(Wx.shape[:2], dtype=torch.bool) if reset is None else reset
    return Inputs(as_rows(Wx, Wx), R, b.contiguous(), states.contiguous(), as_rows(reset, Wx))


def _columns(R: Tensor) -> Tensor:
    """R [Gr, N, D, D] -> [Gr, N, D, width], filled with zeros to the width that is computed with."""
    return pad(R, (0, build.layout(R.shape[3]).width - R.shape[3])).contiguous()


class _Parts(NamedTuple):
    """How the batch is divided, so that the heads' parts keep all threads busy."""

    count: int
    size: int  # sequences in each, but for the last


def _parts(Wx: Tensor) -> _Parts:
    B, N, available = Wx.shape[0], Wx.shape[3], torch.get_num_threads()
    size = -(-B // (available // gcd(N, available)))
    size += size % 2  # sequences are worked on in pairs
    return _Parts(-(-B // size), size)


def _run(direction: str, cell: Cell, inputs: Inputs, **others: Tensor | None) -> None:
    """Runs the kernel on every head of every part of the batch; `others` are the direction's own arguments."""
    Wx, R, b, states, reset = inputs
    B, T, _, N, D = Wx.shape
    layout, dtype, parts = build.layout(D), Wx.dtype, _parts(Wx)
    tasks = parts.count * N
    buffers = len(cell.gates) + len(cell.states) * (1 if direction == "forward" else 2)
    threads_with_room = min(tasks, torch.get_num_threads())
    arguments = {
        "counters": torch.zeros(2, dtype=torch.int64),
        "tasks": tasks,
        "part": parts.size,
        "room": Wx.new_zeros(threads_with_room, buffers * layout.stride),  # zeros: no number is slow to work on
        "room_size": buffers * layout.stride,
        **dict(zip(("batch", "steps", "heads", "D"), (B, T, N, D), strict=True)),
        **dict(zip(("batch_stride", "time_stride"), row_strides(Wx), strict=True)),
        **layout._asdict(),
        "gates": len(cell.gates),
        "states": len(cell.states),
        "inputs": len(cell.input_gates),
        "matrices": len(cell.recurrent_gates),
        "input_of": torch.tensor(places(cell, cell.input_gates)),
        "recurrent_of": torch.tensor(places(cell, cell.recurrent_gates)),
        "multiply": build.matrix_product(layout.width, dtype).address,
        "cell": build.cell_step(direction, cell, layout.stride, dtype).address,
        **{"x": Wx, "weights": _columns(R.transpose(2, 3)), "b": b, "initial": states, "reset": reset},
        **others,
    }
    loop = build.time_loop(direction, dtype)
    words = [_word(arguments[name]) for name in loop.module.FIELDS]
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    threads.run(loop.address, threads.Data(torch.tensor(words), tensors), tasks)


def _word(value: Tensor | int | None) -> int:
    """An address, or a number."""
    return 0 if value is None else value.data_ptr() if isinstance(value, Tensor) else int(value)
