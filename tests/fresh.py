"""Run `python -m MODULE ARGUMENTS` in a process that has not imported this project.

The process is forked from one that has imported only the libraries, because that takes longer than most commands.
"""

import atexit
import os
import runpy
import signal
import sys
import tempfile
from multiprocessing import get_context, set_start_method
from pathlib import Path
from subprocess import CompletedProcess

import torch

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "lightning.pytorch", "hydra", "numba"])


class Command:
    """A running command, similar to `subprocess.Popen`, in a session and process group of its own."""

    def __init__(self, arguments: list[str], folder: Path, environment: dict[str, str]) -> None:
        self._printed = tempfile.TemporaryDirectory()
        self._streams = Path(self._printed.name, "stdout"), Path(self._printed.name, "stderr")
        for stream in self._streams:
            stream.touch()
        self._process = _CONTEXT.Process(target=_main, args=(arguments, folder, environment, self._streams))
        self._process.start()
        self.pid = self._process.pid

    def wait(self, timeout: float) -> int | None:
        """Return the exit status, or None if the command does not end within `timeout` seconds."""
        self._process.join(timeout)
        return self._process.exitcode

    @property
    def stdout(self) -> str:
        return self._streams[0].read_text()

    @property
    def stderr(self) -> str:
        return self._streams[1].read_text()


def run(arguments: list[str], folder: Path, environment: dict[str, str]) -> CompletedProcess:
    """Run a command in `folder`, like `subprocess.run`; kill it after two minutes."""
    command = Command(arguments, folder, environment)
    if command.wait(120) is None:
        os.killpg(command.pid, signal.SIGKILL)
    return CompletedProcess(arguments, command.wait(60), command.stdout, command.stderr)


def program(code: str, *arguments: str, folder: Path, environment: dict[str, str]) -> CompletedProcess:
    """Run Python code like `python -c`, from a file in `folder`."""
    folder.joinpath("program.py").write_text(code)
    return run(["program", *arguments], folder, environment)


def _main(arguments: list[str], folder: Path, environment: dict[str, str], streams: tuple[Path, Path]) -> None:
    os.setsid()
    set_start_method(None, force=True)  # the default, instead of the fork server's method, for data workers
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by a shell's background jobs
    ours = [name for name in sys.modules if name.partition(".")[0] in ("flashrnn", "models", "data", "scripts")]
    assert not ours
    for number, stream in enumerate(streams, start=1):
        with stream.open("w") as file:
            os.dup2(file.fileno(), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # PyTorch reads the variable only on import
    sys.path.insert(0, str(folder))
    sys.argv = arguments
    try:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # before Python 3.13, processes of multiprocessing do not call them
