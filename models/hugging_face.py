"""A SequenceModel as a causal language model of transformers: `save_pretrained`, `Auto` classes, `generate`.

Importing this module registers the classes with AutoConfig and AutoModelForCausalLM. Nothing is loaded but safetensors
and JSON: a config can name nothing but one of `models.mixers`. In the wheel this package is `flashrnn_lm`, by which an
exported folder loads elsewhere (`modeling_flashrnn.py`).
"""

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.cache_utils import Cache
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutputWithPast

from flashrnn import get_cell

from .backbone import SequenceModel, States
from .generation import row_random
from .generation.decoder import unsupported_reason
from .generation.decoder_cache import DecoderCache
from .generation.loop import complete
from .generation.request import Request, request

logger = logging.getLogger(__name__)

REMOTE_CODE = Path(__file__).with_name("modeling_flashrnn.py")  # saved with a model, for machines without this clone

MIXERS = f"{__package__}.mixers"


class FlashRNNConfig(PreTrainedConfig):
    """Sizes of a SequenceModel, and its mixer as {"name": a class of models.mixers, **its arguments}; with a pattern
    several of these by their names in it."""

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
        """Return the config of a training config's section `model`: configs/model/*.yaml with all sizes set."""
        if model["num_classes"] != model["vocab_size"]:
            raise ValueError(
                f"the model has {model['num_classes']} classes for a vocabulary of {model['vocab_size']}: "
                "only language models can be exported, such as those of experiment=text_tiny"
            )
        sizes = {key: model[key] for key in ("vocab_size", "d_model", "num_blocks", "num_heads")}
        pattern = model.get("pattern")
        mixer = model["mixer"]
        mixer = _described(mixer) if pattern is None else {name: _described(mixer[name]) for name in set(pattern)}
        sizes["mlp"] = model.get("mlp", True)  # which a config may leave to its default
        return cls(**sizes, mixer=mixer, pattern=pattern)

    @property
    def _mixers(self) -> dict[str, dict[str, Any]]:
        """The mixers by their names in the pattern; the only one of a model without a pattern has the name ""."""
        return {"": self.mixer or {}} if self.pattern is None else self.mixer

    @property
    def _foreign_cells(self) -> list[str]:
        cells = (str(mixer.get("function", "")) for mixer in self._mixers.values())
        return [cell for cell in cells if "." in cell]

    def import_cells(self) -> "FlashRNNConfig":
        """Import the cells that the config names of other modules, for those who trust it; returns itself."""
        for cell in self._foreign_cells:
            get_cell(cell)
        return self

    def build(self) -> SequenceModel:
        """Return the model, newly initialised."""
        for cell in self._foreign_cells:  # from_pretrained is not to run code that somebody's config names
            if (module := cell.rpartition(".")[0]) not in sys.modules:
                raise ValueError(f"the model's cell is {cell}: import {module} first, if you trust it")
        mixers = {name: _builder(mixer) for name, mixer in self._mixers.items()}
        sizes = {"d_model": self.d_model, "num_blocks": self.num_blocks, "num_heads": self.num_heads, "mlp": self.mlp}
        mixer = mixers[""] if self.pattern is None else mixers
        return SequenceModel(self.vocab_size, mixer, pattern=self.pattern, **sizes)


def _described(mixer: dict[str, Any]) -> dict[str, Any]:
    """Return a mixer of a training config as FlashRNNConfig has it."""
    of_this_machine = ("_target_", "_partial_", "backend")
    options = {key: value for key, value in mixer.items() if key not in of_this_machine}
    return {"name": mixer["_target_"].removeprefix(f"{MIXERS}."), **options}


def _builder(mixer: dict[str, Any]) -> Callable[..., nn.Module]:
    options = dict(mixer)
    return partial(mixer_class(options.pop("name", "")), **options)


def mixer_class(name: str) -> type[nn.Module]:
    """Return the class of models.mixers of this name ("RNNMixer", "mamba.MambaMixer"): no config names anything
    else."""
    module, _, class_name = f".{name}".rpartition(".")
    try:
        found = getattr(import_module(f"{MIXERS}{module}"), class_name, None)
    except ImportError:
        found = None
    if not (isinstance(found, type) and issubclass(found, nn.Module) and found.__module__.startswith(f"{MIXERS}.")):
        raise ValueError(
            f"mixer {name!r}: there is no such class in {MIXERS}, and models import no other module: move it there"
        )
    return found


