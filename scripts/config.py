"""Configs: resolvers, their way into the run folder and the checkpoint, and errors in one line."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

CONFIGS = str(Path(__file__).parents[1] / "configs")


def accumulate(global_batch_size: int | None, batch_size: int, devices: int, num_nodes: int) -> int:
    """Batches to accumulate so that one optimizer step sees `global_batch_size` sequences."""
    if global_batch_size is None:
        return 1
    if not isinstance(devices, int) or devices < 1:
        raise ValueError(f"trainer.devices={devices}: with global_batch_size set it must be the number of devices")
    together = batch_size * devices * num_nodes
    if global_batch_size % together:
        raise ValueError(
            f"global_batch_size={global_batch_size} is no multiple of data.batch_size={batch_size} x "
            f"trainer.devices={devices} x trainer.num_nodes={num_nodes} = {together}"
        )
    return global_batch_size // together


OmegaConf.register_new_resolver("accumulate", accumulate)
OmegaConf.register_new_resolver("product", lambda a, b: a * b)


def prepare_process(threads: int | None) -> None:
    """Threads of PyTorch, and Lightning's messages cut down to warnings that a user can act on."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*logs directory .* exists and is not empty")  # the run's own folder
    warnings.filterwarnings("ignore", message=".*dirpath has changed")  # a resumed run has a folder of its own
    warnings.filterwarnings("ignore", message=".*does not have many workers")  # our batches cost next to nothing
    warnings.filterwarnings("ignore", message=".*LeafSpec.*deprecated")  # between Lightning and PyTorch


def check_override_keys(arguments: list[str]) -> None:
    """Raise ValueError for a KEY=VALUE argument whose key the config does not have; Hydra would not say what it has."""
    from hydra import compose, initialize_config_dir
    from hydra.core.override_parser.overrides_parser import OverridesParser

    overrides = [argument for argument in arguments if "=" in argument and not argument.startswith(("-", "+", "~"))]
    groups, keys = [], []
    for override in OverridesParser.create().parse_overrides(overrides):
        name = override.key_or_group
        if Path(CONFIGS, name).is_dir():
            values = override.sweep_string_iterator() if override.is_sweep_override() else [override.value()]
            groups.append(f"{name}={next(iter(values))}")
        elif not name.startswith(("hydra.", "hydra/")):
            keys.append(name)
    if not keys:  # composing takes a moment, and Hydra will do it again
        return
    with initialize_config_dir(CONFIGS, version_base="1.3"):
        config = compose("train", overrides=groups)
    for key in keys:
        node, above = config, "the config"
        for part in key.split("."):
            if not OmegaConf.is_config(node) or part not in list(node):  # `in` misses keys that are ???
                allowed = ", ".join(map(str, node)) if OmegaConf.is_config(node) else "no keys"
                raise ValueError(f"unknown config key {key!r}: {above} has {allowed} (+{key}=... adds a key)")
            node, above = node._get_node(part), part


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the program with the message of an expected error alone; HYDRA_FULL_ERROR=1 shows the traceback."""
    from hydra.errors import HydraException

    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError, TypeError, OSError, ArithmeticError) as error:
        if os.environ.get("HYDRA_FULL_ERROR"):
            raise
        while isinstance(error, HydraException | OmegaConfBaseException) and error.__cause__ is not None:
            error = error.__cause__  # Hydra wraps what a constructor raised
        sys.exit(f"error: {error}\n(HYDRA_FULL_ERROR=1 shows where)")
