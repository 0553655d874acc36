"""Cells: what one time step of a recurrent network does to one unit.

A cell is written once, here or by a user, as a few lines of PyTorch. Every backend is made from these lines:
the reference calls them, the kernels are printed from their trace. The recurrence (arXiv 2412.07752, eq. 1-2) is

    g_t^(j) = x_t^(j) + R^(j) s_{t-1}^(0) + b^(j)      for every gate j: input, recurrent matrix, bias
    s_t^(i) = P^(i)(g_t, s_{t-1})                      for every state i: the element-wise step P

and a cell defines P, and which gates have an input part and which a recurrent one.

The letters used everywhere in this package: B batch, T time, G gates, N heads, D head size, S states;
Gi and Gr are the numbers of gates with an input and with a recurrent part.
"""

import hashlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pkgutil import resolve_name

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from flashrnn.imports import imported, initial_modes


@dataclass(frozen=True, eq=False)
class Cell:
    """A recurrent cell, defined by its element-wise step.

    Args:
        name: how `get_cell` and configs refer to the cell once it is registered.
        step: the step P. Its parameters are first the gates, then the states, by name; it returns the new states in
            the same order (a tuple, or one tensor for a single state). It may use any element-wise PyTorch operation
            and runs on tensors of any shape. Parameters with a default are its own, and keep that.
        states: the names of the states; the first is the one that the recurrent matrix multiplies and that the
            layer returns. All states start at zero.
        input_gates: the gates with an input part x, at least one (None: all).
        recurrent_gates: the gates with a recurrent part R s, at least one (None: all). A gate in neither has
            only its bias.
        float16_states: with inputs in bfloat16 or float16, keep all states but the first in float16 for the backward
            pass, unless the caller asks for them; this halves their memory and does not change outputs. Do not set it
            for sums of exponentials: where a state is smaller than 6e-8 or larger than 65504, gradients are wrong, and
            nothing warns of it.

    What a step captures, such as a module's variable, is a constant of the cell: for another value make another cell.
    Cells are kept until the process ends, with what they capture: make them once, not for every model.

    Raises:
        ValueError: the names do not fit the signature of `step`, or `step` is not element-wise, branches on values or
            draws random numbers.

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
    key: str = field(init=False)  # what operators, which take no Python objects, know it by

    def __post_init__(self) -> None:
        for kind in ("states", "input_gates", "recurrent_gates"):
            names = getattr(self, kind)
            if isinstance(names, str):
                raise ValueError(f"cell {self.name!r}: {kind}={names!r} must be a tuple of names, as in ({names!r},)")
        signature = inspect.signature(self.step).parameters.values()
        parameters = tuple(one.name for one in signature if one.default is one.empty)  # others keep their defaults
        named = [one.name for one in signature if one.name in parameters and one.kind not in _BY_POSITION]
        if named:
            raise ValueError(
                f"cell {self.name!r}: step takes {named} by name or in any number, but gates and states are given one "
                "by one, by position; put an argument of your own behind them, with a default"
            )
        states = tuple(self.states)
        gates = parameters[: len(parameters) - len(states)]
        if not states or parameters[len(gates) :] != states or not gates:
            raise ValueError(
                f"cell {self.name!r}: step{parameters} must take the gates and then the states {states}, by these names"
            )
        reserved = [name for name in parameters if name.startswith(_RESERVED)]
        if reserved:
            raise ValueError(f"cell {self.name!r}: names {reserved} start with one of {_RESERVED}, which traces use")
        set_field = object.__setattr__
        set_field(self, "states", states)
        set_field(self, "gates", gates)
        for kind in ("input_gates", "recurrent_gates"):
            names = getattr(self, kind)
            names = gates if names is None else tuple(names)
            if not names:
                raise ValueError(
                    f"cell {self.name!r}: {kind}={names} must name at least one of the gates {gates}; None names all"
                )
            unknown = set(names) - set(gates)
            if unknown:
                raise ValueError(f"cell {self.name!r}: {kind} {sorted(unknown)} are not among its gates {gates}")
            set_field(self, kind, tuple(gate for gate in gates if gate in names))
        with _one_thread(), initial_modes():  # with gradients, because what a step captures may ask for them
            self._check_step()
            set_field(self, "key", _unique_key(self))
        _BY_KEY[self.key] = self

    def __reduce__(self):
        by_name = _REGISTRY.get(self.name) is self and not _importable(self.step)
        if by_name or self.name in _BUILT_IN:
            return get_cell, (self.name,)
        return _unpickled, _definition(self)

    def __deepcopy__(self, memo) -> "Cell":
        return self  # copies of a layer share its cell, which cannot change, and with it all that was made from it

    def _check_step(self) -> None:
        """Raise for what backends would compute otherwise than the step, or not at all."""
        try:
            self.update(*([value.as_subclass(_Unknown) for value in group] for group in self._example()))
            together = self._updated(self._example())
            element_wise = self._is_element_wise()
        except (RuntimeError, IndexError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"cell {self.name!r}: step must run on tensors of any shape, without Python branches: {reason}"
            ) from error
        if any(new.requires_grad for new in together):
            raise ValueError(
                f"cell {self.name!r}: step uses a tensor that asks for gradients, which it would not get: what a step "
                "captures is a constant. Make it a gate of its bias alone (docs/tutorial_cell.md), or detach it"
            )
        if all(self._random_numbers_were_drawn() for _ in range(3)):  # other threads may draw too, now and then
            raise ValueError(
                f"cell {self.name!r}: step draws random numbers, and the backward pass would draw others: draw them "
                "before the recurrence and give them to the cell as a gate with an input part"
            )
        if not element_wise:
            raise ValueError(
                f"cell {self.name!r}: step is not element-wise: a unit's new states must depend on that unit's gates "
                "and states alone, so no mean, softmax or indexing"
            )

    def _is_element_wise(self) -> bool:
        """Whether every unit's new states are the same computed alone; a backend that takes the step as it is, such as
        vanilla, would mix units and sequences without a word."""
        # Of another shape than the example, which a captured tensor may have, and in an order that sorting changes.
        example = [[value.mT[[2, 0, 1]][:, [1, 3, 0, 2]] for value in group] for group in self._example()]
        together = self._updated(example)
        if any(new.shape != (3, 4) for new in together):
            return False
        for row, column in torch.cartesian_prod(torch.arange(3), torch.arange(4)).tolist():
            unit = slice(row, row + 1), slice(column, column + 1)
            for new, alone in zip(together, self._updated(example, unit), strict=True):
                if not torch.allclose(new[unit], alone, equal_nan=True):
                    return False
        return True

    def _random_numbers_were_drawn(self) -> bool:
        before = torch.get_rng_state()
        self._updated(self._example())
        return not torch.equal(before, torch.get_rng_state())

    def _updated(self, example: Iterable[Iterable[Tensor]], unit: tuple[slice, ...] = ()) -> tuple[Tensor, ...]:
        """The new states of an example, or of some of its units alone."""
        return self.update(*([value[unit].clone() for value in group] for group in example))  # it may work in place

    def _example(self) -> tuple[Tensor, Tensor]:
        """Gates [G, 4, 3] and states [S, 4, 3] of both signs."""
        size = len(self.gates), len(self.states)
        values = torch.linspace(-2, 1, 12 * sum(size), dtype=torch.float64, device="cpu").exp() - 0.7
        return values.view(-1, 4, 3).split(size)

    def _digest(self) -> str:
        """Of the names and of what the step computes, to the digits that all machines agree on: tells the cell from
        others of its name in every process, which a step's code does not between versions of Python."""
        new = [
            state
            for size in (1, 30)
            for state in self.update(*([size * x for x in group] for group in self._example()))
        ]
        values = [f"{value:.4g}" if abs(value) > 1e-6 else "0" for value in torch.stack(new).flatten().tolist()]
        names = self.states, self.gates, self.input_gates, self.recurrent_gates, self.float16_states
        return hashlib.sha256(repr((names, values)).encode()).hexdigest()[:8]

    def update(self, gates: list[Tensor], states: list[Tensor]) -> tuple[Tensor, ...]:
        """One step: `gates` in the order of `self.gates` and `states` -> the new states."""
        new = self.step(*gates, *states)
        new = tuple(new) if isinstance(new, tuple | list) else (new,)
        if len(new) != len(self.states) or not all(isinstance(state, Tensor) for state in new):
            types = ", ".join(type(state).__name__ for state in new)
            raise ValueError(f"cell {self.name!r}: step must return a tensor for each of {self.states}, not ({types})")
        return new


