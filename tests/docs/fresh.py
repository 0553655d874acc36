"""`python -m MODULE ARGUMENTS` in a process that has imported none of this project.

It begins as a fork of one that has imported the libraries alone, which takes longer than most commands.
"""

import os
import runpy
import sys
from multiprocessing import get_context
from pathlib import Path

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "lightning.pytorch", "hydra"])


def run(arguments: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Runs the command in `folder`; its exit status and what it printed."""
    log = folder / "log.txt"
    process = _CONTEXT.Process(target=_main, args=(arguments, folder, environment, log))
    process.start()
    process.join(120)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode, log.read_text()


def _main(arguments: list[str], folder: Path, environment: dict[str, str], log: Path) -> None:
    ours = [name for name in sys.modules if name.partition(".")[0] in ("flashrnn", "models", "data", "scripts")]
    assert not ours
    with log.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, str(folder))
    sys.argv = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
