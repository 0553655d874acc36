"""The stream of a GPU beside the caller's, on which prompts of one sequence are read and CUDA graphs are captured.

All models share it: PyTorch keeps a workspace of cuBLAS for every stream that has computed a matrix product, 32 MiB on
Hopper, until the process ends.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import RLock

import torch

_ALONE = RLock()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def on_side_stream(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Launch on this stream, after what the current one has been given. Other threads wait until all is launched: a
    graph that is being captured would take their kernels, too."""
    with _ALONE:
        stream = _stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield stream


def capture(launch: Callable[[], None], device: torch.device, pool: tuple[int, int]) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of what `launch` launches. It has run on this stream before, where cuBLAS has taken its
    workspace from memory that is not the graph's."""
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as those that load data, may go on to allocate memory.
    options = {"pool": pool, "capture_error_mode": "thread_local"}
    with on_side_stream(device) as stream, torch.cuda.graph(graph, stream=stream, **options):
        launch()
    return graph


@contextmanager
def slower_without_graph(of: str) -> Iterator[None]:
    """Warn if a CUDA graph cannot be captured, and go on; lack of memory remains an error."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        warnings.warn(f"no CUDA graph of {of}, which is slower without: {reason}", stacklevel=4)
