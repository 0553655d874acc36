"""Speed and memory of text generation by recurrent models and Transformers, over batch size and context length."""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.generation import BaseStreamer

from flashrnn.decoding import free_cublas_workspaces
from models.hugging_face import FlashRNNConfig, FlashRNNForCausalLM
from models.quantization import quantize

LLAMA = "Llama of transformers"
SMALL = {"vocab_size": 2048, "d_model": 256, "num_blocks": 4}
LARGE = {"vocab_size": 50257, "d_model": 768, "num_blocks": 12}
NEW_TOKENS = 129


class Model(NamedTuple):
    """A model: heads and mixer of a FlashRNNConfig, or, without a mixer, transformers' Llama of the same sizes; and
    whether linear layers are in 8 bits."""

    heads: int
    mixer: dict[str, str] | None
    recurrent: bool = True
    int8: bool = False


class Case(NamedTuple):
    model: str
    batch: int
    context: int


GPU_MODELS = {
    "LSTM, 12 heads": Model(12, {"name": "RNNMixer", "function": "lstm"}),
    "LSTM, 12 heads, 8 bits": Model(12, {"name": "RNNMixer", "function": "lstm"}, int8=True),
    "LSTM, 1 head": Model(1, {"name": "RNNMixer", "function": "lstm"}),
    "sLSTM, 12 heads": Model(12, {"name": "RNNMixer", "function": "slstm"}),
    "layernorm_lstm, 12 heads": Model(12, {"name": "RNNMixer", "function": "layernorm_lstm"}),
    "Transformer": Model(12, {"name": "AttentionMixer"}, recurrent=False),
    LLAMA: Model(12, None, recurrent=False),
}
CPU_MODELS = {
    "LSTM": Model(4, {"name": "RNNMixer", "function": "lstm"}),
    "sLSTM": Model(4, {"name": "RNNMixer", "function": "slstm"}),
    "Transformer": Model(4, {"name": "AttentionMixer"}, recurrent=False),
}
ATTENTION = frozenset(name for name, model in (GPU_MODELS | CPU_MODELS).items() if not model.recurrent)
BATCHES = (1, 8, 64, 512, 4096)  # batch sizes, measured after 128 tokens
CONTEXTS = (1024, 16384, 65536, 2**20)  # context lengths, measured with one sequence
CPU_CONTEXTS = (512, 2048, 8192, 32768)


def cases(gpu: bool, models: Sequence[str] = (), contexts: Sequence[int] = ()) -> list[Case]:
    """Return the measured cases: fewer of Llama, which compiles for every shape, and of cases that take minutes."""
    known = GPU_MODELS if gpu else CPU_MODELS
    if unknown := set(models) - set(known):
        raise ValueError(f"models {sorted(unknown)}: expected some of {', '.join(map(repr, known))}")
    chosen = {name: model for name, model in known.items() if not models or name in models}
    if not gpu:
        return [Case(model, 1, context) for model in chosen for context in contexts or CPU_CONTEXTS]
    found = []
    for name, model in chosen.items():
        longest = 2**20 if name == "LSTM, 12 heads" else 65536
        batches = (1, 64) if name == LLAMA else BATCHES if model.recurrent else BATCHES[:-1]
        found += [Case(name, batch, 128) for batch in batches if not contexts]
        found += [Case(name, 1, context) for context in contexts or CONTEXTS if contexts or context <= longest]
    return found


