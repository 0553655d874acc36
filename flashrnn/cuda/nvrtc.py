"""NVRTC, in this process or in one of its own: in a process it compiles one program after the other.

A process of its own runs this file as a program, which imports neither PyTorch nor this package: it starts in 0.2 s.
"""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread, local

_THREAD = local()


@contextmanager
def meanwhile(*compilations: Callable[[], object]) -> Iterator[None]:
    """Run functions that compile kernels while the block runs, and wait for them at its end.

    An error in one of them is left to whoever asks for that kernel next.
    """
    with ThreadPoolExecutor(max(1, len(compilations)), initializer=compile_elsewhere) as pool:
        for function in compilations:
            pool.submit(function)
        yield


def begin(*compilations: Callable[[], object]) -> None:
    """Run functions that compile kernels while the caller goes on. Who asks for a kernel before it is there waits.

    An error is left to whoever asks for that kernel.
    """

    def run(function: Callable[[], object]) -> None:
        compile_elsewhere()
        with suppress(Exception):
            function()

    for function in compilations:
        Thread(target=run, args=(function,), daemon=True).start()


def compile_elsewhere() -> None:
    """Let programs of this thread be compiled in processes of their own from now on."""
    _THREAD.elsewhere = True


def compiled(**program: object) -> tuple[bytes, str]:
    """Return a program's binary and the compiler's log; the arguments are those of `_compile`."""
    if getattr(_THREAD, "elsewhere", False) and (done := _in_own_process(program)) is not None:
        return done
    return _compile(**program)


def _compile(source: str, entry: str, arch: str, include: list[str], options: dict) -> tuple[bytes, str]:
    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    program = Program(source, "c++", ProgramOptions(name=entry, arch=arch, include_path=include, **options))
    return program.compile("cubin", logs=log).code, log.getvalue()


def _in_own_process(program: dict) -> tuple[bytes, str] | None:
    """Return the result of `_compile` in another process; None if it fails there, for whatever reason."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    given = {"input": json.dumps(program).encode(), "capture_output": True, "env": environment}
    try:
        done = subprocess.run([sys.executable, __file__], check=True, **given)
    except (OSError, subprocess.CalledProcessError):
        return None
    log, _, code = done.stdout.partition(b"\n")
    return code, json.loads(log)


if __name__ == "__main__":
    sys.path = [folder for folder in sys.path if folder != str(Path(__file__).parent)]  # for modules of other names
    code, log = _compile(**json.load(sys.stdin))
    sys.stdout.buffer.write(json.dumps(log).encode() + b"\n" + code)
