"""The cells of a process, which are found by name, by key or, in unpickling, by definition."""

import copyreg
import warnings
from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name

from flashrnn.cells.definition import CELLS, Cell
from flashrnn.imports import imported

_REGISTRY: dict[str, Cell] = {}
_BUILT_IN: set[str] = set()


def register(cell: Cell) -> Cell:
    """Register a cell under its name, for configs and `function="..."`, and return it.

    It replaces a cell that was registered under the same name.

    Raises:
        ValueError: the name is that of a built-in cell, or contains a dot.
        TypeError: `cell` is not a `flashrnn.Cell`.
    """
    if not isinstance(cell, Cell):
        raise TypeError(f"register takes a flashrnn.Cell, not {type(cell).__name__}")
    if "." in cell.name:
        raise ValueError(f"{cell.name!r} cannot be registered: a name with dots is looked for in a module")
    if cell.name in _BUILT_IN:
        raise ValueError(f"{cell.name!r} is a built-in cell: give yours another name")
    _REGISTRY[cell.name] = cell
    return cell


def register_built_in(cell: Cell) -> Cell:
    """Register a cell under a name that no other cell may take."""
    register(cell)
    _BUILT_IN.add(cell.name)
    return cell


def get_cell(function: str | Cell) -> Cell:
    """Return the given cell, the registered cell of this name, or the cell "module.name", importing its module.

    Raises:
        ValueError: there is no cell of this name.
        TypeError: `function` is neither a name nor a cell.
    """
    if isinstance(function, Cell):
        return function
    if not isinstance(function, str):
        raise TypeError(
            f"function must be a cell's name or a flashrnn.Cell, not {type(function).__name__}; "
            "a step becomes one as flashrnn.Cell('name', step, states=(...))"
        )
    if "." in function:
        return imported(function, Cell, "flashrnn.Cell")
    if function not in _REGISTRY:
        raise ValueError(
            f"unknown cell {function!r}; registered cells: {', '.join(registered_cells())}. "
            "Pass a flashrnn.Cell, name yours as module.name, or register it here by flashrnn.register(cell)"
        )
    return _REGISTRY[function]


def registered_cells() -> tuple[str, ...]:
    """Return the names of all registered cells."""
    return tuple(sorted(_REGISTRY))


def cell_of_key(key: str) -> Cell:
    """Return the cell with a `Cell.key`, which may come from another process through an exported program."""
    if key in CELLS:
        return CELLS[key]
    first = key.rpartition("#")[0]
    if first in CELLS:
        warnings.warn(
            f"an exported program asks for the second cell with the key {first!r}: taking the first", stacklevel=2
        )
        return CELLS[first]
    raise ValueError(
        f"no cell {key!r}: a program exported with cell {key.partition('@')[0]!r} needs that cell, unchanged; import "
        "the module that defines it first"
    )


def _reduced(cell: Cell) -> tuple[Callable, tuple]:
    """Return what pickle stores for a cell: its name if the cell can be found by it, otherwise its definition."""
    by_name = _REGISTRY.get(cell.name) is cell and not _importable(cell.step)
    if by_name or cell.name in _BUILT_IN:
        return get_cell, (cell.name,)
    return _unpickled, _definition(cell)


copyreg.pickle(Cell, _reduced)


def _importable(step: Callable) -> bool:
    """Return whether pickle can store a step by name; it cannot for lambdas and local functions."""
    try:
        return resolve_name(f"{step.__module__}:{step.__qualname__}") is step
    except (AttributeError, ImportError, ValueError):
        return False


def _definition(cell: Cell) -> tuple:
    return cell.name, cell.step, cell.states, cell.input_gates, cell.recurrent_gates, cell.float16_states


def _unpickled(*definition) -> Cell:
    """Return this process's cell with the same definition, to share its trace and kernels, or a new one."""
    return next((cell for cell in CELLS.values() if _same(_definition(cell), definition)), None) or Cell(*definition)


def _same(definition: tuple, other: tuple) -> bool:
    (name, step, *rest), (other_name, other_step, *other_rest) = definition, other
    if (name, rest) != (other_name, other_rest):
        return False
    if isinstance(step, partial) and isinstance(other_step, partial):  # which is equal to itself alone
        step, other_step = ((p.func, p.args, p.keywords) for p in (step, other_step))
    try:
        return step == other_step
    except (RuntimeError, ValueError):  # tensors and arrays do not compare to a bool
        return False
