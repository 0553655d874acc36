"""Backend `cpu_fused`: the whole time loop of a head compiled for the CPU, its weights and gates in the caches."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from math import gcd

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
            return "numba is not installed: pip install 'flashrnn-lm[cpu]'"
        return untraceable(problem.cell)

    def forward(self, cell: Cell, inputs: Inputs, all_states: bool) -> States:
        Wx, R, b, states, reset = _dense(inputs)
        h, aux, last = rows_like(Wx, *Wx.shape[3:]), empty_aux(cell, Wx, all_states), torch.empty_like(states)
        tensors = (Wx, _columns(R.transpose(2, 3)), b, states, reset, h, aux, last)
        _run("forward", cell, Wx, lambda part: tensors, _parts(Wx), all_states)
        return States(h, aux, last)

    def backward(self, cell: Cell, inputs: Inputs, h: Tensor, aux: Tensor, grads: States) -> Gradients:
        Wx, R, b, states, reset = _dense(inputs)
        d_h = None if grads.h is None else as_rows(grads.h, Wx)
        d_aux = None if grads.aux is None else torch.empty_like(aux).copy_(grads.aux)
        d_states = torch.zeros_like(states) if grads.last is None else torch.empty_like(states).copy_(grads.last)
        parts, matrix, d_Wx = _parts(Wx), _columns(R), rows_like(Wx, *Wx.shape[2:])
        d_R, d_b = matrix.new_zeros(len(parts), *matrix.shape), b.new_zeros(len(parts), *b.shape)
        known = (Wx, _columns(R.transpose(2, 3)), matrix, b, states, reset, h, aux, d_h, d_aux, d_Wx)
        flags = d_h is not None, d_aux is not None
        _run("backward", cell, Wx, lambda part: (*known, d_R[part], d_b[part], d_states), parts, *flags)
        return Gradients(d_Wx, d_R.sum(0)[..., : R.shape[3]].contiguous(), d_b.sum(0), d_states)


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


def _parts(Wx: Tensor) -> list[tuple[int, int]]:
    """First sequence and end of each part of the batch: so many that the heads' parts keep all threads busy."""
    B, N, available = Wx.shape[0], Wx.shape[3], torch.get_num_threads()
    size = -(-B // (available // gcd(N, available)))
    size += size % 2  # sequences are worked on in pairs
    return [(first, min(first + size, B)) for first in range(0, B, size)]


def _run(
    direction: str,
    cell: Cell,
    Wx: Tensor,
    tensors: Callable[[int], Sequence[Tensor | None]],
    parts: list[tuple[int, int]],
    *flags: bool,
) -> None:
    """Runs the kernel on every head of every part of the batch; `tensors` gives its arguments for a part."""
    B, T, inputs, N, D = Wx.shape
    layout, dtype = build.layout(D), Wx.dtype
    loop, product = build.time_loop(direction, dtype), build.matrix_product(layout.width, dtype)
    step = build.cell_step(direction, cell, layout.stride, dtype)
    counts = (len(cell.gates), len(cell.states), inputs)
    sizes = torch.tensor([B, T, N, D, *row_strides(Wx), *layout, *counts])
    tables = [torch.tensor(places(cell, names)) for names in (cell.input_gates, cell.recurrent_gates)]
    buffers = (len(cell.gates), *(len(cell.states),) * (1 if direction == "forward" else 2))

    def task(part: int, head: int) -> None:
        room = (Wx.new_zeros(count * layout.stride) for count in buffers)  # zeros: no number is slow to work on
        used = (*tensors(part), *room, sizes, *tables)
        pointers = (None if x is None else x.data_ptr() for x in used)
        loop.call(*pointers, product.address, step.address, head, *parts[part], *flags)

    threads.run([partial(task, part, head) for part in range(len(parts)) for head in range(N)])
