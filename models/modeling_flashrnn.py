"""An exported model for machines that have `pip install flashrnn-lm transformers` alone.

`scripts.export` copies this file into the folder of the model, and `config.json` names its classes, so that
`AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)` finds them.
"""

from flashrnn_lm import hugging_face  # models/ by its name in the wheel


class FlashRNNConfig(hugging_face.FlashRNNConfig):
    """The config of the wheel, in a class of this file: transformers saves the file with what is loaded by it."""


class FlashRNNForCausalLM(hugging_face.FlashRNNForCausalLM):
    """The model of the wheel."""

    config_class = FlashRNNConfig
