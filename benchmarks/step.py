"""Time of one token in a language model that keeps its states, for recurrent models and the Transformer."""

import statistics
from collections.abc import Callable, Iterator

import torch

from benchmarks.language_model import MODELS, build
from models.backbone import States

CONTEXT = 1024  # number of tokens in the Transformer's cache
_REPLAYS = 200


def rows() -> Iterator[dict]:
    """Microseconds of a forward pass of one token of one sequence in bfloat16, after 1024 other tokens, compiled and
    replayed as a CUDA graph (medians), and the ratio to the Transformer's time."""
    transformer = None
    for overrides in MODELS:
        torch.compiler.reset()
        us = _measure(overrides)
        transformer = transformer or us
        yield {"model": overrides, "us": round(us, 1), "over_transformer": round(us / transformer, 3)}


@torch.no_grad()
def _measure(overrides: str) -> float:
    torch.manual_seed(0)
    model = build(overrides.split()).bfloat16().eval()
    ids = torch.randint(0, model.vocab_size, (1, CONTEXT), device="cuda")
    _, states = model(ids, return_states=True)
    step = torch.compile(model, fullgraph=True, dynamic=False)
    return _microseconds(_captured(lambda: step(ids[:, :1], states=states, return_states=True)))


def _captured(run: Callable[[], tuple[torch.Tensor, States]]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compile and allocate before the capture
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def _microseconds(graph: torch.cuda.CUDAGraph) -> float:
    times = []
    for _ in range(_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return 1e3 * statistics.median(times)