class TokenClock(BaseStreamer):
    """A streamer that records the time of each token of generate(); the first entry is that of the prompt."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(self.now())

    def end(self) -> None:
        pass


def rows(models: Sequence[str], contexts: Sequence[int], known: Iterable[dict] = ()) -> Iterator[dict]:
    """Greedy generate() after random tokens, by models with random weights. ms_per_token: milliseconds of a step that
    appends a token to every sequence; tokens_per_s: tokens per second of all sequences together. first_token_s: seconds
    to read the context and choose the first token. On a GPU these are medians of five calls (of one call after more
    than 65,536 tokens). first_call_s: seconds of a model's first call, including compilation of what is not in the
    cache; first_call_token_s: seconds until the first token of that call. peak_mib: peak memory besides the weights,
    including the workspaces of cuBLAS (32 MiB for each stream on Hopper); cache_mib: size of the cache. reading_ms:
    milliseconds to read the weights that a token needs once, at the bandwidth of a 2 GiB copy. Models have 160 M to
    190 M parameters in bfloat16 on a GPU, optionally with linear layers in 8 bits. On a CPU they have 4 blocks of width
    256 in float32, and times are processor time of one thread."""
    gpu = torch.cuda.is_available()
    if not gpu:
        torch.set_num_threads(1)
    bandwidth = _bandwidth() if gpu else None
    measured = {Case(row["model"], row["batch"], row["context"]): row for row in known}
    for case in cases(gpu, models, contexts):
        if case in measured:
            yield measured[case]
            continue
        gc.collect()
        try:
            yield case._asdict() | measure(case, bandwidth)
        except torch.OutOfMemoryError:
            yield case._asdict() | {"error": "out of memory"}


def build(name: str, gpu: bool) -> PreTrainedModel:
    """Return a model with random weights."""
    torch.manual_seed(0)
    sizes, model = (LARGE, GPU_MODELS[name]) if gpu else (SMALL, CPU_MODELS[name])
    with torch.device("cuda" if gpu else "cpu"):
        if model.mixer is None:
            found = LlamaForCausalLM(_llama_config(sizes, model.heads))
        else:
            found = FlashRNNForCausalLM(FlashRNNConfig(**sizes, num_heads=model.heads, mixer=model.mixer))
    found.generation_config.eos_token_id = None
    found.to(dtype=torch.bfloat16 if gpu else torch.float32).eval()
    if model.int8:
        quantize(found)
    return found


def _llama_config(sizes: dict[str, int], heads: int) -> LlamaConfig:
    """Return the config of a Llama with as many parameters; its MLP has three matrices instead of two."""
    d = sizes["d_model"]
    return LlamaConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=d,
        intermediate_size=8 * d // 3,
        num_hidden_layers=sizes["num_blocks"],
        num_attention_heads=heads,
        max_position_embeddings=max(CONTEXTS),
        bos_token_id=None,
        eos_token_id=None,
    )


def measure(case: Case, bandwidth: float | None) -> dict:
    """Return time and memory of generation with a new model, because a model keeps the buffers of earlier cases.

    Args:
        case: the measured case.
        bandwidth: memory bandwidth of the GPU in bytes per second; None on a CPU.
    """
    if bandwidth:
        free_cublas_workspaces()
    before = torch.cuda.memory_allocated() if bandwidth else 0
    model = build(case.model, bool(bandwidth))
    clock = TokenClock(time.perf_counter if bandwidth else time.process_time)
    prompt = torch.randint(model.config.vocab_size, (case.batch, case.context), device=model.device)
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
    if isinstance(model, LlamaForCausalLM):
        options["cache_implementation"] = "static"  # transformers compiles the model then
    # A recurrent model can be warmed up with a short prompt, because its step does not depend on the length.
    recurrent = isinstance(model, FlashRNNForCausalLM) and model.config.mixer["name"] == "RNNMixer"
    begin = clock.now()
    model.generate(prompt[:, :1024] if recurrent else prompt, streamer=clock, **options)
    first_call = {"first_call_s": clock.now() - begin, "first_call_token_s": clock.times[1] - begin}
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    if bandwidth:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    first_tokens, steps = [], []
    for _ in range(5 if bandwidth and case.context <= 65536 else 1):
        clock.times, begin = [], clock.now()
        output = model.generate(prompt, streamer=clock, return_dict_in_generate=not bandwidth, **options)
        first_tokens.append(clock.times[1] - begin)
        steps.append(1000 * (clock.times[-1] - clock.times[1]) / (NEW_TOKENS - 1))
    ms = median(steps)
    row = {"ms_per_token": round(ms, 4), "tokens_per_s": round(1000 * case.batch / ms, 1)}
    row["first_token_s"] = round(median(first_tokens), 4)
    row |= {name: round(seconds, 2) for name, seconds in first_call.items()}
    if bandwidth:
        embedding = model.get_input_embeddings().weight.nbytes  # a token needs only one row of it
        row["peak_mib"] = round((torch.cuda.max_memory_allocated() - before - weights) / 2**20, 1)
        row["reading_ms"] = round(1000 * (weights - embedding) / bandwidth, 4)
    else:
        row["cache_mib"] = round(output.past_key_values.nbytes / 2**20, 4)
    return row


def _bandwidth() -> float:
    """Return the bandwidth of the GPU's memory in bytes per second, measured by a copy."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    copy = torch.empty_like(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        copy.copy_(source)
    begin.record()
    for _ in range(5):
        copy.copy_(source)
    end.record()
    torch.cuda.synchronize()
    return 5 * 2 * source.nbytes / (begin.elapsed_time(end) / 1000)
