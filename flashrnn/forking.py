"""Hooks for forks of the process; systems without fork, such as Windows, have none."""

import os
from collections.abc import Callable
from threading import RLock


def after_fork_in_child(function: Callable[[], None]) -> None:
    """Call `function` in every child process that is forked from now on."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def lock_that_forks_wait_for() -> RLock:
    """Return a reentrant lock that is free in every forked child.

    A fork waits until the lock is free. A child therefore has neither a lock whose holder does not exist in it, nor the
    unfinished work of that holder, such as an import. A thread that holds the lock may fork.
    """
    lock = RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock
