"""The Decoders of a model, kept from call to call: a graph is captured once."""

from collections import OrderedDict

import torch

from models.backbone import SequenceModel, States
from models.generation.buffers import looks_back
from models.generation.choice import Choice
from models.generation.decoder import Decoder, rows_for

_KEPT = 4


class Decoders:
    """The last few Decoders that a model has used. A copy of the model has none of them."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple, Decoder] = OrderedDict()

    def __deepcopy__(self, memo: dict) -> "Decoders":
        return Decoders()

    def __reduce__(self) -> tuple:
        return Decoders, ()

    def get(self, model: SequenceModel, choice: Choice, like: States, batch: int, length: int) -> Decoder:
        """Return a Decoder without sequences, for a batch of up to `length` tokens; `like` are states of the model."""
        capacity = 1 << (length - 1).bit_length() if any(looks_back(block.mixer) for block in model.blocks) else 0
        device = like[0][0].device
        if device.type == "cpu":  # where nothing is captured, but steps may have copies of weights
            return Decoder(model, choice, like, batch, capacity)
        key = choice, rows_for(batch), capacity, _captured(model)
        if key not in self._kept:
            self._kept[key] = Decoder(model, choice, like, key[1], capacity)
        self._kept.move_to_end(key)
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        decoder = self._kept[key]
        decoder.free(*range(decoder.rows))
        return decoder


def _captured(model: SequenceModel) -> tuple:
    """All of a model and of PyTorch's settings that a graph holds. Weights that change in place it sees."""
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    weights = tuple((p.data_ptr(), p.dtype) for p in model.parameters())
    return torch.backends.cuda.matmul.fp32_precision, autocast, weights
