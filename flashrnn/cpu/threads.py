"""Runs a compiled function on as many threads as PyTorch would use: on PyTorch's own, where they can be had.

The threads of PyTorch's OpenMP spin for a while after each of its operations, so that they begin the next one at once;
other threads would have to wait for their cores.
"""

from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import CFUNCTYPE, c_void_p
from functools import cache
from typing import Any, NamedTuple

import torch

from flashrnn._torch_private import openmp_parallel
from flashrnn.forking import after_fork_in_child

_Function = CFUNCTYPE(None, c_void_p)


class Data(NamedTuple):
    """What a function is given: the address of `words`."""

    words: array  # of 64-bit integers
    others: Any  # whose addresses are among the words: they live as long as a thread may use them

    @property
    def address(self) -> int:
        return self.words.buffer_info()[0]


def run(function: int, data: Data, threads: int) -> None:
    """Call the C function at address `function` in so many threads at once, of which the caller's is one.

    There are never more than torch.get_num_threads(), and may always be as many, unless `threads` is one.

    The function must not use Python. Called from within a parallel region, it has the caller's thread alone.
    """
    if threads == 1:
        _function_at(function)(data.address)
    elif _openmp is not None:
        _openmp(function, data.address, torch.get_num_threads(), 0)  # all of them: to change their number takes long
    else:
        _run_in_pool(_function_at(function), data, min(threads, torch.get_num_threads()))


_function_at = cache(_Function)


def _run_in_pool(function: Callable[[int], None], data: Data, threads: int) -> None:
    futures = [_pool(threads).submit(lambda: function(data.address)) for _ in range(threads - 1)]
    function(data.address)
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
