"""The states of a SequenceModel as the cache that transformers passes from call to call."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache

from .backbone import States


class StateCache(Cache):
    """The states of all blocks. Their size is constant, except for the keys and values of attention.

    Attributes:
        states: what SequenceModel.forward returns; None before the first token.
        length: number of tokens read, padding included.
    """

    is_croppable = False  # a recurrent state cannot go back

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.states: States | None = None
        self.length = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._replace(lambda tensor: tensor[beam_idx])

    def batch_select_indices(self, indices: Tensor) -> None:
        self._replace(lambda tensor: tensor[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._replace(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def _replace(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.states is not None:
            self.states = [tuple(map(function, state)) for state in self.states]

    def reset(self) -> None:
        self.states, self.length = None, 0

    def crop(self, max_length: int) -> None:
        raise ValueError(
            f"a recurrent state cannot go back to {max_length} tokens; read the text again, or keep a copy of the state"
        )

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for state in self.states or [] for tensor in state)


def document_starts(attention_mask: Tensor, length: int, past: int) -> Tensor | None:
    """Return a mask that is True at the first token after left padding, bool [B, length]; None if there is no padding.

    Args:
        attention_mask: [B, past + length], 0 at padding.
        length: number of new tokens.
        past: number of tokens in the cache.

    Raises:
        ValueError: the mask has another shape, or padding between tokens.
    """
    if attention_mask.ndim != 2 or attention_mask.shape[1] != past + length:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}: expected [batch, {past + length}], "
            f"for {past} tokens in the cache and {length} new ones"
        )
    mask = attention_mask.bool()
    if mask.all():
        return None
    starts = mask & ~F.pad(mask[:, :-1], (1, 0))
    starts[:, 0] = False  # there is no padding before it
    if (starts & (mask.cumsum(dim=1) > 1)).any():
        raise ValueError(
            "attention_mask has padding between tokens, which would change the recurrent state. "
            "Pad on the left: tokenizer.padding_side = 'left'"
        )
    starts = starts[:, past:]
    return starts if starts.any() else None
