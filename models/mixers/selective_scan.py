"""The recurrence of Mamba, per channel: h_t = exp(step_t A) h_{t-1} + step_t u_t B_t and y_t = C_t h_t."""

from typing import Any

import torch
from mambapy.pscan import pscan
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE = 1024  # channels times states per Triton program


def selective_scan(
    u: Tensor, step: Tensor, A: Tensor, B: Tensor, C: Tensor, first: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return y [batch, T, channels] and the last h [batch, channels, states], both float32.

    On a GPU this runs one Triton kernel in each direction, with support for torch.func.vmap; elsewhere mambapy's scan.

    Args:
        u: inputs, [batch, T, channels].
        step: positive step sizes of the inputs, [batch, T, channels].
        A: negative decay rates, [channels, states].
        B: input weights, [batch, T, states].
        C: output weights, [batch, T, states].
        first: h before the first step, [batch, channels, states]; None means zeros.
        reset: bool [batch, T], True where h is set to zero before the step, or None.
    """
    u, step, A, B, C = (x.float() for x in (u, step, A, B, C))
    first = u.new_zeros(len(u), *A.shape) if first is None else first.float()
    goes_on = u.new_ones(u.shape[:2]) if reset is None else (~reset).float()
    if u.is_cuda:
        y, last, _ = SelectiveScan.apply(u, step, A[None], B, C, first, goes_on, torch.is_grad_enabled())
        return y, last
    decay = torch.exp(step[..., None] * A) * goes_on[..., None, None]  # [batch, T, channels, states]
    added = (step * u)[..., None] * B[:, :, None]
    begun = added[:, :1] + decay[:, :1] * first[:, None]
    h = pscan(decay, torch.cat((begun, added[:, 1:]), dim=1))
    return (h @ C[..., None]).squeeze(-1), h[:, -1]


class SelectiveScan(torch.autograd.Function):
    """The Triton kernels as an autograd function; the batch may hold rows of several models, A [models, ...] each."""

    @staticmethod
    def forward(
        u: Tensor, step: Tensor, A: Tensor, B: Tensor, C: Tensor, first: Tensor, goes_on: Tensor, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return y, the last h and, with `keep`, h after every step for the backward pass."""
        from .selective_scan_kernels import forward

        u, step, A, B, C, first, goes_on = (x.contiguous() for x in (u, step, A, B, C, first, goes_on))
        rows, T, channels = u.shape
        y, last = torch.empty_like(u), torch.empty_like(first)
        kept = first.new_empty(rows, T if keep else 0, *first.shape[1:])
        block = _block(A)
        grid = (rows, -(-channels // block))
        sizes = (T, channels, A.shape[2], rows // len(A))
        forward[grid](u, step, A, B, C, first, goes_on, y, last, kept, *sizes, block, _padded(A), keep)
        return y, last, kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*inputs[:7], output[2])
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor, d_last: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        from .selective_scan_kernels import backward

        u, step, A, B, C, first, goes_on, kept = (x.contiguous() for x in ctx.saved_tensors)
        rows, T, channels = u.shape
        block = _block(A)
        blocks = -(-channels // block)
        d_u, d_step, d_first = torch.empty_like(u), torch.empty_like(step), torch.empty_like(first)
        d_A = torch.empty_like(first)  # one for every row, added up below
        d_B, d_C = (torch.empty(blocks, *B.shape, device=B.device) for _ in range(2))  # one for every block of channels
        read = (u, step, A, B, C, first, goes_on, kept, d_y.contiguous(), d_last.contiguous())
        written = (d_u, d_step, d_A, d_B, d_C, d_first)
        sizes = (T, channels, A.shape[2], rows // len(A))
        backward[(rows, blocks)](*read, *written, *sizes, block, _padded(A))
        return d_u, d_step, d_A.unflatten(0, (len(A), -1)).sum(1), d_B.sum(0), d_C.sum(0), d_first, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Run all models in one call, with their rows as one batch."""

        def folded(x: Tensor, dim: int | None) -> Tensor:
            x = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.flatten(0, 1)

        tensors = (folded(x, dim) for x, dim in zip(inputs[:7], in_dims[:7], strict=True))
        found = SelectiveScan.apply(*tensors, inputs[7])
        return tuple(x.unflatten(0, (info.batch_size, -1)) for x in found), (0, 0, 0)


def _padded(A: Tensor) -> int:
    """Return the number of states rounded up to a power of two, as Triton needs it."""
    return 1 << (A.shape[2] - 1).bit_length()


def _block(A: Tensor) -> int:
    """Return the number of channels per program."""
    return max(1, TILE // _padded(A))