@contextmanager
def _one_thread() -> Iterator[None]:
    """A process that has started OpenMP's threads cannot be forked, and importing this package is to start none."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Unknown(Tensor):
    """A tensor whose values are not for Python. A meta tensor would do, but its operators import TorchDynamo."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        if function in _LOOKS_AT_VALUES:
            raise RuntimeError("it looks at the values of a tensor")
        captured = (x for x in arguments if isinstance(x, Tensor) and not isinstance(x, cls))
        if elsewhere := [x.device for x in captured if x.device.type != "cpu"]:
            raise RuntimeError(
                f"it captures a tensor on {elsewhere[0]}: make it with device='cpu', and steps on every device take it"
            )
        return super().__torch_function__(function, types, arguments, options or {})


_LOOKS_AT_VALUES = {getattr(Tensor, name) for name in ("__bool__", "__float__", "__int__", "item", "tolist", "numpy")}
_RESERVED = ("d_", "new_", "factor")
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_KEY: dict[str, Cell] = {}
_REGISTRY: dict[str, Cell] = {}
_BUILT_IN: set[str] = set()


def _unique_key(cell: Cell) -> str:
    first = key = f"{cell.name}@{cell._digest()}"
    number = 1
    while key in _BY_KEY:  # they may differ where the digest does not look
        number += 1
        key = f"{first}#{number}"
    return key


