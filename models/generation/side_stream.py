"""The stream of a GPU beside the caller's, on which prompts of one sequence are read, and CUDA graphs.

All models share the stream: PyTorch keeps a workspace of cuBLAS for every stream that has computed a matrix product,
32 MiB on Hopper, until the process ends.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import RLock

import torch

from flashrnn.decoding import free_cublas_workspaces

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


def capture(
    launch: Callable[[], None], pool: tuple[int, int], stream: torch.cuda.Stream | None = None
) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of what `launch`, which has run before, launches.

    The stream is that of PyTorch for captures if it is None. cuBLAS keeps the workspace of a stream that it has used
    before. It is freed so that cuBLAS takes one from the graph's pool: PyTorch's compiler frees those outside of pools.
    """
    free_cublas_workspaces()
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as those that load data, may go on to allocate memory.
    with _ALONE, torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
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
