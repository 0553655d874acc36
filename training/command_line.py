"""The process of a command: its threads, the warnings it passes on, and how it ends with an error."""

import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError


def prepare_process(threads: int | None) -> None:
    """Threads of PyTorch, and Lightning's messages cut down to warnings that a user can act on."""
    import torch

    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads={threads}: expected at least 1, or null for one per core")
        torch.set_num_threads(threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*dirpath has changed")  # a resumed run has a folder of its own
    warnings.filterwarnings("ignore", message=".*LeafSpec.*deprecated")  # between Lightning and PyTorch


@contextmanager
def one_line_errors(job: str | None = None) -> Iterator[None]:
    """End the program with the message of an expected error alone; HYDRA_FULL_ERROR=1 shows the traceback.

    That of a job of --multirun, by its overrides, is shown and passed on to Hydra: others follow, and Hydra shows it
    again in the end, for it knows a kind of error that it shows without a traceback.
    """
    from hydra.errors import CompactHydraException

    try:
        yield
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        message = _message(error)
        if message is None or os.environ.get("HYDRA_FULL_ERROR"):
            raise
        text = f"error: {message}\n(HYDRA_FULL_ERROR=1 shows where)"
        if job is None:
            sys.exit(text)
        print(f"{job} failed\n{text}", file=sys.stderr)
        raise CompactHydraException(message) from error


def _message(error: BaseException) -> str | None:
    """What to tell a user about an error; None if it is none of the expected kinds, so that its place matters."""
    from hydra.errors import HydraException

    kind, text = type(error).__name__, str(error)
    if kind == "MisconfigurationException" or text.startswith("Early stopping conditioned on metric"):  # Lightning's
        return text
    if type(error).__module__.startswith("wandb."):
        return f"{text} (of logger=wandb; WANDB_MODE=offline needs no account)"
    if isinstance(error, HydraException | OmegaConfBaseException) and error.__cause__ is not None:
        return _message(error.__cause__) or text  # Hydra wraps what a constructor raised
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} has no value yet: give one, {error.full_key}=VALUE (configs/ says what there is)"
    if isinstance(error, InterpolationResolutionError):  # OmegaConf wraps what a resolver raised, without its cause
        return text.partition("\n")[0].rpartition("raised while resolving interpolation: ")[2]
    if kind == "OutOfMemoryError":
        return f"{text.partition('. ')[0]}: lower data.batch_size (global_batch_size keeps what a step sees)"
    if text.startswith("DataLoader worker"):
        reason = text.strip().rstrip(".")
        return f"{reason}. A process that loads data died, often for want of memory: lower data.num_workers"
    if "in DataLoader worker process" in text.partition("\n")[0]:
        return text.strip().rpartition("\n")[2].partition(": ")[2] or text
    expected = HydraException, OmegaConfBaseException, YAMLError, ValueError, TypeError, OSError, ArithmeticError
    return text if isinstance(error, expected) else None