class StateCache(Cache):
    """What all blocks remember of the tokens so far: constant in size, but for attention's keys and values.

    `states` is None, or what SequenceModel.forward returns; `length` counts the tokens, padding included.
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
        raise ValueError(f"a recurrent state cannot go back to {max_length} tokens; start anew, or keep a copy of it")

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for state in self.states or [] for tensor in state)


def document_starts(attention_mask: Tensor, length: int, past: int) -> Tensor | None:
    """Return a mask that is True at the first token behind left padding, bool [B, length]; None where nothing starts
    behind padding.

    Args:
        attention_mask: [B, past + length], 0 at padding.
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
    starts[:, 0] = False  # nothing comes before it that could be left behind
    if (starts & (mask.cumsum(dim=1) > 1)).any():
        raise ValueError(
            "attention_mask has padding between tokens: a recurrent state runs through it. "
            "Pad on the left: tokenizer.padding_side = 'left'"
        )
    starts = starts[:, past:]
    return starts if starts.any() else None


def _without_padding(input_ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """Return the prompts' own tokens; `attention_mask` may be of a longer text, whose end they are."""
    rows = input_ids.tolist()
    if mask is None:
        return rows
    kept = mask[:, -input_ids.shape[1] :].bool().tolist()
    return [[token for token, keep in zip(*pair, strict=True) if keep] for pair in zip(rows, kept, strict=True)]


class FlashRNNForCausalLM(PreTrainedModel, GenerationMixin):
    """A SequenceModel with the interface of transformers' causal language models."""

    config_class = FlashRNNConfig
    base_model_prefix = "model"
    _input_embed_layer = "embedding"
    _is_stateful = True  # a token that has been read cannot be taken back

    def __init__(self, config: FlashRNNConfig) -> None:
        super().__init__(config)
        self.model = config.build()
        self._decoder_cache = DecoderCache()
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any):
        """Load a model as transformers does, but from safetensors alone, and with an error for weights that are
        missing."""
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs | {"use_safetensors": True})
        if wrong := {kind: sorted(map(str, info[kind])) for kind in ("missing_keys", "unexpected_keys") if info[kind]}:
            raise ValueError(f"the weights do not fit the model of config.json: {wrong}")
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Save a model as transformers does, and the code by which `trust_remote_code=True` loads it elsewhere;
        `push_to_hub` uploads both."""
        names = {"AutoConfig": "FlashRNNConfig", "AutoModelForCausalLM": "FlashRNNForCausalLM"}
        self.config.auto_map = {auto: f"{REMOTE_CODE.stem}.{name}" for auto, name in names.items()}
        super().save_pretrained(save_directory, *args, **kwargs)
        if Path(save_directory).is_dir():
            shutil.copyfile(REMOTE_CODE, Path(save_directory, REMOTE_CODE.name))

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: a SequenceModel has initialised itself."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `forward` makes the cache

    def get_output_embeddings(self) -> nn.Module:
        return self.model.head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Set the output layer for `resize_token_embeddings`, which has set input embeddings of as many tokens
        before."""
        self.model.head = new_embeddings
        self.model.vocab_size = self.model.num_classes = new_embeddings.out_features

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: StateCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Return logits, and with `labels` the loss of predicting each next token.

        Args:
            input_ids: int64 [B, T], the tokens that are not in the cache yet.
            attention_mask: [B, tokens in the cache + T], 0 at padding, which must be on the left of a sequence that
                goes on from the cache. Padding leaves no trace in logits or states of what follows it.
            past_key_values: what an earlier call returned; it is updated in place.
            labels: int64 [B, T], the same as input_ids; -100 is not scored. They are shifted here.
            use_cache: return the cache; None: config.use_cache, but not in training.
            output_hidden_states: return what goes into each block, and what comes out of the last norm, each
                [B, T, d_model]; None: config.output_hidden_states.
            logits_to_keep: give the logits of that many last positions only; 0: of all; a tensor: of these positions.
                With 1, and without gradients, a long prompt takes the memory of a piece of it.

        Returns:
            loss, logits [B, T, vocab_size], past_key_values and hidden_states.
        """
        if input_ids is None:
            raise ValueError("the model takes input_ids, and no inputs_embeds")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        cache = StateCache() if past_key_values is None else past_key_values
        T = input_ids.shape[1]
        reset = None if attention_mask is None else document_starts(attention_mask, T, cache.length)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        hidden_states = None
        if (
            isinstance(logits_to_keep, int)
            and logits_to_keep == 1
            and not (output_hidden_states or torch.is_grad_enabled())
        ):
            logits, states = self.model.read(input_ids, cache.states, reset)
            logits = logits.unsqueeze(1)
        else:
            with self._inputs_of_blocks(output_hidden_states) as inputs:
                last_hidden, states = self.model.hidden_states(input_ids, cache.states, reset)
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.model.head(last_hidden[:, kept])
            hidden_states = (*inputs, last_hidden) if output_hidden_states else None
        if use_cache:
            cache.states, cache.length = states, cache.length + T
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=cache if use_cache else None,
            hidden_states=hidden_states,
        )
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        **inputs: Any,
    ) -> GenerateDecoderOnlyOutput | Tensor:
        """Run the loop of greedy decoding and of sampling that `generate` calls: by a Decoder, or that of
        transformers."""
        asked = request(logits_processor, stopping_criteria, generation_config, inputs)
        reason = asked if isinstance(asked, str) else unsupported_reason(self.model)
        if reason is None and (synced_gpus or self.device.type not in ("cpu", "cuda")):
            reason = "several GPUs" if synced_gpus else f"device {self.device.type}"
        if reason is None:
            return self._decode(input_ids, asked, generation_config, streamer, inputs)
        logger.info("generating by the loop of transformers: %s", reason)
        options = {"synced_gpus": synced_gpus, "streamer": streamer, **inputs}
        return super()._sample(input_ids, logits_processor, stopping_criteria, generation_config, **options)

    def _decode(
        self,
        input_ids: Tensor,
        asked: Request,
        config: GenerationConfig,
        streamer: BaseStreamer | None,
        inputs: dict[str, Any],
    ) -> GenerateDecoderOnlyOutput | Tensor:
        # What the host reads of the prompts comes first: it would wait for the GPU to be done with them.
        keys, penalized = None, asked.penalized(input_ids)
        if asked.params.sample:
            keys = row_random.keys(row_random.new_seed(), _without_padding(input_ids, inputs.get("attention_mask")))
        output = self._prefill(input_ids, config, inputs)
        cache = output.past_key_values
        ids, logits = input_ids.to(self.device), output.logits[:, -1]
        length = cache.length + asked.max_length - ids.shape[1]
        decoder = self._decoder_cache.get(self.model, asked.params, cache.states, len(ids), length)
        first = decoder.load(range(len(ids)), logits, cache.states, cache.length, keys, penalized)
        returned = config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
        padding = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
        text = complete(decoder, first, ids, asked, padding, streamer, exact=bool(returned))
        if returned:
            read = text.shape[1] - 1 - ids.shape[1]  # the last token has not been read
            cache.states, cache.length = decoder.states(len(ids)), cache.length + read
        text = text.to(input_ids.device)
        if config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=text, past_key_values=cache)
        return text

    @contextmanager
    def _inputs_of_blocks(self, asked: bool) -> Iterator[list[Tensor]]:
        inputs: list[Tensor] = []
        blocks = self.model.blocks if asked else ()
        hooks = [block.register_forward_pre_hook(lambda _, given: inputs.append(given[0])) for block in blocks]
        try:
            yield inputs
        finally:
            for hook in hooks:
                hook.remove()


# exist_ok, because one process may have both the clone's package and the wheel's.
AutoConfig.register(FlashRNNConfig.model_type, FlashRNNConfig, exist_ok=True)
AutoModelForCausalLM.register(FlashRNNConfig, FlashRNNForCausalLM, exist_ok=True)
