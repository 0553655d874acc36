"""Static buffers for the states of a decoder's rows, which are loaded with one sequence after another."""

from torch import Tensor, nn

from ..mixers.step_context import StepContext

State = tuple[Tensor, ...]


def buffers(mixer: nn.Module, state: State, rows: int, capacity: int) -> State:
    """Return zeroed buffers for `rows` rows, in the format of `state`."""
    if has_kv_cache(mixer):
        return mixer.empty_cache(state, rows, capacity)
    return tuple(_rows_like(part, rows) for part in state)


def load(mixer: nn.Module, into: State, rows: Tensor, state: State) -> None:
    """Copy the state of several sequences into the given rows (int64) of the buffers."""
    if has_kv_cache(mixer):
        mixer.load_cache(into, rows, state)
        return
    for buffer, part in zip(into, state, strict=True):
        buffer.index_copy_(0, rows, part)


def unload(mixer: nn.Module, state: State, rows: int, context: StepContext) -> State:
    """Return the state of the first `rows` rows in the format of the mixer's `forward`."""
    if has_kv_cache(mixer):
        return mixer.cached_state(state, rows, context)
    return tuple(part[:rows].clone() for part in state)


def first_visible(mixer: nn.Module, state: State) -> Tensor | None:
    """Return the first position that each sequence attends to, int64 [B]; None if it is 0 for all."""
    return mixer.first_visible(state) if has_kv_cache(mixer) else None


def has_kv_cache(mixer: nn.Module) -> bool:
    """Return whether the mixer's state holds keys and values of every token."""
    return hasattr(mixer, "empty_cache")


def _rows_like(part: Tensor, rows: int) -> Tensor:
    """Return zeros [rows, ...] with the memory format of `part` [B, ...], so that kernels need no copy."""
    order = sorted(range(part.ndim), key=lambda axis: (-part.stride(axis), -part.shape[axis]))
    shape = [rows if axis == 0 else part.shape[axis] for axis in order]
    return part.new_zeros(shape).permute([order.index(axis) for axis in range(part.ndim)])
