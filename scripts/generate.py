"""Generate text from a trained language model, printed as it comes.

    python -m scripts.generate ckpt=PATH prompt="..." [KEY=VALUE ...]

PATH is a run folder, a checkpoint file, or a folder of scripts.export.
"""

import sys
import time
from typing import Any

from scripts import arguments
from scripts.process import one_line_errors

DTYPES = ("float32", "bfloat16", "float16")


def generate(
    ckpt: str, prompt: str, seed: int, device: str, dtype: str, repetition_penalty: float = 1.0, **options: Any
) -> str:
    """Print prompt and continuation, and return them; `options` are those of transformers' GenerationConfig."""
    import torch
    from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TextStreamer, set_seed
    from transformers.utils import logging

    from data.encoding import Encoder
    from scripts.export import load

    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype}: expected one of {', '.join(DTYPES)}")
    if not 0 < options["top_p"] <= 1:
        raise ValueError(f"top_p={options['top_p']}: expected a probability above 0; 1.0 samples from all tokens")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if device not in ("cpu", *gpus, *(["cuda"] if gpus else [])):
        raise ValueError(f"device={device}: PyTorch has {', '.join(['cpu', *gpus])} here")
    logging.disable_progress_bar()  # of a few thousandths of a second
    model, tokenizer = load(ckpt)
    model = model.to(device, getattr(torch, dtype))
    if not options["do_sample"]:  # what transformers does not expect then
        options = {key: value for key, value in options.items() if key not in ("temperature", "top_p", "top_k")}
    set_seed(seed)
    # Documents follow an end of text in training, so that is how one begins; it has not been there already.
    penalty = RepetitionPenaltyLogitsProcessor(repetition_penalty, prompt_ignore_length=1)
    encoder = Encoder(tokenizer)
    ids = [encoder.end_of_text, *encoder.ids([prompt])[0]]
    start = time.perf_counter()
    output = model.generate(
        torch.tensor([ids], device=device),
        streamer=TextStreamer(tokenizer, skip_special_tokens=True),
        logits_processor=LogitsProcessorList([penalty]),
        **options,
    )[0]
    seconds, number = time.perf_counter() - start, len(output) - len(ids)
    print(f"({number} tokens, {number / seconds:.0f} per second)", file=sys.stderr)
    return tokenizer.decode(output, skip_special_tokens=True)


if __name__ == "__main__":
    with one_line_errors():
        generate(**arguments.read("generate", __doc__))
