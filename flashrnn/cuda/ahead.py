"""Compilation while other work goes on, in threads whose kernels are compiled in processes of their own."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Thread

from flashrnn.cuda.build import prepare
from flashrnn.cuda.nvrtc import compile_elsewhere


@contextmanager
def meanwhile(*compilations: Callable[[], object]) -> Iterator[None]:
    """Run functions that compile kernels while the block runs, and wait for them at its end.

    An error in one of them is left to whoever asks for that kernel next.
    """
    prepare()
    with ThreadPoolExecutor(len(compilations), initializer=compile_elsewhere) as pool:
        for function in compilations:
            pool.submit(function)
        yield


def begin(*compilations: Callable[[], object]) -> None:
    """Run functions that compile kernels while the caller goes on; whoever asks for one of these kernels waits for it.

    An error in one of them is left to whoever asks for that kernel next.
    """

    def run(function: Callable[[], object]) -> None:
        compile_elsewhere()
        with suppress(Exception):
            function()

    prepare()
    for function in compilations:
        Thread(target=run, args=(function,), daemon=True).start()
