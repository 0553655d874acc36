"""The errors of Hydra and OmegaConf as one line: the value, what is allowed, and what to do."""

import re
from difflib import get_close_matches

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

QUOTED = """'key="a, b"'"""
UNKNOWN_KEY = ConfigAttributeError | ConfigKeyError
PRIVATE = {"hydra", "overrides", "run_dir"}  # keys that nobody sets


def message(error: Exception) -> str:
    """Return the message of an error of Hydra or OmegaConf in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, OverrideParseException):
        if "=" not in error.override:
            return f"{error.override!r} is not of the form KEY=VALUE"
        return f"cannot read {error.override!r} as KEY=VALUE; quote special characters twice, as in {QUOTED}"
    if isinstance(error, MissingConfigException) and error.options:
        return _unknown_option(error)
    if isinstance(error, UNKNOWN_KEY) and error.parent_node is not None and "is not in struct" in text:
        return _unknown_key(error)
    if isinstance(error.__cause__, UNKNOWN_KEY) and text.startswith("Could not override"):
        return f"{_unknown_key(error.__cause__)}. +{error.__cause__.full_key}=VALUE adds a new key"
    if text.startswith("Multiple values for "):
        group = text.removeprefix("Multiple values for ").partition(".")[0]
        return f"{group} has several values; give one, without +, as in {group}=OPTION"
    if text.startswith("Ambiguous value for argument "):
        argument = text.removeprefix("Ambiguous value for argument ").partition(" 1. ")[0]
        return f"{argument} has several values; -m runs one job for each, and key=[a,b] is a list"
    if found := re.match(r"Error locating target '([^']*)'.*full_key: (\S+)", text):
        target, key = found.groups()
        reason = " ".join(str(error.__cause__ or "").splitlines()[-1:])
        return f"{key}._target_={target} cannot be imported: {reason}"
    return text


def _unknown_option(error: MissingConfigException) -> str:
    group, _, option = error.missing_cfg_file.rpartition("/")
    options = sorted(set(error.options) - {"base"})
    return f"{group}={option}: {group} has no option {option!r}{_closest(option, options)}; it has {', '.join(options)}"


def _unknown_key(error: ConfigAttributeError | ConfigKeyError) -> str:
    section, _, key = error.full_key.rpartition(".")
    keys = [str(name) for name in error.parent_node if not str(name).startswith("_") and name not in PRIVATE]
    prefix = f"{section}." if section else ""
    found = _closest(key, keys, prefix)
    known = f"{section or 'the config'} has {', '.join(keys)}"
    return f"there is no key {error.full_key!r}{found}; {known}"


def _closest(name: str, names: list[str], prefix: str = "") -> str:
    close = get_close_matches(name, names, n=1)
    return f" (did you mean {prefix}{close[0]}?)" if close else ""
