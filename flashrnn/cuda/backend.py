"""Backend `cuda_fused`: the whole time loop in one kernel, R on the chip."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from flashrnn.cells import Cell
from flashrnn.cuda import tiling
from flashrnn.cuda.kernel import compile_best
from flashrnn.cuda.launch import LoadedKernel, load
from flashrnn.cuda.source import Variant
from flashrnn.gpu import device_gpu
from flashrnn.problem import Gradients, Inputs, Problem, States, as_rows, empty_aux, rows_like
from flashrnn.products import gate_views, outer_products, previous_h, recurrent_only, recurrent_sums, row_strides
from flashrnn.trace import UntraceableCell, trace


class CudaFused:
    name = "cuda_fused"

    def supports(self, problem: Problem) -> str | None:
        if problem.device.type != "cuda":
            return f"it runs on CUDA GPUs, not on {problem.device.type}"
        if torch.version.hip:
            return "it needs an NVIDIA GPU"
        if problem.head_dim % 2:
            return f"head sizes must be even, got {problem.head_dim}"
        if problem.dtype not in (torch.bfloat16, torch.float16):
            return f"it computes in bfloat16 and float16, not in {problem.dtype}"
        if not (_installed("cuda.core") and _installed("cuda.bindings")):
            return "cuda-core is not installed: pip install 'flashrnn-lm[cuda]'"
        gpu = device_gpu(problem.device.index or 0)
        if gpu.capability < (8, 0):
            return f"it needs compute capability 8.0, {gpu.name} has {'.'.join(map(str, gpu.capability))}"
        try:
            trace(problem.cell)
        except UntraceableCell as error:
            return str(error)
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


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False


def _aligned(x: Tensor) -> Tensor:
    """x where asynchronous copies of 16 bytes can start from."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
