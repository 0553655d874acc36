"""Arguments of commands, KEY=VALUE, as users type them and as Hydra reads them."""

import json
import re
from collections.abc import Sequence
from itertools import pairwise

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

MULTIRUN = ("-m", "--multirun")
CONFIG_DIR = ("-cd", "--config-dir")
OPTIONS = (
    *("--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun", "--info"),
    *("--shell-completion", "--config-path", "--config-name", "--config-dir", "--experimental-rerun"),
)
"""Hydra's long options."""


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
