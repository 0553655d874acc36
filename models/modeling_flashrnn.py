"""The code of an exported model, for machines with transformers and the wheel of flashrnn-lm, but no clone.

`scripts.export` copies this file into the folder of the model, and the model's `config.json` names its classes, so that
`AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)` finds them.
"""

from flashrnn_lm import hugging_face  # the wheel contains models/ under this name


class FlashRNNConfig(hugging_face.FlashRNNConfig):
    """The config class of the wheel. As a class of this file, it makes transformers save this file with the model."""


class FlashRNNForCausalLM(hugging_face.FlashRNNForCausalLM):
    """The model class of the wheel."""

    config_class = FlashRNNConfig
