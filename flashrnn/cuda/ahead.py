"""Compilation in the background: threads whose kernels are compiled in processes of their own."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Thread

from flashrnn.cuda.build import prepare
from flashrnn.cuda.nvrtc import compile_in_subprocess


@contextmanager
def meanwhile(*compilations: Callable[[], object]) -> Iterator[None]:
    """Run functions that compile kernels in the background of the `with` block; wait for them at its end.

    Their errors are ignored: the next caller that needs the kernel compiles it again and gets the error.
    """
    prepare()
    with ThreadPoolExecutor(len(compilations), initializer=compile_in_subprocess) as pool:
        for function in compilations:
            pool.submit(function)
        yield


def start_in_background(*compilations: Callable[[], object]) -> None:
    """Run functions that compile kernels in the background, and return at once.

    A caller that needs one of the kernels meanwhile waits for it.

    Their errors are ignored: the next caller that needs the kernel compiles it again and gets the error.
    """

    def run(function: Callable[[], object]) -> None:
        compile_in_subprocess()
        with suppress(Exception):
            function()

    prepare()
    for function in compilations:
        Thread(target=run, args=(function,), daemon=True).start()
