"""Memory formats of tensors [B, T, ...]: batch-major, or time-major with batch and time swapped in memory."""

import torch
from torch import Tensor


def is_time_major(x: Tensor) -> bool:
    """Return whether x [B, T, ...] has time outermost in memory."""
    return not x.is_contiguous() and x.shape[0] > 1 and x.stride(0) < x.stride(1)


def batch_time_strides(x: Tensor) -> tuple[int, int]:
    """Return the strides of batch and time of x [B, T, ...], in rows: a row is one step of one sequence."""
    B, T = x.shape[:2]
    return (1, B) if is_time_major(x) else (T, 1)


def empty_in_format(like: Tensor, *inner: int, steps: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor [B, steps, *inner] in the memory format of `like` [B, T, ...].

    The defaults are T steps and the dtype of `like`.
    """
    B, T = like.shape[:2]
    T = T if steps is None else steps
    if is_time_major(like):
        return like.new_empty(T, B, *inner, dtype=dtype).transpose(0, 1)
    return like.new_empty(B, T, *inner, dtype=dtype)


def in_format(x: Tensor, like: Tensor) -> Tensor:
    """Return x [B, T, ...], dense and in the memory format of `like`; x itself if it already is."""
    return _dense(x, 0, is_time_major(like))


def aux_in_format(aux: Tensor, like: Tensor) -> Tensor:
    """Return aux [S-1, B, T, ...] with each of its states as `in_format` returns it."""
    return _dense(aux, 1, is_time_major(like))


def _dense(x: Tensor, batch: int, time_major: bool) -> Tensor:
    """Return x, whose axes `batch` and `batch` + 1 are batch and time, dense in a memory format."""
    if not time_major:
        return x.contiguous()
    rows = x.transpose(batch, batch + 1)
    return x if rows.is_contiguous() else rows.contiguous().transpose(batch, batch + 1)


def aligned(x: Tensor) -> Tensor:
    """Return x, or a copy if its address is not a multiple of 16 bytes."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def contiguous(x: Tensor | None) -> Tensor | None:
    """Return x in PyTorch's contiguous format; None for None."""
    return None if x is None else x.contiguous()
