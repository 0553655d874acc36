"""Backend `cuda_fused`: the whole time loop in one kernel, R on the chip."""

from functools import cache

import torch
from torch import Tensor

from flashrnn.cells import Cell
from flashrnn.cuda import tiling
from flashrnn.cuda.available import unavailable
from flashrnn.cuda.kernel import compile_best
from flashrnn.cuda.launch import LoadedKernel, load
from flashrnn.cuda.source import Variant
from flashrnn.gpu import device_gpu
from flashrnn.problem import Gradients, Inputs, Problem, States, as_rows, empty_aux, rows_like
from flashrnn.products import gate_views, outer_products, previous_h, recurrent_only, recurrent_sums, row_strides


class CudaFused:
    name = "cuda_fused"

    def supports(self, problem: Problem) -> str | None:
        if reason := unavailable(problem, (torch.bfloat16, torch.float16)):
            return reason
        if problem.head_dim % 2:
            return f"head sizes must be even, got {problem.head_dim}"
        gpu = device_gpu(problem.device.index or 0)
        for direction in ("forward", "backward") if problem.training else ("forward",):
            reason = tiling.infeasible(direction, problem.cell, problem.heads, problem.head_dim, gpu)
            if reason:
                return f"{direction} does not fit on the chip: {reason}"
        return None

    def forward(self, cell: Cell, inputs: Inputs, all_states: bool) -> States:
        Wx, R, b, states, reset = inputs
        B, T, _, N, D = Wx.shape
        Wx = _aligned(as_rows(Wx, Wx))
        variant = Variant(reset=reset is not None, all_states=all_states and len(cell.states) > 1, d_aux=False)
        h, aux, last = rows_like(Wx, N, D), empty_aux(cell, Wx, all_states), torch.empty_like(states)
        kernel, tiles = _kernel("forward", cell, D, N, B, Wx.dtype, variant, Wx.device.index)
        arguments = (Wx, R.contiguous(), b.contiguous(), states.contiguous(), _contiguous(reset), h, aux, last)
        kernel(tiles * N, *arguments, B, T, *row_strides(Wx))
        return States(h, aux, last)

    def backward(self, cell: Cell, inputs: Inputs, h: Tensor, aux: Tensor, grads: States) -> Gradients:
        Wx, R, b, states, reset = inputs
        B, T, _, N, D = Wx.shape
        Wx = _aligned(as_rows(Wx, Wx))
        variant = Variant(reset=reset is not None, all_states=True, d_aux=grads.aux is not None)
        kernel, tiles = _kernel("backward", cell, D, N, B, Wx.dtype, variant, Wx.device.index)
        h_before = previous_h(h, states[0], reset)
        d_Wx, d_u = rows_like(Wx, *Wx.shape[2:]), rows_like(Wx, len(recurrent_only(cell)), N, D)
        gradients = gate_views(cell, d_Wx, d_u)
        recurrent_sums(gradients, R, h_before)
        d_h = rows_like(Wx, N, D).zero_() if grads.h is None else _aligned(as_rows(grads.h, Wx))
        d_b, d_states = b.new_empty(tiles, *b.shape), torch.empty_like(states)
        known = (Wx, R.contiguous(), b.contiguous(), states.contiguous(), _contiguous(reset), h, aux, d_h)
        d_aux = None if grads.aux is None else torch.empty_like(aux).copy_(grads.aux)
        more = (d_aux, _contiguous(grads.last), d_Wx, d_u, d_b, d_states)
        kernel(tiles * N, *known, *more, B, T, *row_strides(Wx))
        return Gradients(d_Wx, outer_products(gradients, h_before), d_b.sum(0), d_states)


@cache
def _kernel(
    direction: str, cell: Cell, D: int, N: int, B: int, dtype: torch.dtype, variant: Variant, device: int
) -> tuple[LoadedKernel, int]:
    """The kernel for a problem, and its number of batch tiles."""
    binary, choice = compile_best(direction, cell, N, D, B, dtype, variant, device_gpu(device))
    shared = tiling.shared_bytes(direction, cell, choice)
    return load(binary, device, choice.threads, shared, choice.cluster), -(-B // (8 * choice.batch_tiles))


def _aligned(x: Tensor) -> Tensor:
    """x where asynchronous copies of 16 bytes can start from."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
