"""Backend `cuda_fused` without a GPU: its kernels on the processor, against the reference, without races."""

from functools import cache

import pytest
import torch

from flashrnn import get_cell
from flashrnn.cuda import backend, tiling
from flashrnn.cuda.backend import CudaFused
from flashrnn.cuda.source import Tiling, prelude
from flashrnn.products import weight_gradient_of_states
from tests.cuda.host_kernel import HostKernel, compile_for_host
from tests.suite import Case, check

LSTM, GRU, SLSTM = map(get_cell, ("lstm", "gru", "slstm"))


def tiled(unit_tiles, k_splits, batch_tiles, sequences, blocks, grid=False, stages=4, register_fragments=4) -> Tiling:
    return Tiling(unit_tiles, k_splits, batch_tiles, sequences, blocks, grid, stages, register_fragments)


@pytest.fixture
def on_host(monkeypatch, tmp_path_factory):
    """Lets backend `cuda_fused` run on the processor with these tilings."""

    def use(tilings: dict[str, Tiling]) -> None:
        @cache
        def kernel(choose, direction, cell, D, N, B, dtype, variant, device):
            layout = tilings[direction]
            shared = tiling.shared_bytes(direction, cell, dtype, layout)
            source = prelude(cell, N, D, dtype, layout, variant, shared)
            folder = tmp_path_factory.mktemp(direction)
            program = compile_for_host(f"flashrnn_{direction}", source, f"{direction}.cuh", folder)
            return HostKernel(program, layout.blocks, layout.threads, shared), layout

        monkeypatch.setattr(backend, "_kernel", kernel)
        monkeypatch.setattr(backend, "weight_gradient", weight_gradient_of_states)
        monkeypatch.setattr(CudaFused, "supports", lambda self, problem: None)

    return use


@pytest.mark.parametrize(
    ("case", "dtype", "forward", "backward"),
    [
        (Case(LSTM, B=3, T=4, N=2, D=30), torch.bfloat16, tiled(2, 1, 1, 8, 1, stages=8), tiled(2, 1, 1, 8, 1)),
        (Case(SLSTM, B=9, T=5, N=1, D=32, reset=True), torch.float32, tiled(1, 2, 1, 2, 2), tiled(1, 2, 2, 16, 2)),
        (
            Case(GRU, B=5, T=6, N=1, D=64),
            torch.float16,
            tiled(2, 1, 1, 4, 2),
            tiled(1, 4, 1, 4, 4, stages=2, register_fragments=0),
        ),
        (Case(LSTM, B=3, T=6, N=1, D=192), torch.bfloat16, tiled(3, 1, 1, 4, 4), tiled(3, 2, 1, 8, 4)),
        (
            Case(LSTM, B=9, T=8, N=1, D=64),
            torch.bfloat16,
            tiled(1, 2, 1, 8, 4, grid=True),
            tiled(1, 4, 2, 16, 4, grid=True),
        ),
    ],
    ids=["one block", "cluster float32", "cluster float16", "cluster in slices", "grid"],
)
def test_kernels_on_the_processor(on_host, case, dtype, forward, backward):
    on_host({"forward": forward, "backward": backward})
    check("cuda_fused", case, dtype, "cpu")
