"""The output layer and its cross-entropy in chunks, so that the logits of a whole batch are never stored."""

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORE = -100  # label of a position that is not scored
CHUNK = 2**28  # logits per chunk: half a GB in bfloat16
HALF_ROWS = 2**12  # largest number of rows per chunk in float16: a sum of more gradients may overflow
ALIGNMENT = 64  # in half precision, rows are padded to whole cache lines, which tensor cores read at full speed


def linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy of the logits x weight^T and, for each row, whether its largest logit is correct.

    Logits are computed in chunks of rows in the dtype of autocast, everything else in float32 (float64 for float64).
    Gradients are computed together with the loss, so that each chunk is computed only once. Besides x, weight and their
    gradients, this needs memory for a few times CHUNK logits, instead of M V logits in half precision and twice M V in
    float32. When compiled, it needs CHUNK logits and their gradients in the dtype of autocast, and V d numbers per
    chunk for the gradient of weight.

    In half precision, V is padded to a multiple of 64, because rows of 50,257 logits (GPT-2) are not aligned for tensor
    cores. torch.nn.functional.linear_cross_entropy (PyTorch 2.13) does not pad, does not return the second result, and
    is not fused by torch.compile.

    Args:
        x: [M, d].
        weight: [V, d], the weight of the output layer.
        labels: int64 [M], from 0 to V - 1, or IGNORE for rows that are not scored.

    Returns:
        The loss, a scalar (NaN if no row is scored), and bool [M], True where the largest logit is that of the label.
        The loss is float32, or float64 for float64 inputs.
    """
    x = x.to(_dtype_of_products(x))
    with_gradient = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    total, right = _LinearCrossEntropy.apply(x, weight, labels, with_gradient)
    return total / (labels != IGNORE).sum(), right


def _dtype_of_products(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products with x: its own, or that of autocast, which does not apply to float64."""
    device = x.device.type
    if x.dtype == torch.float64 or x.is_meta or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


class _LinearCrossEntropy(torch.autograd.Function):
    """Return the summed loss and the correct rows; with `with_gradient`, also compute the gradients of the sum."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, labels: Tensor, with_gradient: bool) -> tuple[Tensor, Tensor]:
        V = weight.shape[0]
        exact = torch.promote_types(x.dtype, torch.float32)
        padding = -V % ALIGNMENT if x.dtype.itemsize == 2 else 0
        padded = F.pad(weight.to(x.dtype), (0, 0, 0, padding))
        total = torch.zeros((), dtype=exact, device=x.device)
        right, d_x, d_weight = [], [], torch.zeros_like(weight, dtype=exact) if with_gradient else None
        rows = _rows_of_a_chunk(x.shape[0], V)
        if x.dtype == torch.float16:
            rows = min(rows, HALF_ROWS)
        for part, of_part in zip(x.split(rows), labels.split(rows), strict=True):
            logits = part @ padded.T  # [rows, V + padding]
            losses, answers, d_logits = _cross_entropy(logits, of_part, V, exact, with_gradient)
            total = total + losses.sum()
            right.append(answers)
            if with_gradient:
                d_x.append(d_logits @ padded)
                d_weight += (d_logits.T @ part)[:V]
        right = torch.cat(right)
        ctx.mark_non_differentiable(right)
        if with_gradient:
            ctx.save_for_backward(torch.cat(d_x), d_weight)
            ctx.weight_dtype = weight.dtype
        return total, right

    @staticmethod
    def backward(ctx, d_total: Tensor, _) -> tuple[Tensor | None, ...]:
        d_x, d_weight = ctx.saved_tensors
        # In the dtype of d_total: rounding the factor to half precision would add the same error to all rows.
        return (d_x.to(d_total.dtype) * d_total).to(d_x.dtype), (d_weight * d_total).to(ctx.weight_dtype), None, None


def _rows_of_a_chunk(M: int, V: int) -> int:
    """Return the number of rows per chunk, such that chunks are equal and consist of whole matrix product tiles."""
    chunks = -(-M * V // CHUNK)
    return -(-M // chunks // ALIGNMENT) * ALIGNMENT


def _cross_entropy(
    logits: Tensor, labels: Tensor, V: int, exact: torch.dtype, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the losses [rows], the correct rows [rows], and the gradient of the losses with respect to `logits`.

    `logits` and the gradient are [rows, V + padding].
    """
    scored = labels != IGNORE
    index = labels.where(scored, 0)[:, None]
    values = logits[:, :V].to(exact)
    largest, answers = values.max(dim=-1, keepdim=True)
    log_sum = (values - largest).exp().sum(dim=-1, keepdim=True).log() + largest
    of_label = values.gather(1, index)
    losses = (log_sum - of_label).squeeze(1) * scored
    right = answers.squeeze(1) == labels
    if not with_gradient:
        return losses, right, None
    d_logits = (values - log_sum).exp() * scored[:, None]
    d_logits = F.pad(d_logits, (0, logits.shape[1] - V)).to(logits.dtype)
    # The gradient at the label is softmax - 1. Only there is 1 subtracted, before rounding, so that all other elements
    # are computed in a single pass over the chunk.
    at_label = ((of_label - log_sum).exp() - 1) * scored[:, None]
    return losses, right, d_logits.scatter_(1, index, at_label.to(logits.dtype))
