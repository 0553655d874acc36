"""Import of objects in a user's own modules, by their names in configs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import TypeVar

import torch

T = TypeVar("T")


@contextmanager
def initial_modes() -> Iterator[None]:
    """A context with PyTorch's initial modes: tensors are created on the CPU, and gradients are enabled.

    A model is often built under `torch.device("meta")`. A module imported there would keep tensors without values, even
    when the model is later built with its weights.
    """
    with torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():
        yield


def imported(path: str, kind: type[T], kind_path: str) -> T:
    """Return the object "module.name", after importing its module under `initial_modes`.

    Args:
        path: "module.name"; modules are also searched in the folder where Python was started.
        kind: the class of the object.
        kind_path: the public name of this class.

    Raises:
        ValueError: there is no such module or name.
        TypeError: the object is not a `kind`.
    """
    try:
        with initial_modes():
            found = resolve_name(path)
    except (ImportError, AttributeError) as error:
        name = kind.__name__.lower()
        raise ValueError(
            f"no {name} {path!r}: {error} (modules are looked for where Python was started and in PYTHONPATH)"
        ) from error
    if not isinstance(found, kind):
        raise TypeError(f"{path} is of type {type(found).__name__}, not a {kind_path}")
    return found
