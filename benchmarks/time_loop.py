"""A time loop over a cell in PyTorch with autograd, the alternative to a kernel."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.cases import TRAINING, Case, Job
from benchmarks.timing import Effort, measure, random_inputs
from flashrnn import Cell, get_cell

_LONGEST_UNROLLED = 64  # time steps; each of them is compiled, or captured, separately


def supports(case: Case) -> bool:
    cell = get_cell(case.function)
    return cell.gates == cell.input_gates == cell.recurrent_gates


def supports_unrolled(case: Case) -> bool:
    return supports(case) and case.T <= _LONGEST_UNROLLED


Loop = Callable[..., Tensor]


def run(job: Job, effort: Effort, prepare: Callable[[Loop, list[Tensor]], Loop] = lambda loop, inputs: loop) -> dict:
    """Measure the time loop after `prepare` has compiled or captured it for these inputs."""
    case, training = job.case, job.mode == TRAINING
    inputs = [x.requires_grad_(training) for x in random_inputs(case.shapes(), getattr(torch, case.dtype))]
    loop = prepare(partial(time_loop, get_cell(case.function)), inputs)
    return measure(lambda: loop(*inputs), inputs, training, effort)


def compiled(loop: Loop, inputs: list[Tensor]) -> Loop:
    torch.compiler.reset()  # otherwise PyTorch would stop compiling after a few cases
    return torch.compile(loop, fullgraph=True, dynamic=False)


def graphed(loop: Loop, inputs: list[Tensor]) -> Loop:
    """Return the loop as a CUDA graph, with a second one for the backward pass if the inputs require gradients."""
    return torch.cuda.make_graphed_callables(loop, tuple(inputs))


def time_loop(cell: Cell, Wx: Tensor, R: Tensor, b: Tensor) -> Tensor:
    """Return h [B, T, N, D] of a cell whose gates all have an input and a recurrent part, with one product per step."""
    B, _, G, N, D = Wx.shape
    inputs = (Wx + b).permute(1, 3, 0, 2, 4).flatten(3)  # [T, N, B, G*D]
    weight = R.permute(1, 3, 0, 2).flatten(2)  # [N, D, G*D]
    states, h = [Wx.new_zeros(N, B, D)] * len(cell.states), []
    for x in inputs.unbind():
        gates = torch.baddbmm(x, states[0], weight).unflatten(-1, (G, D)).unbind(-2)
        states = cell.update(gates, states)
        h.append(states[0])
    return torch.stack(h).permute(2, 0, 1, 3)
