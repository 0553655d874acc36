"""States that are carried from batch to batch, where the windows of a batch follow those of the batch before."""

from collections.abc import Callable

import torch
from torch import Tensor

from models.backbone import States


class CarriedStates:
    """The states after the last windows of all lanes.

    Each of several accumulated batches has its own lanes, a slot. States are those of `SequenceModel.carried`: None for
    a block that carries nothing.
    """

    def __init__(self) -> None:
        self._of_slot: dict[int, States] = {}
        self._saved: list[list[Tensor] | None] | None = None  # [lanes, ...], of a checkpoint, until they are used

    def clear(self) -> None:
        self._of_slot.clear()

    def begin(self, slot: int, continues: Tensor, new: Callable[[], States], place: tuple[int, int, int]) -> States:
        """Return the states that the windows of a batch begin with.

        Args:
            slot: of the batch.
            continues: bool [B], True where a window follows the one before; the others begin with zeros.
            new: returns states of any value for the batch.
            place: number of slots, number of ranks and this rank, which find its share of a checkpoint's lanes.
        """
        if slot not in self._of_slot:
            states = new()
            self._fill(states, slot, len(continues), place)
            self._of_slot[slot] = states
        return [
            state and tuple(part.masked_fill(~continues.view(-1, *[1] * (part.ndim - 1)), 0) for part in state)
            for state in self._of_slot[slot]
        ]

    def keep(self, slot: int, states: States) -> None:
        """Keep the states after the windows of a batch."""
        # Copies: a state may be the end of a tensor over all time steps.
        self._of_slot[slot] = [state and tuple(part.clone() for part in state) for state in states]

    def _fill(self, states: States, slot: int, batch: int, place: tuple[int, int, int]) -> None:
        """Fill `states` with a checkpoint's states of this process's lanes; with zeros if there is no checkpoint."""
        slots, ranks, rank = place
        for state, saved in zip(states, self._saved or [None] * len(states), strict=True):
            for index, part in enumerate(state or ()):
                if saved is None:
                    part.zero_()
                else:
                    part.copy_(saved[index].unflatten(0, (slots, ranks, batch))[slot, rank])

    def state_dict(self, all_gather: Callable[[Tensor], Tensor]) -> list[list[Tensor] | None]:
        """Return the states of all lanes: for each block None or tensors [lanes, ...], by slot, rank and row. Empty if
        nothing was carried.

        Args:
            all_gather: maps a tensor [B, ...] of each rank to that of all ranks, [ranks * B, ...].
        """
        slots = [self._of_slot[slot] for slot in sorted(self._of_slot)]

        def of_block(states: tuple[tuple[Tensor, ...] | None, ...]) -> list[Tensor] | None:
            if states[0] is None:
                return None
            return [torch.cat([all_gather(part).cpu() for part in parts]) for parts in zip(*states, strict=True)]

        return [of_block(states) for states in zip(*slots, strict=True)]

    def load_state_dict(self, saved: list[list[Tensor] | None]) -> None:
        self._saved = saved
