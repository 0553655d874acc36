"""Backend `cuda`: any head size. The whole time loop in one kernel that reads R anew at every step.

Besides inputs and results a call takes room for R once more, in the order in which the kernel reads it, and in the
backward for h before every step.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashrnn.cells import Cell
from flashrnn.cuda.available import unavailable
from flashrnn.cuda.build import Binary, build
from flashrnn.cuda.launch import LoadedKernel, load
from flashrnn.cuda.source import Variant
from flashrnn.cuda.streaming_layout import Layout, best_layout, infeasible, layout_prelude, shared_bytes, without_input
from flashrnn.gpu import Gpu, device_gpu
from flashrnn.problem import Gradients, Inputs, Problem, States, as_rows, contiguous, empty_aux, rows_like
from flashrnn.products import gate_views, outer_products, previous_h, recurrent_sums, row_strides, whole


class CudaStreaming:
    name = "cuda"

    def supports(self, problem: Problem) -> str | None:
        if reason := unavailable(problem, (torch.bfloat16, torch.float16, torch.float32)):
            return reason
        for direction in problem.directions:
            if reason := infeasible(direction, problem.cell, problem.head_dim, problem.dtype, problem.gpu):
                return f"{direction} does not fit: {reason}"
        return None

    def forward(self, cell: Cell, inputs: Inputs, all_states: bool, training: bool) -> States:
        Wx, R, b, states, reset = inputs
        B, T, _, N, D = Wx.shape
        Wx = as_rows(Wx, Wx)
        variant = Variant(
            reset=reset is not None, all_states=all_states and len(cell.states) > 1, gates=training, d_aux=False
        )
        kernel, layout = _kernel("forward", cell, N, D, B, Wx.dtype, variant, Wx.device.index)
        h, aux = rows_like(Wx, N, D), empty_aux(cell, Wx, all_states)
        state = states.clone(memory_format=torch.contiguous_format)
        matrix, exchange, counters = in_order(R.transpose(0, 1), layout), _exchange(layout, Wx), _counters(layout, Wx)
        exchange[0, :, :, :D] = states[0].transpose(0, 1)
        arguments = (Wx, matrix, b.contiguous(), contiguous(reset), exchange, counters, h, aux, state)
        kernel(_blocks(kernel, layout, Wx), *arguments, B, T, *row_strides(Wx))
        return States(h, aux, state)

    def backward(self, cell: Cell, inputs: Inputs, h: Tensor, aux: Tensor, grads: States) -> Gradients:
        Wx, R, b, states, reset = inputs
        B, T, _, N, D = Wx.shape
        Wx = as_rows(Wx, Wx)
        variant = Variant(reset=reset is not None, all_states=True, gates=True, d_aux=grads.aux is not None)
        kernel, layout = _kernel("backward", cell, N, D, B, Wx.dtype, variant, Wx.device.index)
        h_before = previous_h(h, states[0], reset)
        d_Wx, d_u = rows_like(Wx, *Wx.shape[2:]), rows_like(Wx, len(without_input(cell)), N, D)
        gradients = gate_views(cell, d_Wx, d_u)
        recurrent_sums(gradients, R, whole(h_before))
        d_h = None if grads.h is None else as_rows(grads.h, Wx)
        d_aux = None if grads.aux is None else torch.empty_like(aux).copy_(grads.aux)
        d_state = torch.zeros_like(states, memory_format=torch.contiguous_format)
        if grads.last is not None:
            d_state.copy_(grads.last)
        matrix = in_order(R.permute(1, 3, 0, 2).flatten(2)[:, None], layout)
        read = (Wx, matrix, b.contiguous(), contiguous(reset), _exchange(layout, Wx), _counters(layout, Wx))
        read += (states.contiguous(), h_before, aux, d_h, d_aux)
        kernel(_blocks(kernel, layout, Wx), *read, d_Wx, d_u, d_state, B, T, *row_strides(Wx))
        return Gradients(
            d_Wx, outer_products(gradients, whole(h_before)), _bias_gradient(cell, d_Wx, d_u, b.dtype), d_state
        )


@cache
def _kernel(
    direction: str, cell: Cell, heads: int, head_dim: int, batch: int, dtype: torch.dtype, variant: Variant, device: int
) -> tuple[LoadedKernel, Layout]:
    binary, layout = compile_kernel(direction, cell, heads, head_dim, batch, dtype, variant, device_gpu(device))
    return load(binary, device, layout.threads, shared_bytes(direction, cell, layout), 1, True), layout


def compile_kernel(
    direction: str, cell: Cell, heads: int, head_dim: int, batch: int, dtype: torch.dtype, variant: Variant, gpu: Gpu
) -> tuple[Binary, Layout]:
    """The kernel of that direction ("forward" or "backward") and its layout; needs no GPU."""
    layout = best_layout(direction, cell, heads, head_dim, batch, dtype, gpu)
    source = layout_prelude(direction, cell, heads, head_dim, dtype, variant, layout)
    return build(source, f"stream_{direction}.cuh", f"flashrnn_stream_{direction}", gpu.arch), layout


def in_order(rows: Tensor, layout: Layout) -> Tensor:
    """[N, rows per unit, D, K] -> [N, unit blocks, vectors, rows of a block, numbers in a vector], zeros for padding.

    A warp that multiplies by a vector of every row reads consecutive memory.
    """
    N, _, D, K = rows.shape
    blocks, length = layout.unit_blocks(D), layout.padded(rows.dtype)
    padded = pad(rows, (0, length - K, 0, blocks * layout.units - D))
    tiles = padded.view(N, -1, blocks, layout.units, layout.vectors, length // layout.vectors)
    return tiles.permute(0, 2, 4, 1, 3, 5).contiguous()


def _exchange(layout: Layout, Wx: Tensor) -> Tensor:
    """Two buffers of the vectors that a step multiplies: [2, N, B, length], zeros."""
    return Wx.new_zeros(2, Wx.shape[3], Wx.shape[0], layout.padded(Wx.dtype))


def _counters(layout: Layout, Wx: Tensor) -> Tensor:
    """Zeros, one for every group at the beginning of a cache line."""
    return Wx.new_zeros(layout.groups(Wx.shape[3], Wx.shape[0]), 32, dtype=torch.int32)


def _blocks(kernel: LoadedKernel, layout: Layout, Wx: Tensor) -> int:
    """One for every item, as far as they can run at the same time, because they wait for each other."""
    B, _, _, N, D = Wx.shape
    return min(layout.groups(N, B) * layout.unit_blocks(D), kernel.at_once)


def _bias_gradient(cell: Cell, d_Wx: Tensor, d_u: Tensor, dtype: torch.dtype) -> Tensor:
    """d_b [G, N, D]: the sums of the gates' gradients over sequences and steps."""
    sums = torch.cat([d_gates.sum((0, 1), dtype=dtype) for d_gates in (d_Wx, d_u)])
    names = cell.input_gates + without_input(cell)
    return torch.stack([sums[names.index(gate)] for gate in cell.gates])
