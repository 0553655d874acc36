"""The largest heads: `cuda_fused` supports heads up to the limit, and `cuda` also larger ones."""

import pytest
import torch

from flashrnn import get_cell, registered_cells
from flashrnn.cells.trace import trace
from flashrnn.cuda.resident import solver
from flashrnn.cuda.resident.backend import CudaFused
from flashrnn.cuda.spec import KernelSpec
from flashrnn.cuda.streaming.backend import Cuda
from flashrnn.gpu import NAMED, named_gpu
from flashrnn.limits import DTYPES, STEP, largest_head, limit
from flashrnn.problem import Problem

LSTM = get_cell("lstm")


def problem(gpu: str, cell: str, head_dim: int, dtype: torch.dtype, training: bool) -> Problem:
    return Problem(get_cell(cell), 1, head_dim, dtype, torch.device("cuda"), training, False, named_gpu(gpu))


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    ("gpu", "cell", "dtype"),
    [("A100", "elman", torch.float32), ("H100", "lstm", torch.bfloat16), ("RTX 4090", "gru", torch.float16)],
    ids=["A100", "H100", "RTX 4090"],
)
def test_largest_head_is_supported_and_the_next_is_not(gpu, cell, dtype, training):
    found = limit(cell, dtype, named_gpu(gpu))
    largest = found.training if training else found.inference
    assert CudaFused().unsupported_reason(problem(gpu, cell, largest, dtype, training)) is None
    reason = CudaFused().unsupported_reason(problem(gpu, cell, largest + 2, dtype, training))
    assert reason.startswith(("forward ", "backward "))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_bisection_equals_trying_all_sizes(direction):
    gpu, sizes = named_gpu("RTX 3090"), range(STEP, 2048, STEP)
    specs = {D: KernelSpec(direction, LSTM, 1, D, 16, torch.bfloat16, gpu) for D in sizes}
    fits = [D for D, spec in specs.items() if solver.infeasible(spec) is None]
    assert fits[-1] == largest_head(direction, LSTM, torch.bfloat16, gpu)
    assert fits == list(range(STEP, fits[-1] + 1, STEP)), "a size between others does not fit"


def test_lstm_on_an_h100_has_at_most_one_tile_per_multiprocessor():
    """As explained in limits.NOTE."""
    assert 0 < largest_head("forward", LSTM, torch.bfloat16, named_gpu("H100")) <= 132 * STEP < 2688


@pytest.mark.parametrize("gpu", NAMED)
def test_backend_cuda_supports_larger_heads(gpu):
    for cell in (name for name in registered_cells() if not trace(get_cell(name)).reduces):
        for dtype in DTYPES:
            assert Cuda().unsupported_reason(problem(gpu, cell, 2**16, dtype, training=True)) is None