def _importable(step: Callable) -> bool:
    """Whether pickle can name it, as it cannot name lambdas and local functions."""
    try:
        return resolve_name(f"{step.__module__}:{step.__qualname__}") is step
    except (AttributeError, ImportError, ValueError):
        return False


def _definition(cell: Cell) -> tuple:
    return cell.name, cell.step, cell.states, cell.input_gates, cell.recurrent_gates, cell.float16_states


def _unpickled(*definition) -> Cell:
    """The cell of that definition that this process has, and with it all that was made from it, or a new one."""
    return next((cell for cell in _BY_KEY.values() if _same(_definition(cell), definition)), None) or Cell(*definition)


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


def register(cell: Cell) -> Cell:
    """Make `cell` known under its name to configs and `function="..."`; a later cell of that name wins, but for the
    built-in ones, whose names stay theirs."""
    if not isinstance(cell, Cell):
        raise TypeError(f"register takes a flashrnn.Cell, not {type(cell).__name__}")
    if "." in cell.name:
        raise ValueError(f"{cell.name!r} cannot be registered: a name with dots is looked for in a module")
    if cell.name in _BUILT_IN:
        raise ValueError(f"{cell.name!r} is a built-in cell: give yours another name")
    _REGISTRY[cell.name] = cell
    return cell


def get_cell(function: str | Cell) -> Cell:
    """The cell itself, the registered cell of that name, or what "module.name" imports."""
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
    """The names of all registered cells."""
    return tuple(sorted(_REGISTRY))


def cell_of_key(key: str) -> Cell:
    """The cell of `Cell.key`, which may be that of an exported program, from another process."""
    if key in _BY_KEY:
        return _BY_KEY[key]
    first = key.rpartition("#")[0]
    if first in _BY_KEY:
        warnings.warn(
            f"an exported program asks for the second cell with the key {first!r}: taking the first", stacklevel=2
        )
        return _BY_KEY[first]
    raise ValueError(
        f"no cell {key!r} here: a program that was exported with cell {key.partition('@')[0]!r} needs it, as it was "
        "then; import the module that defines it first"
    )


def _elman(g, h):
    return torch.tanh(g)


def _gru(g, r, z, n, h):
    r, z = torch.sigmoid(r), torch.sigmoid(z)
    return z * h + (1 - z) * torch.tanh(n + r * g)


def _lstm(i, f, z, o, h, c):
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(z)
    return torch.sigmoid(o) * torch.tanh(c), c


def _slstm(i, f, z, o, h, c, n, m):
    """xLSTM (arXiv 2405.04517), eq. 8-17 with exponential input gate; m keeps the exponentials in range."""
    old_m = logsigmoid(f) + m
    rise = i - old_m
    larger = (n == 0) | (rise > 0)  # n is 0 only before the first step, where i is all there is
    new_m = torch.where(larger, i, old_m)
    smaller = torch.exp(-torch.abs(rise))  # of exp(i - new_m) and exp(old_m - new_m), one is 1
    i, f = torch.where(larger, 1.0, smaller), torch.where(larger, smaller, 1.0)
    c = f * c + i * torch.tanh(z)
    n = torch.clamp(f * n + i, min=1)
    return torch.sigmoid(o) * c / n, c, n, new_m


ELMAN = register(Cell("elman", _elman, states=("h",)))
GRU = register(Cell("gru", _gru, states=("h",), input_gates=("r", "z", "n"), recurrent_gates=("g", "r", "z")))
LSTM = register(Cell("lstm", _lstm, states=("h", "c"), float16_states=True))
SLSTM = register(Cell("slstm", _slstm, states=("h", "c", "n", "m"), float16_states=True))
_BUILT_IN.update(_REGISTRY)
