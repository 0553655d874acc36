"""Runs a compiled function on as many threads as PyTorch would use: on PyTorch's own, where they can be had.

The threads of PyTorch's OpenMP spin for a while after each of its operations, so that they begin the next one at once;
other threads would have to wait for their cores.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import CFUNCTYPE, c_void_p
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from flashrnn._torch_private import openmp_parallel
from flashrnn.forking import after_fork_in_child

_Function = CFUNCTYPE(None, c_void_p)


class Data(NamedTuple):
    """What a function is given: the address of `words`."""

    words: Tensor  # int64
    tensors: Sequence[Tensor]  # whose addresses are among the words: they live as long as a thread may use them


def run(function: int, data: Data, tasks: int) -> None:
    """Calls the C function at address `function` in torch.get_num_threads() threads at once, of which the caller's is
    one; those that `tasks` leaves idle may be missing.

    The function must not use Python. Called from within a parallel region, it has the caller's thread alone.
    """
    threads, address = torch.get_num_threads(), data.words.data_ptr()
    if min(threads, tasks) == 1:
        _Function(function)(address)
    elif _openmp is not None:
        _openmp(function, address, threads, 0)  # always all of them: to change their number takes long
    else:
        _run_in_pool(_Function(function), data, min(threads, tasks))


def _run_in_pool(function: Callable[[int], None], data: Data, threads: int) -> None:
    futures = [_pool(threads).submit(lambda: function(data.words.data_ptr())) for _ in range(threads - 1)]
    function(data.words.data_ptr())
    for future in futures:
        if not future.cancel():  # it has not begun, so there is nothing left for it
            future.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "flashrnn")


_openmp = openmp_parallel()


def _after_fork() -> None:
    """Threads do not survive a fork, and libgomp would wait for them."""
    global _openmp
    _openmp = None
    _pool.cache_clear()


after_fork_in_child(_after_fork)
