"""Zeros on PyTorch's streams and in its memory pools, tested with a fake GPU."""

import gc
import threading
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from flashrnn.cuda import zeros


@pytest.fixture
def gpu(monkeypatch) -> SimpleNamespace:
    """Fake two GPUs; return the current device, its stream, whether it captures a graph, and the allocating threads."""
    state = SimpleNamespace(device=0, stream=0, capturing=False, threads=[])

    def new_zeros(size: int) -> torch.Tensor:
        state.threads.append(threading.get_ident())
        return torch.zeros(size, dtype=torch.uint8)

    monkeypatch.setattr(zeros, "_new_zeros", new_zeros)
    monkeypatch.setattr(zeros, "current_stream", lambda device: state.stream)
    monkeypatch.setattr(zeros, "current_device", lambda: state.device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: state.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    zeros._cached_zeros.cache_clear()
    yield state
    zeros._cached_zeros.cache_clear()


def test_zeros_are_reused_on_the_same_gpu_and_stream(gpu):
    first = zeros.zeros(0, 100)
    assert zeros.zeros(0, 2**20) is first
    assert len(first) >= 2**20
    assert not first.any()
    larger = zeros.zeros(0, 2**20 + 1)
    assert len(larger) > 2**20
    assert zeros.zeros(1, 100) is not first
    gpu.stream = 7
    assert zeros.zeros(0, 100) is not first


def test_captured_graph_allocates_its_own_zeros(gpu):
    kept = zeros.zeros(0, 100)
    gpu.capturing = True
    own, larger = zeros.zeros(0, 100), zeros.zeros(0, 2**22)
    assert own is not kept
    assert len(larger) == 2**22
    gpu.capturing = False
    assert zeros.zeros(0, 100) is kept
    assert zeros.zeros(0, 2**22) is not larger


def test_cached_zeros_are_allocated_outside_of_memory_pools(gpu):
    zeros.zeros(0, 100)
    assert gpu.threads != [threading.get_ident()]
    gpu.capturing = True
    zeros.zeros(0, 100)
    assert gpu.threads[1:] == [threading.get_ident()]


def test_zeros_of_unused_streams_are_freed(gpu):
    first = weakref.ref(zeros.zeros(0, 100))
    for gpu.stream in range(1, 17):
        zeros.zeros(0, 100)
    gc.collect()
    assert first() is None
