"""The frame of all commands: Hydra composes the config, and errors are printed as one line."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException, HydraException, InstantiationException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from training import failed_run, hydra_errors
from training.arguments import options_first
from training.configuration import CONFIGS, check_overrides, check_required

FULL_ERROR = "HYDRA_FULL_ERROR"


class JobError(CompactHydraException):
    """An error that has ended a job of a sweep, and that has already been printed."""


def hydra_command(
    config_name: str, arguments: Callable[[list[str]], list[str]] = list
) -> Callable[[Callable[[DictConfig], float | None]], Callable[[], None]]:
    """Return a decorator that turns a function of a config into a command with configs/<config_name>.yaml.

    A sweeper optimises the number that the function returns. All errors, including those of Hydra, are handled by
    `one_line_errors`.

    Args:
        config_name: name of the config file, without folder and suffix.
        arguments: maps the typed arguments to those that Hydra parses. sys.argv keeps the typed ones.
    """

    def decorate(job: Callable[[DictConfig], float | None]) -> Callable[[], None]:
        @wraps(job)
        def main() -> None:
            asked, typed = os.environ.get(FULL_ERROR), sys.argv

            def run(config: DictConfig) -> float | None:
                own = HydraConfig.get()
                overrides = " ".join(own.overrides.task)
                in_sweep = own.mode == RunMode.MULTIRUN
                sys.argv = typed
                with (
                    _environment(FULL_ERROR, asked),
                    one_line_errors(overrides if in_sweep else None),
                    failed_run.recorded(own.runtime.output_dir, keep=in_sweep or own.output_subdir is None),
                ):
                    check_required(config, config_name)
                    search = [override for override in own.overrides.hydra if override.startswith("hydra.searchpath=")]
                    check_overrides([*search, *own.overrides.task], own.runtime.choices, config_name)
                    return job(config)

            # Without this variable, Hydra would print its errors with a traceback instead of raising them.
            with one_line_errors(), _environment(FULL_ERROR, "1"):
                sys.argv = [typed[0], *arguments(options_first(typed[1:]))]
                hydra.main(version_base="1.3", config_path=CONFIGS, config_name=config_name)(run)()

        return main

    return decorate


@contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    """Set an environment variable within the context; None removes it."""
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


@contextmanager
def one_line_errors(job: str | None = None) -> Iterator[None]:
    """Exit with the message of an expected error instead of a traceback, unless HYDRA_FULL_ERROR=1.

    In a job of a sweep, described by its overrides `job`, the error is printed and raised as JobError, so that the
    sweep continues.
    """
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        if isinstance(error, JobError):
            sys.exit(1)
        message = error_message(error)
        if message is None or os.environ.get(FULL_ERROR):
            raise
        text = f"error: {message}\n({FULL_ERROR}=1 shows where)"
        if job is None:
            sys.exit(text)
        print(f"{job} failed\n{text}", file=sys.stderr)
        raise JobError(message) from error


def error_message(error: BaseException) -> str | None:
    """Return the message of an error; None for an unexpected kind of error, which needs its traceback."""
    kind, text = type(error).__name__, str(error)
    if kind in ("MisconfigurationException", "SafetensorError"):
        return text
    if text.startswith("Early stopping conditioned on metric"):  # Lightning's
        return text
    if type(error).__module__.startswith("wandb."):
        return f"{text} (from logger=wandb; WANDB_MODE=offline needs no account)"
    if isinstance(error, InstantiationException) and hydra_errors.raised_by_target(error):
        return error_message(error.__cause__) or hydra_errors.message(error)
    if isinstance(error, HydraException | OmegaConfBaseException):
        return hydra_errors.message(error)
    if isinstance(error.__cause__, OSError) and str(error.__cause__) not in text:  # such as an unwritable log folder
        return f"{text}: {error.__cause__}"
    if kind == "OutOfMemoryError":
        return f"{text.partition('. ')[0]}: lower data.batch_size (global_batch_size keeps the size of a step)"
    if text.startswith("DataLoader worker"):
        reason = text.strip().rstrip(".")
        return f"{reason}. A process that loads data died, often because memory ran out: lower data.num_workers"
    if "in DataLoader worker process" in text.partition("\n")[0]:
        return text.strip().rpartition("\n")[2].partition(": ")[2] or text
    expected = YAMLError | ValueError | TypeError | OSError | ArithmeticError | ModuleNotFoundError
    return text if isinstance(error, expected) else None
