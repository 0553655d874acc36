"""The frame of all commands: Hydra parses KEY=VALUE arguments, and errors are printed as one line."""

import json
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import pairwise
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import CompactHydraException, HydraException, InstantiationException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from training import failed_run, hydra_errors
from training.configuration import CONFIGS, check_kinds, check_required, composed, given_and_usual

FULL_ERROR = "HYDRA_FULL_ERROR"
MULTIRUN = ("-m", "--multirun")
CONFIG_DIR = ("-cd", "--config-dir")
OPTIONS = (
    *("--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun", "--info"),
    *("--shell-completion", "--config-path", "--config-name", "--config-dir", "--experimental-rerun"),
)
"""Hydra's long options."""
MATMUL_PRECISIONS = ("highest", "high", "medium")  # those of torch.set_float32_matmul_precision


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
                    check_kinds(*_given_and_usual(own, config_name))
                    return job(config)

            # Without this variable, Hydra would print its errors with a traceback instead of raising them.
            with one_line_errors(), _environment(FULL_ERROR, "1"):
                sys.argv = [typed[0], *arguments(options_first(typed[1:]))]
                hydra.main(version_base="1.3", config_path=CONFIGS, config_name=config_name)(run)()

        return main

    return decorate


def _given_and_usual(own: DictConfig, config_name: str) -> tuple[dict[str, Any], DictConfig]:
    """Return the result of `given_and_usual` for the running command, whose Hydra config is `own`."""
    search = [override for override in own.overrides.hydra if override.startswith("hydra.searchpath=")]
    return given_and_usual([*search, *own.overrides.task], own.runtime.choices, config_name)


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


def options_first(arguments: Sequence[str]) -> list[str]:
    """Return arguments with -m and --config-dir before the overrides: Hydra refuses options amid them.

    Raises:
        ValueError: an argument looks like an option and is none of Hydra's.
    """
    for word in arguments:
        name, _, value = word.partition("=")
        if name.startswith("--") and name not in OPTIONS:
            raise ValueError(f"{word}: settings have no dashes, as in {name.lstrip('-') or 'KEY'}={value or 'VALUE'}")

    def is_option(pair: tuple[str, str]) -> bool:
        before, word = pair
        return word in (*MULTIRUN, *CONFIG_DIR) or word.startswith("--config-dir=") or before in CONFIG_DIR

    return [word for _, word in sorted(pairwise(["", *arguments]), key=lambda pair: not is_option(pair))]


def named(arguments: Sequence[str], key: str) -> list[str]:
    """Return the arguments with a leading single WORD (also after -m) replaced by `key`=WORD."""
    first = next((k for k, word in enumerate(arguments) if word not in MULTIRUN), 0)
    return [f"{key}={word}" if k == first and re.fullmatch(r"\w+", word) else word for k, word in enumerate(arguments)]


def values(config: DictConfig, name: str, *overrides: str) -> dict[str, Any]:
    """Return a config as a dictionary. A single value becomes a list where configs/<name>.yaml has a list.

    Args:
        config: the composed config of a command.
        name: name of the command's config file.
        overrides: the overrides that choose options of its groups.
    """
    lists = {key for key, value in composed(overrides, name).items_ex(resolve=False) if isinstance(value, ListConfig)}
    found = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return {key: [value] if key in lists and not isinstance(value, list) else value for key, value in found.items()}


def literal(
    arguments: Sequence[str], texts: Sequence[str] = (), lists: Sequence[str] = (), paths: Sequence[str] = ()
) -> list[str]:
    """Return KEY=VALUE arguments with the values of some keys quoted, so that Hydra takes them literally.

    Args:
        arguments: the arguments of a command line.
        texts: keys whose values are always quoted.
        lists: keys whose values are always quoted, unless they are lists of strings in JSON, such as ["a", "b"].
        paths: keys whose values are quoted unless Hydra parses them as a string or, in a sweep, as several values.
    """
    sweep = not set(arguments).isdisjoint(MULTIRUN)

    def read(argument: str) -> str:
        key, equals, value = argument.partition("=")
        if equals and key in lists:
            found = _json_texts(value)
            return f"{key}={quoted(value)}" if found is None else f"{key}=[{','.join(map(quoted, found))}]"
        if not equals or not (key in texts or (key in paths and not _is_text(value, sweep))):
            return argument
        return f"{key}={quoted(value)}"

    return [read(argument) for argument in arguments]


def _json_texts(value: str) -> list[str] | None:
    """Return a list of texts in JSON; None for anything else."""
    try:
        found = json.loads(value)
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, list) and all(isinstance(text, str) for text in found) else None


def _is_text(value: str, sweep: bool) -> bool:
    if (found := parsed(f"key={value}")) is None:
        return False
    return found.value() is None or isinstance(found.value(), str) or (sweep and found.is_sweep_override())


def parsed(argument: str) -> Override | None:
    """Return KEY=VALUE as parsed by Hydra; None if Hydra cannot parse it."""
    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException:
        return None


def quoted(value: object) -> str:
    """Return a value in quotes, so that Hydra takes it literally.

    Only backslashes before quotes are escaped, because Hydra unescapes only those.
    """
    escaped = re.sub(r"(\\*)('|$)", lambda end: end[1] * 2 + ("\\'" if end[2] else ""), str(value))
    return f"'{escaped}'"


def unquoted(text: str) -> str:
    """Return a string without Hydra's quotes and escapes; unchanged if Hydra does not parse it as a string."""
    found = parsed(f"key={text}")
    return found.value() if found and isinstance(found.value(), str) else text


def prepare_process(threads: int | None, matmul_precision: str | None = None) -> None:
    """Configure PyTorch and logging for a command.

    Set the number of PyTorch's threads and the precision of its float32 products, unless they are None, and suppress
    messages of Lightning that users cannot act on.
    """
    import torch

    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads={threads}: expected at least 1, or null for one per core")
        torch.set_num_threads(threads)
    if matmul_precision is not None:
        if matmul_precision not in MATMUL_PRECISIONS:
            allowed = ", ".join(MATMUL_PRECISIONS)
            raise ValueError(f"matmul_precision={matmul_precision}: expected one of {allowed}, or null for PyTorch's")
        torch.set_float32_matmul_precision(matmul_precision)
    messages = logging.getLogger("lightning.pytorch")
    messages.setLevel(logging.WARNING)
    logging.getLogger("lightning").propagate = False  # it has its own handler; do not print messages twice
    messages.getChild("profilers").setLevel(logging.INFO)  # profilers log their tables
    warnings.filterwarnings("ignore", message=".*dirpath has changed")  # a resumed run may have a new folder
    warnings.filterwarnings("ignore", message=".*LeafSpec.*deprecated")  # Lightning uses an old interface of PyTorch


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
