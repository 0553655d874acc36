"""The decoders of a model, cached between calls so that each graph is captured once."""

from collections import OrderedDict

from ..backbone import SequenceModel, States
from ..walk import modules
from .captured import captured
from .decoder import Decoder, rows_for
from .fused_step import compile_ahead
from .sampler import SamplingParams
from .state_buffers import has_kv_cache

_DECODERS = 4


class DecoderCache:
    """The decoders that a model has used most recently. A copy of the model starts with none."""

    def __init__(self) -> None:
        self._decoders: OrderedDict[tuple, Decoder] = OrderedDict()

    def __deepcopy__(self, memo: dict) -> "DecoderCache":
        return DecoderCache()

    def __reduce__(self) -> tuple:
        return DecoderCache, ()

    @property
    def is_empty(self) -> bool:
        """Whether the model has not yet generated more than one token."""
        return not self._decoders

    def prepare(self, model: SequenceModel, batch: int) -> None:
        """Start compiling the kernels of the first step, while the model reads its first batch of prompts."""
        if self.is_empty:
            compile_ahead(model, rows_for(batch))

    def get(self, model: SequenceModel, params: SamplingParams, like: States, batch: int, length: int) -> Decoder:
        """Return a Decoder with free rows for `batch` sequences of up to `length` tokens.

        `like` are states in the format of the model's.
        """
        capacity = 1 << (length - 1).bit_length() if any(has_kv_cache(block.mixer) for block in model.blocks) else 0
        device = like[0][0].device
        if device.type == "cpu":  # not cached: there is no graph to keep, and a step may hold copies of old weights
            return Decoder(model, params, like, batch, capacity)
        key = params, rows_for(batch), capacity, captured(modules(model))
        if key not in self._decoders:
            self._decoders[key] = Decoder(model, params, like, key[1], capacity)
        self._decoders.move_to_end(key)
        while len(self._decoders) > _DECODERS:
            self._decoders.popitem(last=False)
        decoder = self._decoders[key]
        decoder.free(*range(decoder.rows))
        return decoder
