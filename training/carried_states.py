"""States that are carried from batch to batch, for data whose batches contain consecutive windows of long texts."""

from collections.abc import Callable

import torch
from torch import Tensor

from models.backbone import States


class CarriedStates:
    """The states after the last window of every lane (row of consecutive batches).

    With gradient accumulation, each batch of an optimizer step has its own lanes, called a slot. States are those of
    `SequenceModel.carried`, with None for blocks that carry nothing.
    """

    def __init__(self) -> None:
        self._of_slot: dict[int, States] = {}
        self._saved: list[list[Tensor] | None] | None = None  # states of a checkpoint, [lanes, ...] each

    def clear(self) -> None:
        self._of_slot.clear()

    def begin(self, slot: int, continues: Tensor, new: Callable[[], States], place: tuple[int, int, int]) -> States:
        """Return the initial states for the windows of a batch.

        Args:
            slot: the slot of the batch.
            continues: bool [B], True where a window continues the previous one; other windows start with zeros.
            new: returns states with the shapes of the batch and arbitrary values.
            place: number of slots, number of ranks and this rank, which determine its share of a checkpoint's lanes.
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
        """Store the states after the windows of a batch."""
        # Clones, because a state may be a view of a tensor over all time steps.
        self._of_slot[slot] = [state and tuple(part.clone() for part in state) for state in states]

    def _fill(self, states: States, slot: int, batch: int, place: tuple[int, int, int]) -> None:
        """Fill `states` with the checkpoint's states for the lanes of this process, or with zeros if there is none."""
        slots, ranks, rank = place
        for state, saved in zip(states, self._saved or [None] * len(states), strict=True):
            for index, part in enumerate(state or ()):
                if saved is None:
                    part.zero_()
                else:
                    part.copy_(saved[index].unflatten(0, (slots, ranks, batch))[slot, rank])

    def state_dict(self, all_gather: Callable[[Tensor], Tensor]) -> list[list[Tensor] | None]:
        """Return the states of all lanes: for each block None or tensors [lanes, ...], ordered by slot, rank and row.

        The list is empty if nothing was carried.

        Args:
            all_gather: maps a tensor [B, ...] of each rank to the tensor [ranks * B, ...] of all ranks.
        """
        slots = [self._of_slot[slot] for slot in sorted(self._of_slot)]

        def of_block(states: tuple[tuple[Tensor, ...] | None, ...]) -> list[Tensor] | None:
            if states[0] is None:
                return None
            return [torch.cat([all_gather(part).cpu() for part in parts]) for parts in zip(*states, strict=True)]

        return [of_block(states) for states in zip(*slots, strict=True)]

    def load_state_dict(self, saved: list[list[Tensor] | None]) -> None:
        self._saved = saved
