"""What this package does when its process forks; systems that do not fork, such as Windows, have no hooks for it."""

import os
from collections.abc import Callable
from threading import RLock


def after_fork_in_child(function: Callable[[], None]) -> None:
    """Call `function` in every child process that is forked from now on."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def lock_that_forks_wait_for() -> RLock:
    """Return a lock that is free in every forked child.

    A fork waits until the lock is free. So a child finds neither a lock whose holder it does not have, nor what the
    holder had only begun, such as an import. Reentrant: a thread that holds it may fork.
    """
    lock = RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock
