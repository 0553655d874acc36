"""Checks of a cell's step, which must be computable for one unit at a time and without Python."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flashrnn._torch_private import set_openmp_threads
from flashrnn.cells.reductions import CALLED as REDUCTIONS

Update = Callable[[list[Tensor], list[Tensor]], tuple[Tensor, ...]]  # gates, states -> new states
Example = tuple[Tensor, Tensor]  # gates [G, ...], states [S, ...]

_RESERVED = ("d_", "new_", "factor")
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def gates_of(cell: str, step: Callable, states: tuple[str, ...]) -> tuple[str, ...]:
    """Return the gates of a step: its parameters without a default value, except the last ones, which are its states.

    Raises:
        ValueError: the names do not fit the signature, or are reserved for traces. The message names the `cell`.
    """
    signature = inspect.signature(step).parameters.values()
    parameters = tuple(one.name for one in signature if one.default is one.empty)  # others are constants
    named = [one.name for one in signature if one.name in parameters and one.kind not in _BY_POSITION]
    if named:
        raise ValueError(
            f"cell {cell!r}: step takes {named} by name or in any number, but gates and states are given one "
            "by one, by position; put an argument of your own after them, with a default"
        )
    gates = parameters[: len(parameters) - len(states)]
    if not states or parameters[len(gates) :] != states or not gates:
        raise ValueError(
            f"cell {cell!r}: step{parameters} must take the gates and then the states {states}, by these names"
        )
    reserved = [name for name in parameters if name.startswith(_RESERVED)]
    if reserved:
        raise ValueError(f"cell {cell!r}: names {reserved} start with one of {_RESERVED}, which traces use")
    return gates


def check_names(cell: str, kind: str, names: tuple[str, ...] | None) -> None:
    """Raise ValueError for a single string instead of a tuple of names."""
    if isinstance(names, str):
        raise ValueError(f"cell {cell!r}: {kind}={names!r} must be a tuple of names, as in ({names!r},)")


def some_gates(cell: str, kind: str, names: Iterable[str] | None, gates: tuple[str, ...]) -> tuple[str, ...]:
    """Return the named gates, at least one, in the order of `gates`; None names all."""
    names = gates if names is None else tuple(names)
    if not names:
        raise ValueError(f"cell {cell!r}: {kind}={names} must name at least one of the gates {gates}; None names all")
    unknown = set(names) - set(gates)
    if unknown:
        raise ValueError(f"cell {cell!r}: {kind} {sorted(unknown)} are not among its gates {gates}")
    return tuple(gate for gate in gates if gate in names)


def example(gates: int, states: int) -> Example:
    """Return example gates [G, 4, 3] and states [S, 4, 3] with both signs."""
    size = gates, states
    values = torch.linspace(-2, 1, 12 * sum(size), dtype=torch.float64, device="cpu").exp() - 0.7
    return values.view(-1, 4, 3).split(size)


def check_step(cell: str, update: Update, gates: int, states: int) -> None:
    """Raise ValueError for a step that backends cannot compute, or would compute differently."""
    values = example(gates, states)
    try:
        update(*([value.as_subclass(_Unknown) for value in group] for group in values))
        together = _updated(update, values)
        element_wise = _is_element_wise(update, values)
    except (RuntimeError, IndexError) as error:
        reason = str(error).partition("\n")[0]
        if "size of tensor" in reason:
            reason += "; a value for each unit is a gate of its bias alone (docs/tutorial_cell.md)"
        raise ValueError(
            f"cell {cell!r}: step must run on tensors of any shape, without Python branches: {reason}"
        ) from error
    if any(new.requires_grad for new in together):
        raise ValueError(
            f"cell {cell!r}: step uses a tensor that asks for gradients, which it would not get: what a step "
            "captures is a constant. Make it a gate of its bias alone (docs/tutorial_cell.md), or detach it"
        )
    if all(_draws_random_numbers(update, values) for _ in range(3)):  # repeated, because other threads may draw too
        raise ValueError(
            f"cell {cell!r}: step draws random numbers, and the backward pass would draw others: draw them "
            "before the recurrence and give them to the cell as a gate with an input part"
        )
    if not element_wise:
        raise ValueError(
            f"cell {cell!r}: step is not element-wise: a unit's new states must depend on that unit's gates "
            "and states alone, so no torch.mean, softmax or indexing; use flashrnn.mean, sum, max, layer_norm and "
            "rms_norm to read the head's other units"
        )


def _is_element_wise(update: Update, values: Example) -> bool:
    """Return whether the new states of a unit are the same if it is computed alone, given the results of reductions.

    Otherwise, backend `vanilla`, which runs the step as it is, would silently mix units and sequences.
    """
    # with another shape than the example, which a captured tensor might have, and an order that sorting would change
    values = [[value.mT[[2, 0, 1]][:, [1, 3, 0, 2]] for value in group] for group in values]
    with _Reductions() as reductions:
        together = _updated(update, values)
    if any(new.shape != (3, 4) for new in together):
        return False
    for row, column in torch.cartesian_prod(torch.arange(3), torch.arange(4)).tolist():
        unit = slice(row, row + 1), slice(column, column + 1)
        with reductions.given_to(unit) as given:
            alone = _updated(update, values, unit)
        pairs = *zip((new[unit] for new in together), alone, strict=True), *given.operands
        if not all(torch.allclose(one, other, equal_nan=True) for one, other in pairs):
            return False
    return True


class _Reductions(TorchFunctionMode):
    """A mode that records the reductions of a step or, made by `given_to` a unit, replays the recorded ones."""

    def __init__(self) -> None:
        super().__init__()
        self._recorded: list[tuple[Tensor, Tensor]] = []  # operands and results
        self._unit: tuple[slice, ...] | None = None
        self.operands: list[tuple[Tensor, Tensor]] = []  # of the unit: recorded, and in the replay

    def given_to(self, unit: tuple[slice, ...]) -> "_Reductions":
        given = _Reductions()
        given._recorded, given._unit = self._recorded, unit
        return given

    def __torch_function__(self, function, types, arguments=(), options=None):
        if function not in REDUCTIONS:
            return function(*arguments, **(options or {}))
        (x,) = arguments
        if self._unit is None:
            self._recorded.append((x.clone(), function(x)))
            return self._recorded[-1][1]
        operand, result = (one.expand(3, 4)[self._unit] for one in self._recorded[len(self.operands)])
        self.operands.append((operand, x.clone()))  # a copy, because the step may change x
        return result


def _draws_random_numbers(update: Update, values: Example) -> bool:
    before = torch.get_rng_state()
    _updated(update, values)
    return not torch.equal(before, torch.get_rng_state())


def _updated(update: Update, values: Iterable[Iterable[Tensor]], unit: tuple[slice, ...] = ()) -> tuple[Tensor, ...]:
    """Return the new states of an example, or of some of its units."""
    return update(*([value[unit].clone() for value in group] for group in values))  # copies: it may work in place


@contextmanager
def one_thread() -> Iterator[None]:
    """A context in which PyTorch's operators only use the calling thread.

    A process that has started OpenMP threads cannot be forked, so importing this package must not start any.
    `torch.set_num_threads` would also change the setting of all other threads of the process.
    """
    threads = torch.get_num_threads()
    set_openmp_threads(1)
    try:
        yield
    finally:
        set_openmp_threads(threads)


class _Unknown(Tensor):
    """A tensor whose values Python cannot read. Unlike meta tensors, its operators do not import TorchDynamo."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        if function in _LOOKS_AT_VALUES:
            raise RuntimeError("it looks at the values of a tensor, which only torch.where may do")
        captured = (x for x in arguments if isinstance(x, Tensor) and not isinstance(x, cls))
        if elsewhere := [x.device for x in captured if x.device.type != "cpu"]:
            raise RuntimeError(
                f"it captures a tensor on {elsewhere[0]}: make it with device='cpu', and steps on every device take it"
            )
        return super().__torch_function__(function, types, arguments, options or {})


_LOOKS_AT_VALUES = {getattr(Tensor, name) for name in ("__bool__", "__float__", "__int__", "item", "tolist", "numpy")}
