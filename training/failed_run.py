"""What a command that fails leaves in the folder of its run."""

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def recorded(folder: str, keep: bool) -> Iterator[None]:
    """If the block raises, remove the folder of the run, or write the error with its traceback to the run's log.

    The folder is removed if it only holds what Hydra writes before a run begins, such as after a mistyped value.

    Args:
        folder: the folder of the run.
        keep: never remove it.
    """
    try:
        yield
    except BaseException as error:
        if not keep and _unused(Path(folder)):
            shutil.rmtree(folder, ignore_errors=True)
        elif isinstance(error, Exception):
            _log(error)
        raise


def _unused(folder: Path) -> bool:
    """Return whether a folder, not the working one, holds only Hydra's copy of the command and empty logs."""
    copy = folder / ".hydra"
    others = [path for path in folder.rglob("*") if path != copy and path.parent != copy]
    empty = all(path.suffix == ".log" and not path.stat().st_size for path in others)
    return empty and not Path.cwd().is_relative_to(folder.resolve())


def _log(error: Exception) -> None:
    """Write an error to the log files only, because it is also printed."""
    text = {"name": __name__, "levelno": logging.ERROR, "levelname": "ERROR", "msg": "failed"}
    record = logging.makeLogRecord(text | {"exc_info": (type(error), error, error.__traceback__)})
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)
