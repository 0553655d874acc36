"""The decoders of a model, kept between calls, so that a graph is captured once."""

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
    """The decoders that a model has used last. A copy of the model starts with none."""

    def __init__(self) -> None:
        self._decoders: OrderedDict[tuple, Decoder] = OrderedDict()

    def __deepcopy__(self, memo: dict) -> "DecoderCache":
        return DecoderCache()

    def __reduce__(self) -> tuple:
        return DecoderCache, ()

    @property
    def is_empty(self) -> bool:
        """Return whether the model has not generated more than one token yet."""
        return not self._decoders

    def prepare(self, model: SequenceModel, batch: int) -> None:
        """Begin to compile the kernels of a model's first step, while it reads its first prompts of `batch` rows."""
        if self.is_empty:
            compile_ahead(model, rows_for(batch))

    def get(self, model: SequenceModel, params: SamplingParams, like: States, batch: int, length: int) -> Decoder:
        """Return a Decoder without sequences, for a batch of up to `length` tokens; `like` are states of the model."""
        capacity = 1 << (length - 1).bit_length() if any(has_kv_cache(block.mixer) for block in model.blocks) else 0
        device = like[0][0].device
        if device.type == "cpu":  # where nothing is captured, but steps may have copies of weights
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
