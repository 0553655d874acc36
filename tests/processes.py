"""Several processes that run the same function concurrently."""

import contextlib
import os
from collections.abc import Callable


def in_processes(count: int, run: Callable[[], object]) -> list[int]:
    """Call `run` in `count` forked processes concurrently; return their exit statuses."""
    children = []
    for _ in range(count):
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                run()
                status = 0
            os._exit(status)
        children.append(child)
    return [os.waitpid(child, 0)[1] for child in children]
