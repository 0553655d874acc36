"""Runs a compiled function on as many threads as PyTorch uses; if possible, on PyTorch's own OpenMP threads.

After each operation, OpenMP threads spin for a while so that they can start the next one at once. Other threads would
compete with them for the cores.
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
    """The argument of a function, which receives the address of `words`."""

    words: array  # 64-bit integers
    others: Any  # objects whose addresses are among the words, kept alive as long as a thread may use them

    @property
    def address(self) -> int:
        return self.words.buffer_info()[0]


def run(function: int, data: Data, threads: int) -> None:
    """Call the C function at address `function` concurrently in the calling thread and others.

    With `threads` = 1, only the calling thread runs it. Otherwise at most torch.get_num_threads() threads do, which may
    be more than `threads`. Within a parallel region, it may be only the calling thread. The function must not use
    Python.
    """
    if threads == 1:
        _function_at(function)(data.address)
    elif _openmp is not None:
        _openmp(function, data.address, torch.get_num_threads(), 0)  # changing the number of threads is slow
    else:
        _run_in_pool(_function_at(function), data, min(threads, torch.get_num_threads()))


_function_at = cache(_Function)


def _run_in_pool(function: Callable[[int], None], data: Data, threads: int) -> None:
    futures = [_pool(threads).submit(lambda: function(data.address)) for _ in range(threads - 1)]
    function(data.address)
    for future in futures:
        if not future.cancel():  # a call that has not started has no work left
            future.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "flashrnn")


_openmp = openmp_parallel()


def _after_fork() -> None:
    """Forget all threads: they do not survive a fork, and libgomp would wait for them."""
    global _openmp
    _openmp = None
    _pool.cache_clear()


after_fork_in_child(_after_fork)
