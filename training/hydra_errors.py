"""Errors of Hydra and OmegaConf as one line, with the closest known name for a misspelt one."""

import re
import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from hydra.errors import InstantiationException, MissingConfigException, OverrideParseException
from omegaconf import Container, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from training.configuration import CONFIGS, leaves

UNKNOWN_KEY = ConfigAttributeError | ConfigKeyError
_SAME_KEY = 0.8  # similarity of a misspelt key: num_layers is not num_classes, so all keys are listed for it


def message(error: Exception) -> str:
    """Return the message of an error of Hydra or OmegaConf in one line."""
    if resolving := re.match(r"\w+ raised while resolving interpolation: (.+)", str(error)):
        return resolving[1]  # the rest names a key that the user has not given
    text, cause = _one_line(error), error.__cause__
    if isinstance(error, OverrideParseException) and "=" not in error.override:
        return f"{error.override}: expected KEY=VALUE"
    if isinstance(error, OverrideParseException) and (found := _quoted(error.override)):
        return f"{error.override} cannot be read; a value with special characters goes into quotes: {found}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        options = error.options or sorted(path.stem for path in Path(CONFIGS, group).glob("*.yaml"))
        known = "" if error.options or not options else f" Available options in '{group}': {' '.join(options)}"
        return text + known + _closest(name, options)
    if isinstance(error, InstantiationException) and isinstance(cause, ImportError):
        reason = _one_line(cause)
        return reason if reason in text else f"{text}: {reason}"
    unknown = error if isinstance(error, UNKNOWN_KEY) else cause
    if isinstance(unknown, UNKNOWN_KEY) and unknown.parent_node is not None:
        name, keys = str(unknown.key), [str(key) for key in unknown.parent_node]
        hint = _elsewhere(name, unknown.parent_node) or _closest(name, keys, _SAME_KEY)
        text = f"There is no key '{unknown.full_key}'" if unknown is error else text
        return text + (hint or f" (known: {', '.join(keys)})")
    return text


def _quoted(override: str) -> str:
    """Return KEY=VALUE with the value in quotes for Hydra, and these in quotes for a shell; nothing if it has some."""
    key, equals, value = override.partition("=")
    return f"\"{key}='{value}'\"" if equals and "'" not in value and '"' not in value else ""


def raised_by_target(error: InstantiationException) -> bool:
    """Return whether the code that Hydra called raised the error, so that its message is better than Hydra's.

    This is not the case for a TypeError that comes from the call itself, with wrong keys, or from an operation.
    """
    if not isinstance(error.__cause__, TypeError):
        return error.__cause__ is not None
    *_, last = traceback.extract_tb(error.__cause__.__traceback__)
    return (last.line or "").startswith("raise")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).partition("\nConfig search path:")[0].split())


def _elsewhere(name: str, node: Container) -> str:
    """Return a question for keys of that name in other sections, such as optim.lr for lr, or model.num_heads for
    heads."""
    config = OmegaConf.to_container(node._get_root())
    keys = [key.removeprefix(".") for key in leaves(config, "") if not key.startswith(".hydra.")]
    for ending in (f".{name}", f"_{name}"):
        if found := [key for key in keys if key.endswith(ending)]:
            return f" (did you mean {' or '.join(found[:3])}?)"
    return ""


def _closest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    longer = [known for known in names if known.startswith(f"{name}_")]  # slimpajama: slimpajama_160m, slimpajama_1b
    close = longer[:3] or get_close_matches(name, names, n=1, cutoff=cutoff)
    return f" (did you mean {' or '.join(close)}?)" if close else ""
