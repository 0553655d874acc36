"""Speed and memory of generating text, against the length of the context: recurrent models beside the Transformer."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from transformers.generation import BaseStreamer

from models.hugging_face import FlashRNNConfig, FlashRNNForCausalLM

MODELS = {
    "LSTM": {"name": "RNNMixer", "function": "lstm"},
    "sLSTM": {"name": "RNNMixer", "function": "slstm"},
    "Transformer": {"name": "AttentionMixer"},
}
SMALL = {"vocab_size": 2048, "d_model": 256, "num_blocks": 4, "num_heads": 4}
LARGE = {"vocab_size": 50257, "d_model": 768, "num_blocks": 12, "num_heads": 12}
CONTEXTS = {"cpu": (512, 2048, 8192, 32768), "cuda": (1024, 4096, 16384, 65536)}
NEW_TOKENS, WARMUP = 72, 8


class TokenClock(BaseStreamer):
    """Notes the time at which generate() hands over each token."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(self.now())

    def end(self) -> None:
        pass


def rows(contexts: Sequence[int] | None = None) -> Iterator[dict]:
    """Greedy generate() of one sequence by models with random weights: median time per token behind a context of random
    tokens, the time of reading it, and the bytes of the cache. On a GPU 160 M parameters in bfloat16; on a CPU 4 blocks
    of width 256 in float32, processor time of one thread."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes, dtype = (LARGE, torch.bfloat16) if device == "cuda" else (SMALL, torch.float32)
    if device == "cpu":
        torch.set_num_threads(1)
    for name, mixer in MODELS.items():
        torch.manual_seed(0)
        model = FlashRNNForCausalLM(FlashRNNConfig(**sizes, mixer=mixer)).to(device, dtype).eval()
        for context in contexts or CONTEXTS[device]:
            yield {"model": name, **sizes, "context": context, **measure(model, context)}


def measure(model: FlashRNNForCausalLM, context: int) -> dict:
    """Time and memory of generating behind `context` random tokens."""
    on_gpu = model.device.type == "cuda"
    clock = TokenClock(time.perf_counter if on_gpu else time.process_time)
    prompt = torch.randint(model.config.vocab_size, (1, context), device=model.device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    output = model.generate(
        prompt, max_new_tokens=NEW_TOKENS, do_sample=False, streamer=clock, return_dict_in_generate=True
    )
    row = _speed(clock.times) | {"cache_mib": round(output.past_key_values.nbytes / 2**20, 4)}
    if on_gpu:
        row["peak_mib"] = round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
    return row


def _speed(times: Sequence[float]) -> dict:
    """Return the speed of the prompt and of new tokens that were handed over at `times`, in seconds."""
    # The first tokens behind the prompt still meet what is compiled or allocated on first use.
    read, *steps = (b - a for a, b in itertools.pairwise(times))
    ms = 1000 * statistics.median(steps[WARMUP:])
    return {"ms_per_token": round(ms, 3), "tokens_per_s": round(1000 / ms, 1), "read_context_s": round(read, 3)}


def draw(content: dict, file: Path) -> Path:
    """Draw tokens per second and memory over the context, a curve per model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = {"tokens_per_s": "tokens per second", "cache_mib": "memory of the context, MiB"}
    for axes, (key, label) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for model in dict.fromkeys(row["model"] for row in content["rows"]):
            points = [(row["context"], row[key]) for row in content["rows"] if row["model"] == model]
            axes.plot(*zip(*points, strict=True), "o-", label=model)
        ticks = sorted({row["context"] for row in content["rows"]})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ticks, labels=map(str, ticks))
        axes.set(xlabel="tokens of context", ylabel=label)
        axes.grid(alpha=0.3)
    axes.legend()
    machine, row = content["machine"], content["rows"][0]
    place = machine["gpu"] or f"{machine['processor']}, one thread"
    figure.suptitle(f"Generating with {row['num_blocks']} blocks of width {row['d_model']}, {place}")
    figure.savefig(file, dpi=150)
    return file
