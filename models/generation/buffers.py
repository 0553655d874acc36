"""States of rows at fixed addresses: a row is loaded with the state of a sequence, and is written over by the next."""

from torch import Tensor, nn

from models.mixers.clock import Clock

State = tuple[Tensor, ...]


def buffers(mixer: nn.Module, state: State, rows: int, capacity: int) -> State:
    """Return buffers for `rows` rows, of zeros, like a state of a few sequences."""
    if looks_back(mixer):
        return mixer.empty_cache(state, rows, capacity)
    return tuple(_rows_like(part, rows) for part in state)


def load(mixer: nn.Module, into: State, rows: Tensor, state: State) -> None:
    """Put the state of some sequences into these `rows` (int64) of buffers."""
    if looks_back(mixer):
        mixer.load_cache(into, rows, state)
        return
    for buffer, part in zip(into, state, strict=True):
        buffer.index_copy_(0, rows, part)


def unload(mixer: nn.Module, state: State, rows: int, clock: Clock) -> State:
    """Return the state of the first `rows` rows as the mixer's `forward` has it."""
    if looks_back(mixer):
        return mixer.cached_state(state, rows, clock)
    return tuple(part[:rows].clone() for part in state)


def first_visible(mixer: nn.Module, state: State) -> Tensor | None:
    """Return the first token that each sequence may look back at, int64 [B]; None where that is the first of all."""
    return mixer.first_visible(state) if looks_back(mixer) else None


def looks_back(mixer: nn.Module) -> bool:
    """Whether the mixer's buffers hold every token."""
    return hasattr(mixer, "empty_cache")


def _rows_like(part: Tensor, rows: int) -> Tensor:
    """Zeros [rows, ...] with the axes of [B, ...] in the same order in memory, which kernels then read as it is."""
    order = sorted(range(part.ndim), key=lambda axis: (-part.stride(axis), -part.shape[axis]))
    shape = [rows if axis == 0 else part.shape[axis] for axis in order]
    return part.new_zeros(shape).permute([order.index(axis) for axis in range(part.ndim)])
