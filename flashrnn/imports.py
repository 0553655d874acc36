"""Objects of a user's own modules, found by their names in configs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import TypeVar

import torch

T = TypeVar("T")


@contextmanager
def initial_modes() -> Iterator[None]:
    """Set PyTorch's modes to those that a program starts with in this context: tensors on the CPU, with gradients.

    A model is often built under `torch.device("meta")`. What is imported there would hold tensors without values, also
    when the model is later built with its weights.
    """
    with torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():
        yield


def imported(path: str, kind: type[T], kind_path: str) -> T:
    """Return the object that "module.name" names, its module imported under `initial_modes`.

    Args:
        path: "module.name"; modules are looked for where Python was started, too.
        kind: the class of the object.
        kind_path: where users find this class.

    Raises:
        ValueError: there is no such module or name.
        TypeError: it is no `kind`.
    """
    try:
        with initial_modes():
            found = resolve_name(path)
    except (ImportError, AttributeError) as error:
        name = kind.__name__.lower()
        raise ValueError(f"no {name} {path!r}: {error} (modules are looked for where Python was started)") from error
    if not isinstance(found, kind):
        raise TypeError(f"{path} is of type {type(found).__name__}, not a {kind_path}")
    return found
