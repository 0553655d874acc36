"""The config.json of a SequenceModel: its sizes, and its mixers by their names in `models.mixers`."""

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedConfig

from flashrnn import get_cell

from .backbone import SequenceModel

MIXERS = f"{__package__}.mixers"


class FlashRNNConfig(PreTrainedConfig):
    """The arguments of a SequenceModel.

    `mixer` is {"name": a class of models.mixers, **its arguments}. With a pattern, it has one such dictionary for each
    name in the pattern.
    """

    model_type = "flashrnn"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_hidden_layers": "num_blocks",
        "num_attention_heads": "num_heads",
    }
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    vocab_size: int = 50257
    d_model: int = 768
    num_blocks: int = 12
    num_heads: int | None = None
    mlp: bool = True
    mixer: dict[str, Any] | None = None
    pattern: list[str] | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = False

    @classmethod
    def from_hydra(cls, model: dict[str, Any]) -> "FlashRNNConfig":
        """Return the config for the section `model` of a training config (configs/model/*.yaml with all sizes set)."""
        if model["num_classes"] != model["vocab_size"]:
            raise ValueError(
                f"the model has {model['num_classes']} classes for a vocabulary of {model['vocab_size']}: "
                "only language models can be exported, such as that of experiment=text_tiny"
            )
        sizes = {key: model[key] for key in ("vocab_size", "d_model", "num_blocks", "num_heads")}
        mixer, pattern = model["mixer"], model.get("pattern")
        if pattern is None:
            mixer = _described(mixer)
        else:
            mixer = {name: _described(mixer[name]) for name in dict.fromkeys(pattern)}
        return cls(**sizes, mlp=model.get("mlp", True), mixer=mixer, pattern=pattern)

    @property
    def _mixers(self) -> dict[str, dict[str, Any]]:
        """The mixers by their names in the pattern; without a pattern, the name is ""."""
        return {"": self.mixer or {}} if self.pattern is None else self.mixer

    @property
    def foreign_cells(self) -> list[str]:
        """The cells in modules of the user, as module.name."""
        cells = (str(mixer.get("function", "")) for mixer in self._mixers.values())
        return [cell for cell in cells if "." in cell]

    def import_cells(self) -> "FlashRNNConfig":
        """Import the cells that the config names in other modules, and return self. Only for trusted configs."""
        for cell in self.foreign_cells:
            get_cell(cell)
        return self

    def build(self) -> SequenceModel:
        """Return a newly initialised model.

        Raises:
            ValueError: a cell is in a module that has not been imported. A config must not make us import code.
        """
        for cell in self.foreign_cells:
            if (module := cell.rpartition(".")[0]) not in sys.modules:
                raise ValueError(f"the model uses the cell {cell}: import {module} first, if you trust it")
        mixers = {name: _builder(mixer) for name, mixer in self._mixers.items()}
        sizes = {"d_model": self.d_model, "num_blocks": self.num_blocks, "num_heads": self.num_heads, "mlp": self.mlp}
        mixer = mixers[""] if self.pattern is None else mixers
        return SequenceModel(self.vocab_size, mixer, pattern=self.pattern, **sizes)


def _described(mixer: dict[str, Any]) -> dict[str, Any]:
    """Return the mixer of a training config in the format of FlashRNNConfig.mixer."""
    of_this_machine = ("_target_", "_partial_", "backend")
    options = {key: value for key, value in mixer.items() if key not in of_this_machine}
    return {"name": mixer["_target_"].removeprefix(f"{MIXERS}."), **options}


def _builder(mixer: dict[str, Any]) -> Callable[..., nn.Module]:
    options = dict(mixer)
    return partial(mixer_class(options.pop("name", "")), **options)


def mixer_class(name: str) -> type[nn.Module]:
    """Return the class of models.mixers with this name, such as "RNNMixer" or "mamba.MambaMixer".

    Raises ValueError for any other name.
    """
    module, _, class_name = f".{name}".rpartition(".")
    try:
        found = getattr(import_module(f"{MIXERS}{module}"), class_name, None)
    except ImportError:
        found = None
    if not (isinstance(found, type) and issubclass(found, nn.Module) and found.__module__.startswith(f"{MIXERS}.")):
        raise ValueError(
            f"mixer {name!r}: there is no such class in {MIXERS}, the only package that a config can name classes of"
        )
    return found
