"""Text generation by a trained language model, for one prompt or for a file of prompts."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm as Progress
from transformers import (
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    TextStreamer,
    set_seed,
)
from transformers.utils import logging

from data.encoding import Encoder
from models.generation import row_random
from models.generation.continuous_batching import Prompt, StopConditions, answers
from models.generation.decoder import unsupported_reason
from models.generation.sampler import SamplingParams
from models.hugging_face import FlashRNNForCausalLM
from models.quantization import check_weights, quantize
from training import export
from training.prompt_file import AnswerFile, read_prompts

DTYPES = ("float32", "bfloat16", "float16")
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty")
SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_ALLOWED: dict[str, tuple[Callable[[float], bool], str]] = {
    "max_new_tokens": (lambda number: number >= 1, "at least 1"),
    "temperature": (lambda value: value > 0, "a number above 0; do_sample=false always takes the likeliest token"),
    "top_p": (lambda value: 0 < value <= 1, "a probability above 0; 1.0 samples from all tokens"),
    "top_k": (lambda number: number >= 0, "at least 1, or 0 for no limit"),
    "min_p": (lambda value: 0 <= value <= 1, "a number from 0, for no limit, to 1"),
    "repetition_penalty": (lambda value: value > 0, "a number above 0; 1.0 is no penalty"),
}


def generate(
    ckpt: str, prompt: str = "", prompts: str = "", out: str = "", slots: int = 64, **options: Any
) -> str | None:
    """Print a prompt with its continuation and return both, or write the answers to a file of prompts."""
    options |= {name: float(options[name]) for name in FLOATS if name in options}  # transformers rejects an int
    for name, (allows, what) in _ALLOWED.items():
        if name in options and not allows(options[name]):
            raise ValueError(f"{name}={options[name]}: expected {what}")
    if prompts or out:
        if prompt or not (prompts and out):
            raise ValueError(f"prompts={prompts} out={out} prompt={prompt}: give either prompt, or prompts and out")
        return generate_file(ckpt, Path(prompts), Path(out), slots, **options)
    return generate_one(ckpt, prompt, **options)


def load(ckpt: str, device: str, dtype: str, weights: str) -> tuple[FlashRNNForCausalLM, PreTrainedTokenizerBase]:
    """Check the options; return the model and its tokenizer."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype}: expected one of {', '.join(DTYPES)}")
    check_weights(weights)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if device not in ("cpu", *gpus, *(["cuda"] if gpus else [])):
        raise ValueError(f"device={device}: PyTorch has {', '.join(['cpu', *gpus])} here")
    logging.disable_progress_bar()  # loading takes a few milliseconds
    model, tokenizer = export.load(ckpt)
    model = model.to(device, getattr(torch, dtype))
    if weights == "int8":
        quantize(model)
    return model, tokenizer


def generate_one(
    ckpt: str,
    prompt: str,
    seed: int,
    device: str,
    dtype: str,
    weights: str = "float",
    repetition_penalty: float = 1.0,
    stop: str | Sequence[str] = "",
    **options: Any,
) -> str:
    """Print a prompt with its continuation, and return both; `options` are those of transformers' GenerationConfig."""
    strings = stop_strings(stop)
    model, tokenizer = load(ckpt, device, dtype, weights)
    if not options["do_sample"]:  # transformers would warn that these are not used
        options = {key: value for key, value in options.items() if key not in SAMPLING}
    set_seed(seed)
    # As in training, a document starts after an end-of-text token, which does not count for the repetition penalty.
    penalty = RepetitionPenaltyLogitsProcessor(repetition_penalty, prompt_ignore_length=1)
    encoder = Encoder(tokenizer)
    ids = [encoder.end_of_text, *encoder.ids([prompt])[0]]
    streamer = TimedStreamer(tokenizer, skip_special_tokens=True)
    output = model.generate(
        torch.tensor([ids], device=model.device),
        streamer=streamer,
        logits_processor=LogitsProcessorList([] if repetition_penalty == 1 else [penalty]),
        **({"stop_strings": strings, "tokenizer": tokenizer} if strings else {}),
        **options,
    )[0]
    print(streamer.speed(), file=sys.stderr)
    return tokenizer.decode(output, skip_special_tokens=True)


