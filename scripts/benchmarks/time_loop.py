"""A cell stepped through time in PyTorch, with autograd: what there is without a kernel."""

import torch
from torch import Tensor

from flashrnn import Cell, get_cell
from scripts.benchmarks.cases import TRAINING, Case, Job
from scripts.benchmarks.timing import Effort, measure, random_inputs

_LONGEST_COMPILED = 64  # steps: PyTorch compiles each of them by itself


def supports(case: Case) -> bool:
    cell = get_cell(case.function)
    return cell.gates == cell.input_gates == cell.recurrent_gates


def supports_compiled(case: Case) -> bool:
    return supports(case) and case.T <= _LONGEST_COMPILED


def run(job: Job, effort: Effort, compiled: bool = False) -> dict:
    case = job.case
    inputs, loop = random_inputs(case.shapes(), getattr(torch, case.dtype)), time_loop
    if compiled:
        torch.compiler.reset()  # after a few cases PyTorch compiles no more
        loop = torch.compile(time_loop, fullgraph=True, dynamic=False)
    cell = get_cell(case.function)
    return measure(lambda: loop(cell, *inputs), inputs, job.mode == TRAINING, effort)


def time_loop(cell: Cell, Wx: Tensor, R: Tensor, b: Tensor) -> Tensor:
    """h [B, T, N, D] of a cell whose gates all have both parts: one product per step, all that is constant outside."""
    B, _, G, N, D = Wx.shape
    inputs = (Wx + b).permute(1, 3, 0, 2, 4).flatten(3)  # [T, N, B, G*D]
    weight = R.permute(1, 3, 0, 2).flatten(2)  # [N, D, G*D]
    states, h = [Wx.new_zeros(N, B, D)] * len(cell.states), []
    for x in inputs.unbind():
        gates = torch.baddbmm(x, states[0], weight).unflatten(-1, (G, D)).unbind(-2)
        states = cell.update(gates, states)
        h.append(states[0])
    return torch.stack(h).permute(2, 0, 1, 3)
