"""Translation of the settings that transformers' `generate` prepares into those of a Decoder's loop."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .sampler import SamplingParams

# In the order in which a Sampler applies them: the setting, and the attribute with its value.
_PROCESSORS = {
    RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
    MinPLogitsWarper: ("min_p", "min_p"),
}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_INPUTS = {"attention_mask", "past_key_values", "use_cache", "logits_to_keep", "tokenizer"}  # the last: of stop_strings


@dataclass(frozen=True)
class Request:
    """The settings of a call of `generate` that a Decoder supports."""

    params: SamplingParams
    max_length: int
    ends: tuple[int, ...]  # tokens that end a text
    others: StoppingCriteriaList  # further stopping criteria, called after every token
    ignored: int | Tensor  # number of tokens at the start of a prompt that are not penalized, for all rows or per row

    def penalized(self, input_ids: Tensor) -> list[list[int]] | None:
        """Return the tokens of each prompt to penalize; None without a repetition penalty."""
        if not self.params.penalizes:
            return None
        rows = input_ids.tolist()
        ignored = self.ignored.tolist() if isinstance(self.ignored, Tensor) else [self.ignored] * len(rows)
        return [row[start:] for row, start in zip(rows, ignored, strict=True)]


def request(
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    config: GenerationConfig,
    inputs: dict[str, Any],
) -> Request | str:
    """Return the request or, as a string, the requested feature that a Decoder does not support."""
    if extra := {name for name, value in inputs.items() if value is not None} - _INPUTS:
        return ", ".join(sorted(extra))
    if not inputs.get("use_cache", True):
        return "no cache"
    if asked := [name for name in _OUTPUTS if getattr(config, name)]:
        return ", ".join(asked)
    kinds = [type(processor) for processor in logits_processor]
    if kinds != [kind for kind in _PROCESSORS if kind in kinds]:
        return f"logits processors {', '.join(kind.__name__ for kind in kinds)}"
    if any(getattr(one, "min_tokens_to_keep", 1) != 1 for one in logits_processor):
        return "min_tokens_to_keep"
    if any(getattr(one, "filter_value", -torch.inf) != -torch.inf for one in logits_processor):
        return "filter_value"
    settings = {_PROCESSORS[type(one)][0]: getattr(one, _PROCESSORS[type(one)][1]) for one in logits_processor}
    lengths = [one.max_length for one in stopping_criteria if type(one) is MaxLengthCriteria]
    if not lengths:
        return "no maximal length"
    ignored = [one.prompt_ignore_length for one in logits_processor if type(one) is RepetitionPenaltyLogitsProcessor]
    return Request(
        SamplingParams(sample=bool(config.do_sample), **settings),
        min(lengths),
        tuple(
            token for one in stopping_criteria if type(one) is EosTokenCriteria for token in one.eos_token_id.tolist()
        ),
        StoppingCriteriaList(
            one for one in stopping_criteria if type(one) not in (MaxLengthCriteria, EosTokenCriteria)
        ),
        ignored[0] if ignored and ignored[0] is not None else 0,
    )