class TimedStreamer(TextStreamer):
    """Prints text while it is generated, and measures the speed."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, **options: Any) -> None:
        super().__init__(tokenizer, **options)
        self._times = [time.perf_counter()]

    def put(self, value: torch.Tensor) -> None:
        self._times.append(time.perf_counter())
        super().put(value)

    def speed(self) -> str:
        """Return a text with the time until the first token, and the time of each token after it."""
        start, tokens = self._times[0], self._times[2:]  # the first call of `put` is with the prompt
        if not tokens:
            return "(0 tokens)"
        first, after = tokens[0] - start, tokens[-1] - tokens[0]
        text = f"({len(tokens)} tokens: the first after {first:.3f} s"
        if len(tokens) > 1:
            number = len(tokens) - 1
            text += f", then {number / after:.0f} per second, {1000 * after / number:.3f} ms each"
        return f"{text})"


def generate_file(
    ckpt: str,
    prompts: Path,
    out: Path,
    slots: int,
    seed: int,
    device: str,
    dtype: str,
    max_new_tokens: int,
    do_sample: bool,
    weights: str = "float",
    stop: str | Sequence[str] = "",
    **options: Any,
) -> None:
    """Write the answers to a file of prompts; `options` are those of models.generation.sampler.SamplingParams."""
    if slots < 1:
        raise ValueError(f"slots={slots}: expected at least 1")
    lines, strings = read_prompts(prompts), stop_strings(stop)
    settings = {"ckpt": ckpt, "seed": seed, "dtype": dtype, "max_new_tokens": max_new_tokens}
    settings |= {"stop": stop if isinstance(stop, str) else strings}
    file = AnswerFile(out, lines, settings | {"do_sample": do_sample, "weights": weights, **options})
    model, tokenizer = load(ckpt, device, dtype, weights)
    if reason := unsupported_reason(model.model):
        raise ValueError(f"prompts={prompts}: {reason}; generate one text at a time with prompt=...")
    encoder = Encoder(tokenizer)
    ids = [[encoder.end_of_text, *found] for found in encoder.ids([line["prompt"] for line in lines])]
    set_seed(seed)
    keys = row_random.keys(row_random.new_seed(), ids)
    asked = [Prompt(tokens, key, tokens[1:]) for tokens, key in zip(ids, keys, strict=True)][file.answered :]
    stops = StopStrings(tokenizer, strings) if strings else None
    ends = StopConditions(max_new_tokens, frozenset({encoder.end_of_text}), stops)
    start, number, done = time.perf_counter(), 0, file.answered
    try:
        with Progress(total=len(lines), initial=done, unit="prompt", dynamic_ncols=True) as bar:
            for answer in answers(model.model, asked, SamplingParams(do_sample, **options), ends, slots):
                text = tokenizer.decode(answer.tokens, skip_special_tokens=True)
                file.add(done + answer.index, {"text": text, "tokens": answer.tokens, "reason": answer.reason})
                number += len(answer.tokens)
                bar.update()
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        raise ValueError(
            f"slots={slots}: {reason}: use fewer slots; {out} contains the first {file.answered} answers"
        ) from error
    seconds = time.perf_counter() - start
    print(f"({number} tokens, {number / seconds:.0f} per second)", file=sys.stderr)


def stop_strings(stop: str | Sequence[str] | None) -> list[str]:
    """Return the strings that end a text: `stop` is one of them, several, or none if it is empty."""
    if isinstance(stop, str):
        return [stop] if stop else []
    strings = list(stop or ())
    if not all(isinstance(string, str) and string for string in strings):
        raise ValueError(f"stop={strings}: expected a string, or a list of strings that are not empty")
    return strings


class StopStrings:
    """A `stop` of `models.generation.continuous_batching.StopConditions` that ends a text at any of some strings."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        # with the largest number of tokens in each string: a token has at least one byte
        self._reach = {string: len(string.encode()) for string in strings}

    def __call__(self, tokens: list[int], before: int) -> int | None:
        if not self._among(tokens, before, len(tokens)):
            return None
        return next(n for n in range(before + 1, len(tokens) + 1) if self._among(tokens, before, n))

    def _among(self, tokens: list[int], before: int, end: int) -> bool:
        """Return whether a string ends with one of the tokens from `before` to `end`."""
        return any(
            string in self._tokenizer.decode(tokens[max(0, before + 1 - reach) : end])
            for string, reach in self._reach.items()
        )
