"""What launches take from PyTorch: its streams and its memory; here with a GPU's part played by the processor."""

import gc
import threading
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from flashrnn.cuda import launch


@pytest.fixture
def gpu(monkeypatch) -> SimpleNamespace:
    """Two GPUs: the current device and its stream, whether that captures a graph, and the threads that allocated."""
    state = SimpleNamespace(device=0, stream=0, capturing=False, threads=[])

    def new_zeros(size: int) -> torch.Tensor:
        state.threads.append(threading.get_ident())
        return torch.zeros(size, dtype=torch.uint8)

    monkeypatch.setattr(launch, "_new_zeros", new_zeros)
    monkeypatch.setattr(launch, "current_stream", lambda device: state.stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: state.device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: state.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    launch._kept_zeros.cache_clear()
    yield state
    launch._kept_zeros.cache_clear()


def test_zeros_are_kept_for_the_next_call_on_the_same_gpu_and_stream(gpu):
    first = launch.zeros(0, 100)
    assert launch.zeros(0, 2**20) is first
    assert len(first) >= 2**20
    assert not first.any()
    larger = launch.zeros(0, 2**20 + 1)
    assert len(larger) > 2**20
    assert launch.zeros(1, 100) is not first
    gpu.stream = 7
    assert launch.zeros(0, 100) is not first


def test_a_graph_fills_zeros_of_its_own_of_any_size(gpu):
    kept = launch.zeros(0, 100)
    gpu.capturing = True
    own, larger = launch.zeros(0, 100), launch.zeros(0, 2**22)
    assert own is not kept
    assert len(larger) == 2**22
    gpu.capturing = False
    assert launch.zeros(0, 100) is kept
    assert launch.zeros(0, 2**22) is not larger


def test_zeros_that_are_kept_are_allocated_outside_of_this_threads_memory_pools(gpu):
    launch.zeros(0, 100)
    assert gpu.threads != [threading.get_ident()]
    gpu.capturing = True
    launch.zeros(0, 100)
    assert gpu.threads[1:] == [threading.get_ident()]


def test_zeros_of_streams_that_are_no_longer_used_are_freed(gpu):
    first = weakref.ref(launch.zeros(0, 100))
    for gpu.stream in range(1, 17):
        launch.zeros(0, 100)
    gc.collect()
    assert first() is None


def test_default_streams_of_two_gpus_are_two_streams(gpu, monkeypatch):
    monkeypatch.setattr("cuda.core.Stream", SimpleNamespace(from_handle=lambda handle: SimpleNamespace(handle=handle)))
    first, second = launch._current_stream(0), launch._current_stream(1)
    assert first.handle == second.handle == 0
    assert first is not second
