"""A SequenceModel as a causal language model of transformers, with `save_pretrained`, `Auto` classes and `generate`.

Importing this module registers the classes with AutoConfig and AutoModelForCausalLM. Only safetensors and JSON files
are loaded, and a config can name only classes of `models.mixers`. In the wheel this package is called `flashrnn_lm`;
exported models refer to it under that name (`modeling_flashrnn.py`).
"""

import inspect
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutputWithPast

from .generation import row_random
from .generation.decoder import unsupported_reason
from .generation.decoder_cache import DecoderCache
from .generation.loop import complete
from .generation.prompt_reader import PromptReader, ReadingPrompt
from .generation.request import Request, request
from .hugging_face_config import FlashRNNConfig
from .quantization import is_quantized
from .state_cache import StateCache, document_starts
from .walk import is_observed

logger = logging.getLogger(__name__)

REMOTE_CODE = Path(__file__).with_name("modeling_flashrnn.py")  # saved with each model, for machines without a clone


def _without_padding(input_ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """Return the tokens of each prompt without padding.

    The mask [B, L] may cover a longer text that ends with the prompts [B, T].
    """
    rows = input_ids.tolist()
    if mask is None:
        return rows
    kept = mask[:, -input_ids.shape[1] :].bool().tolist()
    return [[token for token, keep in zip(*pair, strict=True) if keep] for pair in zip(rows, kept, strict=True)]


def _is_without_padding(attention_mask: Tensor) -> bool:
    return bool((attention_mask == 1).all())  # waits for the current stream, not for the one that reads a prompt


class FlashRNNForCausalLM(PreTrainedModel, GenerationMixin):
    """A SequenceModel with the interface of transformers' causal language models."""

    config_class = FlashRNNConfig
    base_model_prefix = "model"
    _input_embed_layer = "embedding"
    _is_stateful = True  # the cache cannot drop a token that has been read

    def __init__(self, config: FlashRNNConfig) -> None:
        super().__init__(config)
        self.model = config.build()
        self._decoder_cache, self._prompt_reader = DecoderCache(), PromptReader()
        # The prompt of the running `generate` and its reading, if it was started ahead of transformers' own call.
        self._ahead: tuple[Tensor, ReadingPrompt] | None = None
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any):
        """Load a model as transformers does, but only from safetensors, and raise ValueError if weights do not fit."""
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs | {"use_safetensors": True})
        if wrong := {kind: sorted(map(str, info[kind])) for kind in ("missing_keys", "unexpected_keys") if info[kind]}:
            raise ValueError(f"the weights do not fit the model of config.json: {wrong}")
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Save the model as transformers does, with the code that `trust_remote_code=True` needs to load it elsewhere.

        `push_to_hub` uploads both.
        """
        if is_quantized(self):
            raise ValueError("a model with 8-bit weights cannot be saved: save it before calling `quantize`")
        names = {"AutoConfig": "FlashRNNConfig", "AutoModelForCausalLM": "FlashRNNForCausalLM"}
        self.config.auto_map = {auto: f"{REMOTE_CODE.stem}.{name}" for auto, name in names.items()}
        super().save_pretrained(save_directory, *args, **kwargs)
        if Path(save_directory).is_dir():
            shutil.copyfile(REMOTE_CODE, Path(save_directory, REMOTE_CODE.name))

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: a SequenceModel initialises its own weights."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `forward` creates the cache

    def get_output_embeddings(self) -> nn.Module:
        return self.model.head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Set the output layer, for `resize_token_embeddings`, which has already resized the input embeddings."""
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
        """Return the logits and, with `labels`, the loss of predicting each next token.

        Args:
            input_ids: int64 [B, T], the tokens that are not in the cache yet.
            attention_mask: [B, tokens in the cache + T], 0 at padding. Padding must be on the left if the sequence is
                continued from the cache. It has no effect on the logits and states after it.
            past_key_values: the cache that an earlier call returned; it is updated in place.
            labels: int64 [B, T], normally the same as input_ids, as they are shifted here; -100 is not scored.
            use_cache: return the cache. None means config.use_cache, or False in training mode.
            output_hidden_states: return the input of each block and the output of the last norm, each [B, T, d_model].
                None means config.output_hidden_states.
            return_dict: return a CausalLMOutputWithPast, otherwise a tuple. None means config.return_dict.
            logits_to_keep: return only the logits of the last `logits_to_keep` positions; 0 means all. A tensor lists
                the positions. With 1 and without gradients, a long prompt needs only the memory of one chunk.

        Returns:
            loss, logits [B, T, vocab_size], past_key_values and hidden_states.
        """
        if input_ids is None:
            raise ValueError("the model needs input_ids; inputs_embeds are not supported")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        cache = StateCache() if past_key_values is None else past_key_values
        T = input_ids.shape[1]
        reset = None if attention_mask is None else document_starts(attention_mask, T, cache.length)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        logits, states, hidden_states = self._read(input_ids, cache.states, reset, logits_to_keep, output_hidden_states)
        if use_cache:
            cache.states, cache.length = states, cache.length + T
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=cache if use_cache else None, hidden_states=hidden_states
        )
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()

    def _read(
        self, input_ids: Tensor, states: Any, reset: Tensor | None, logits_to_keep: int | Tensor, all_hidden: bool
    ) -> tuple[Tensor, Any, tuple[Tensor, ...] | None]:
        """Return the logits of the positions to keep, the new states and, with `all_hidden`, all hidden states."""
        last_alone = isinstance(logits_to_keep, int) and logits_to_keep == 1
        if last_alone and not (all_hidden or torch.is_grad_enabled()):
            logits, states = self._prompt_reader.read(self.model, input_ids, states, reset)
            return logits.unsqueeze(1), states, None
        with self._inputs_of_blocks(all_hidden) as inputs:
            last_hidden, states = self.model.hidden_states(input_ids, states, reset)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return self.model.head(last_hidden[:, kept]), states, (*inputs, last_hidden) if all_hidden else None

    @wraps(GenerationMixin.generate)
    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        # Start reading the prompt on the GPU now: transformers needs a millisecond or more before it calls the model.
        ids = kwargs.get("input_ids") if inputs is None else inputs
        reading = self._prompt_reader.begin(self.model, ids) if self._reads_first(ids, args, kwargs) else None
        if reading is None:
            return super().generate(inputs, *args, **kwargs)
        self._ahead = ids, reading
        try:
            return super().generate(inputs, *args, **kwargs)
        finally:
            self._ahead = None
            reading.finish()  # the caller may overwrite the prompt

    def _reads_first(self, ids: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Return whether `generate` will probably read exactly these tokens; `_read_prompt` checks it again."""
        if not isinstance(ids, Tensor) or ids.device != self.device or ids.ndim != 2:
            return False
        # In the first call, `DecoderCache.prepare` compiles the kernels in several processes.
        if kwargs.get("past_key_values") is not None or self._decoder_cache.is_empty or is_observed(self):
            return False
        config = (args[0] if args else kwargs.get("generation_config")) or self.generation_config
        copies = (kwargs.get(name, getattr(config, name)) for name in ("num_beams", "num_return_sequences"))
        if any(number not in (None, 1) for number in copies) or type(self).forward is not FlashRNNForCausalLM.forward:
            return False
        mask = kwargs.get("attention_mask")
        return mask is None or _is_without_padding(mask)

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
        """Run greedy decoding or sampling with a Decoder or, if it does not support the call, with transformers."""
        asked = request(logits_processor, stopping_criteria, generation_config, inputs)
        reason = asked if isinstance(asked, str) else unsupported_reason(self.model)
        if reason is None and (synced_gpus or self.device.type not in ("cpu", "cuda")):
            reason = "several GPUs" if synced_gpus else f"device {self.device.type}"
        if reason is None:
            return self._decode(input_ids, asked, generation_config, streamer, inputs)
        logger.info("generating with the loop of transformers, because of: %s", reason)
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
        # The host reads the prompts before the GPU starts on them: later it would have to wait for the GPU.
        keys, penalized = None, asked.penalized(input_ids)
        if asked.params.sample:
            keys = row_random.keys(row_random.new_seed(), _without_padding(input_ids, inputs.get("attention_mask")))
        if asked.max_length > input_ids.shape[1] + 1:
            self._decoder_cache.prepare(self.model, len(input_ids))
        logits, cache = self._read_prompt(input_ids, config, inputs)
        ids = input_ids.to(self.device)
        length = cache.length + asked.max_length - ids.shape[1]
        decoder = self._decoder_cache.get(self.model, asked.params, cache.states, len(ids), length)
        first = decoder.load(range(len(ids)), logits, cache.states, cache.length, keys, penalized)
        returned = config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
        padding = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
        text = complete(decoder, first, ids, asked, padding, streamer, exact=bool(returned))
        if returned:
            read = text.shape[1] - 1 - ids.shape[1]  # the model has not read the last token
            cache.states, cache.length = decoder.states(len(ids)), cache.length + read
        text = text.to(input_ids.device)
        if config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=text, past_key_values=cache)
        return text

    def _read_prompt(
        self, input_ids: Tensor, config: GenerationConfig, inputs: dict[str, Any]
    ) -> tuple[Tensor, StateCache]:
        """Return the logits after the prompts, [B, vocab_size], and the cache."""
        mask, past = inputs.get("attention_mask"), inputs.get("past_key_values")
        as_begun = self._ahead is not None and self._ahead[0] is input_ids and past is None
        if not (as_begun and (mask is None or _is_without_padding(mask))):
            output = self._prefill(input_ids, config, inputs)
            return output.logits[:, -1], output.past_key_values
        logits, states = self._ahead[1].result()
        cache = StateCache()
        cache.states, cache.length = states, input_ids.shape[1]
        return logits, cache

    @contextmanager
    def _inputs_of_blocks(self, asked: bool) -> Iterator[list[Tensor]]:
        """Collect the inputs of all blocks during the context; none unless `asked`."""
        inputs: list[Tensor] = []
        blocks = self.model.blocks if asked else ()
        hooks = [block.register_forward_pre_hook(lambda _, given: inputs.append(given[0])) for block in blocks]
        try:
            yield inputs
        finally:
            for hook in hooks:
                hook.remove()


# transformers inspects these signatures several times per `generate`, which takes a sixth of its time without a cache.
for method in (FlashRNNForCausalLM.forward, FlashRNNForCausalLM._sample):
    method.__signature__ = inspect.signature(method)
# exist_ok: a process may load the package both from a clone and from the wheel.
AutoConfig.register(FlashRNNConfig.model_type, FlashRNNConfig, exist_ok=True)
AutoModelForCausalLM.register(FlashRNNConfig, FlashRNNForCausalLM, exist_ok=True)
