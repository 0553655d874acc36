"""Zeros that kernels read, and that are filled once."""

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from flashrnn._torch_private import current_device, current_stream


def zeros(device: int, size: int) -> Tensor:
    """Return at least `size` zero bytes on a GPU, which kernels on PyTorch's current stream only read.

    They are cached for later calls. A CUDA graph that is being captured gets its own, which live as long as the graph.
    """
    if current_device() == device:
        return _zeros(device, size)
    with torch.cuda.device(device):
        return _zeros(device, size)


def _zeros(device: int, size: int) -> Tensor:
    if torch.cuda.is_current_stream_capturing():
        return _new_zeros(size)
    return _cached_zeros(device, current_stream(device), 1 << max(20, (size - 1).bit_length()))


def read_only_zeros(like: Tensor, *shape: int) -> Tensor:
    """Return zeros of this shape, with the dtype and device of `like`, which nobody may write to.

    On a GPU, this avoids a fill, which would take as long as a narrow copy.
    """
    if not like.is_cuda:
        return like.new_zeros(shape)
    size = prod(shape) * like.itemsize
    return zeros(like.device.index, size)[:size].view(like.dtype).view(shape)


@lru_cache(maxsize=16)
def _cached_zeros(device: int, stream: int, size: int) -> Tensor:
    """Return zeros from PyTorch's allocator for one stream, on which the next owner of the memory runs later.

    Another thread allocates them: this thread's allocations may go to the memory pool of a CUDA graph that it is about
    to capture, in which nothing may outlive the graph.
    """

    def fill(stream: torch.cuda.Stream) -> Tensor:
        with torch.cuda.stream(stream):
            return _new_zeros(size)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(fill, torch.cuda.current_stream(device)).result()


def _new_zeros(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device="cuda")
