"""The kernels of an A100 on a newer GPU, with its tilings, and PTX of sm_80 that the driver compiles."""

import pytest
import torch

from flashrnn import get_cell, gpu, repeated
from flashrnn.cuda import build, launch, nvrtc
from flashrnn.cuda.resident import backend
from flashrnn.cuda.streaming import backend as streaming
from tests.suite import Case, check


@pytest.fixture
def a100(monkeypatch, tmp_path):
    from cuda.bindings import nvrtc as bindings

    caches = build.build, backend._chosen, backend._plan, backend._forward, streaming._kernel, launch.load
    for module in (gpu, backend, streaming):
        monkeypatch.setattr(module, "device_gpu", lambda index: gpu.named_gpu("A100"))
    monkeypatch.setattr(repeated, "_CALLS", {})
    monkeypatch.setattr(nvrtc, "_in_subprocess", lambda *program: None)
    monkeypatch.setattr(bindings, "nvrtcGetCUBINSize", bindings.nvrtcGetPTXSize)
    monkeypatch.setattr(bindings, "nvrtcGetCUBIN", bindings.nvrtcGetPTX)
    monkeypatch.setenv("FLASHRNN_CACHE", str(tmp_path))
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("backend_name", ["cuda_fused", "cuda"])
@pytest.mark.parametrize(
    "case",
    [
        Case(B=9, T=33, N=3, D=64),
        Case(get_cell("slstm"), B=9, T=33, D=128, reset=True),
        Case(get_cell("gru"), B=20, T=33, N=1, D=256, time_major=True),
        Case(get_cell("lstm"), B=9, T=65, N=1, D=768),
    ],
    ids=str,
)
def test_correctness_suite(a100, case, backend_name, dtype):
    check(backend_name, case, dtype, "cuda:0")
