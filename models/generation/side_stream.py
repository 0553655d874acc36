"""A second stream per GPU, on which prompts of single sequences are read, and the capture of CUDA graphs.

All models share the stream, because PyTorch keeps a cuBLAS workspace (32 MiB on Hopper) for every stream that has
computed a matrix product, until the process ends.
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
    """Run the block's kernels on the side stream, after everything that was launched on the current stream.

    Other threads wait until the block ends, because a graph that is being captured would record their kernels too.
    """
    with _ALONE:
        stream = _stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield stream


def capture(
    launch: Callable[[], None], pool: tuple[int, int], stream: torch.cuda.Stream | None = None
) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of the kernels that `launch` launches; `launch` must have run once before.

    Args:
        launch: launches the kernels.
        pool: memory pool of the graph.
        stream: stream of the capture; None means PyTorch's stream for captures.

    All cuBLAS workspaces are freed first, so that cuBLAS allocates one from the graph's pool: torch.compile frees
    workspaces outside of pools, and the graph would then use memory that is no longer its own.
    """
    free_cublas_workspaces()
    graph = torch.cuda.CUDAGraph()
    # "thread_local": other threads, such as those that load data, may allocate memory during the capture.
    with _ALONE, torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        launch()
    return graph


@contextmanager
def slower_without_graph(of: str) -> Iterator[None]:
    """Turn a failed capture of a CUDA graph into a warning. Running out of memory remains an error."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        warnings.warn(f"{of} runs without a CUDA graph, which is slower: {reason}", stacklevel=4)
