"""Runs functions that release Python's lock on as many threads as PyTorch would use."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch


def run(tasks: Sequence[Callable[[], None]]) -> None:
    """Calls all of `tasks`, on torch.get_num_threads() threads, of which the caller's is one."""
    waiting = iter(tasks)

    def work() -> None:
        for task in waiting:
            task()

    helpers = min(torch.get_num_threads(), len(tasks)) - 1
    futures = [_pool(torch.get_num_threads()).submit(work) for _ in range(helpers)]
    work()
    for future in futures:
        if not future.cancel():  # it has not begun, so there is nothing left for it
            future.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "flashrnn")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork
