"""The definition of a cell: a step, and the names of its gates and states."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flashrnn.cells.checks import check_names, check_step, example, gates_of, one_thread, some_gates
from flashrnn.forking import lock_that_forks_wait_for
from flashrnn.imports import initial_modes


@dataclass(frozen=True, eq=False)
class Cell:
    """A recurrent cell, defined by its element-wise step in PyTorch.

    Args:
        name: the name of the cell for `get_cell` and configs, once it is registered.
        step: the step P. Its parameters are the gates and then the states, by name. It returns the new states in the
            same order, as a tuple, or as one tensor for a single state. It may use any element-wise PyTorch operation
            on tensors of any shape. It may read other units of the head only through `flashrnn.layer_norm`, `rms_norm`,
            `mean`, `sum` and `max`. Parameters with a default value are constants.
        states: the names of the states. The recurrent matrix multiplies the first one, and the layer returns it. All
            states start at zero.
        input_gates: the gates with an input part x, at least one; None means all.
        recurrent_gates: the gates with a recurrent part R h, at least one; None means all. A gate in neither list has
            only its bias.
        float16_states: for inputs in bfloat16 or float16, store all states but the first in float16 for the backward
            pass, unless the caller requests them. This halves their memory and does not change outputs. Do not set it
            for sums of exponentials: if a state is smaller than 6e-8 or larger than 65504, gradients are wrong without
            a warning. A cell whose step normalises what depends on these states keeps them in float32 all the same.

    A variable that the step captures becomes a constant of the cell; for another value, create another cell. Cells live
    until the process ends: create them once, not for every model.

    Raises:
        ValueError: the names do not match the parameters of `step`, or `step` mixes units in another way, branches on
            values or draws random numbers.

    Example:
        >>> def step(i, f, z, o, h, c):
        ...     c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(z)
        ...     return torch.sigmoid(o) * torch.tanh(c), c
        >>> lstm = Cell("my_lstm", step, states=("h", "c"))
    """

    name: str
    step: Callable[..., Tensor | tuple[Tensor, ...]]
    states: tuple[str, ...]
    input_gates: tuple[str, ...] | None = None
    recurrent_gates: tuple[str, ...] | None = None
    float16_states: bool = False
    gates: tuple[str, ...] = field(init=False)
    key: str = field(init=False)  # identifies the cell in operators, which do not accept Python objects

    def __post_init__(self) -> None:
        for kind in ("states", "input_gates", "recurrent_gates"):
            check_names(self.name, kind, getattr(self, kind))
        set_field = object.__setattr__
        set_field(self, "states", tuple(self.states))
        set_field(self, "gates", gates_of(self.name, self.step, self.states))
        for kind in ("input_gates", "recurrent_gates"):
            set_field(self, kind, some_gates(self.name, kind, getattr(self, kind), self.gates))
        with one_thread(), initial_modes():  # with gradients: a captured tensor may require them, which is an error
            check_step(self.name, self.update, len(self.gates), len(self.states))
            digest = _digest(self)
        with _KEYS:  # two threads may define cells at the same time
            set_field(self, "key", _unused_key(f"{self.name}@{digest}"))
            CELLS[self.key] = self

    def __deepcopy__(self, memo) -> "Cell":
        return self  # a cell is immutable, so copies of a layer share it with its trace and its kernels

    def update(self, gates: list[Tensor], states: list[Tensor]) -> tuple[Tensor, ...]:
        """Run one step: return the new states for `gates`, in the order of `self.gates`, and the previous `states`."""
        new = self.step(*gates, *states)
        new = tuple(new) if isinstance(new, tuple | list) else (new,)
        if len(new) != len(self.states) or not all(isinstance(state, Tensor) for state in new):
            types = ", ".join("a tensor" if isinstance(state, Tensor) else type(state).__name__ for state in new)
            raise ValueError(f"cell {self.name!r}: step must return a tensor for each of {self.states}, got ({types})")
        return new


CELLS: dict[str, Cell] = {}
"""Every cell of this process, by its key."""


_KEYS = lock_that_forks_wait_for()


def _unused_key(first: str) -> str:
    """Return `first`, or a numbered key if another cell has it, because the digest does not show every difference."""
    key, number = first, 1
    while key in CELLS:
        number += 1
        key = f"{first}#{number}"
    return key


def _digest(cell: Cell) -> str:
    """Return a digest of the cell's names and of results of its step, rounded so that they are equal on all machines.

    It is the same in every process, whereas a digest of the step's code would depend on the version of Python.
    """
    values = example(len(cell.gates), len(cell.states))
    new = [state for size in (1, 30) for state in cell.update(*([size * x for x in group] for group in values))]
    digits = [f"{value:.4g}" if abs(value) > 1e-6 else "0" for value in torch.stack(new).flatten().tolist()]
    names = cell.states, cell.gates, cell.input_gates, cell.recurrent_gates, cell.float16_states
    return hashlib.sha256(repr((names, digits)).encode()).hexdigest()[:8]
