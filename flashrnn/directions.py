"""Both directions of a bidirectional layer, run as one recurrence with twice the heads on a GPU.

With a small batch, one direction leaves multiprocessors idle. Two kernels on two streams would not use them either,
because tilings are chosen for a kernel that has the GPU to itself.

`cuda_layer` runs most of these layers. `at_once` runs packed sequences, whose directions begin at different steps, and
calls under autocast.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from flashrnn._torch_private import autograd_alone
from flashrnn.cuda.resident import solver
from flashrnn.cuda.resident.backend import CudaFused
from flashrnn.cuda.spec import KernelSpec, Variant
from flashrnn.dispatch import no_autocast
from flashrnn.eager import as_dtype
from flashrnn.functional import dtype_under_autocast, flashrnn
from flashrnn.layer_weights import without_hooks
from flashrnn.problem import Problem, tf32_allowed
from flashrnn.sequences import SideBySide, Whole

_WORTH = 0.9  # largest time relative to both directions in turn: copies around a joint call take up to a tenth of it


def at_once(
    network: nn.Module, layer: int, x: Tensor, states: list[Tensor] | None, rows: Whole | SideBySide
) -> tuple[list[Tensor], list[Tensor]] | None:
    """Run both directions of a layer in one call.

    Args:
        network: a bidirectional FlashRNN.
        layer: the number of the layer.
        x: the layer's input, as `rows` takes it.
        states: the initial states of each direction, or None.
        rows: the layout of the sequences.

    Returns:
        The outputs of both directions in the layout of x, and their last states. None if this is not supported, or not
        faster than one direction after the other.
    """
    modules = [
        (network._modules[f"input_l{layer}{suffix}"], network._modules[f"recurrent_l{layer}{suffix}"])
        for suffix in ("", "_reverse")
    ]
    if not autograd_alone() or not rows.alike or rows.all_states:
        return None
    backend, *others = {recurrent.backend for _, recurrent in modules}
    if others or not all(without_hooks(*of_direction) for of_direction in modules):
        return None
    cell, N = network.cell, network.num_heads
    reset, dtype = rows.resets(backward=False), dtype_under_autocast(x)
    if not is_faster(problem(network, dtype, torch.is_grad_enabled(), reset is not None), rows.batch(x), backend):
        return None
    given = [rows.spread(x, backward) for backward in (False, True)]
    Wx = _products(given, [product.weight for product, _ in modules], len(cell.input_gates), dtype)
    Wx = Wx.unflatten(-1, (N, -1)).flatten(3, 4)
    R, b = (
        None if parameters[0] is None else torch.cat(parameters, dim=1)
        for parameters in zip(*((recurrent.R, recurrent.b) for _, recurrent in modules), strict=True)
    )
    initial = None if states is None else torch.cat(states, dim=2)
    h, last = flashrnn(Wx, R, b, initial, cell, backend, reset=reset)
    outputs = [rows.gather(part.flatten(-2), bool(way)) for way, part in enumerate(h.split(N, dim=2))]
    return outputs, [rows.ends(h, end, (), bool(way)) for way, end in enumerate(last.split(N, dim=2))]


def _products(given: Sequence[Tensor], weights: Sequence[Tensor], gates: int, dtype: torch.dtype) -> Tensor:
    """Return the input products [B, T, gates, 2, H] of both directions, in the memory format of the inputs."""
    if given[0].is_contiguous():
        return _Products.apply(gates, dtype, *given, *weights)
    return _Products.apply(gates, dtype, *(x.transpose(0, 1) for x in given), *weights).transpose(0, 1)


class _Products(torch.autograd.Function):
    """The input products of both directions, written directly in the layout that the recurrence reads.

    A separate copy would take as long as the products.
    """

    @staticmethod
    def forward(ctx, gates, dtype, *given):
        ctx.gates, ctx.dtype = gates, dtype
        ctx.save_for_backward(*given)
        with no_autocast(given[0]):
            xs, matrices = _as_products(gates, dtype, *given)
            Wx = xs[0].new_empty(xs[0].shape[0], gates, 2, matrices[0].shape[1])
            for way, (x, W) in enumerate(zip(xs, matrices, strict=True)):
                torch.bmm(x.expand(gates, -1, -1), W.transpose(1, 2), out=Wx[:, :, way].transpose(0, 1))
        return Wx.view(*given[0].shape[:2], *Wx.shape[1:])

    @staticmethod
    def backward(ctx, d):
        given = ctx.saved_tensors
        d = d.contiguous().flatten(0, 1)
        gradients: list[Tensor | None] = [None] * 4
        with no_autocast(d):
            for way, (x, W) in enumerate(zip(*_as_products(ctx.gates, ctx.dtype, *given), strict=True)):
                d_way = d[:, :, way]
                if ctx.needs_input_grad[2 + way]:
                    d_x = torch.mm(d_way[:, 0], W[0])
                    for gate in range(1, ctx.gates):
                        d_x.addmm_(d_way[:, gate], W[gate])
                    gradients[way] = d_x.view(given[way].shape)
                if ctx.needs_input_grad[4 + way]:
                    d_W = torch.bmm(d_way.permute(1, 2, 0), x.expand(ctx.gates, -1, -1))
                    gradients[2 + way] = d_W.flatten(0, 1)
        return None, None, *gradients


def _as_products(gates: int, dtype: torch.dtype, *given: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return inputs [rows, features] and weights [gates, H, features] of both directions."""
    *xs, W, W_reverse = (as_dtype(x, dtype) for x in given)
    return [x.flatten(0, 1) for x in xs], [w.unflatten(0, (gates, -1)) for w in (W, W_reverse)]


def problem(network: nn.Module, dtype: torch.dtype, training: bool, reset: bool) -> Problem:
    """Return the problem of one direction of a layer."""
    device, (_, N, D, _) = network.recurrent_l0.R.device, network.recurrent_l0.R.shape
    return Problem(network.cell, N, D, dtype, device, training, reset, tf32=tf32_allowed(dtype, device))


def is_faster(problem: Problem, batch: int, backend: str) -> bool:
    """Return whether `cuda_fused` is expected to run both directions at once faster than one after the other.

    Args:
        problem: the problem of one direction.
        batch: number of sequences.
        backend: the backend that the user has requested.
    """
    if backend not in ("auto", CudaFused.name):
        return False
    one, both = (_cycles(problem._replace(heads=heads), batch) for heads in (problem.heads, 2 * problem.heads))
    return one is not None and both is not None and both < _WORTH * 2 * one


@lru_cache(maxsize=4096)
def _cycles(problem: Problem, batch: int) -> float | None:
    """Return the expected clock cycles of a time step of the whole batch; None if `cuda_fused` does not support it."""
    if problem.gpu is None or CudaFused().unsupported_reason(problem) is not None:
        return None
    sizes = problem.cell, problem.heads, problem.head_dim, batch, problem.dtype, problem.gpu
    specs = [KernelSpec(way, *sizes, Variant(tf32=problem.tf32)) for way in problem.directions]
    return sum(solver.cycles(spec, solver.best(spec)) for spec in specs)
