"""Loading and launching of kernels, tested with a fake GPU."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cuda.bindings import driver

from flashrnn import get_cell
from flashrnn.cuda import launch
from flashrnn.cuda.build import Binary
from flashrnn.cuda.resident import backend, solver
from flashrnn.cuda.resident.tiling import Tiling
from flashrnn.cuda.spec import KernelSpec, Variant
from flashrnn.gpu import named_gpu
from flashrnn.problem import KernelUnavailable


def test_default_streams_of_two_gpus_are_different(monkeypatch):
    monkeypatch.setattr(launch, "current_stream", lambda device: 0)
    monkeypatch.setattr("cuda.core.Stream", SimpleNamespace(from_handle=lambda handle: SimpleNamespace(handle=handle)))
    first, second = launch._current_stream(0), launch._current_stream(1)
    assert first.handle == second.handle == 0
    assert first is not second


def test_kernel_that_does_not_fit_on_the_gpu_is_unavailable(monkeypatch):
    """As in a partition of a GPU (MIG) that is too small for a cluster."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    loaded = SimpleNamespace(get_kernel=lambda entry: SimpleNamespace(handle=0))
    monkeypatch.setattr("cuda.core.Device", lambda device: SimpleNamespace(set_current=lambda: None))
    monkeypatch.setattr("cuda.core.ObjectCode", SimpleNamespace(from_cubin=lambda code, name: loaded))
    monkeypatch.setattr("cuda.bindings.driver.cuKernelSetAttribute", lambda *_: (driver.CUresult.CUDA_SUCCESS,))
    monkeypatch.setattr(launch, "device_gpu", lambda device: named_gpu("H100"))
    monkeypatch.setattr(launch.LoadedKernel, "_groups_at_once", lambda self: 0)
    binary = Binary(b"", "flashrnn_forward", 32, 0, Path("forward.cubin"))
    with pytest.raises(KernelUnavailable, match=r"flashrnn_forward: .* 16 blocks"):
        launch.LoadedKernel(binary, (), 0, 128, 1024, 16, grid=False)


@pytest.mark.parametrize("D", [64, 1024])
def test_forward_in_training_loads_the_kernel_of_its_backward(monkeypatch, D):
    """An error must occur before the forward pass, after which no other backend can be selected."""

    def load(binary: Binary, *_) -> SimpleNamespace:
        if binary.entry == "backward":
            raise KernelUnavailable("no room for the backward")
        return SimpleNamespace(waves=lambda groups: [(0, groups)], at_once=132, bind=lambda **known: None)

    def choose(spec: KernelSpec) -> tuple[Binary, Tiling]:
        return Binary(b"", spec.direction, 32, 0, Path()), next(solver.tilings(spec))

    monkeypatch.setattr(backend, "load", load)
    monkeypatch.setattr(backend, "meanwhile", lambda *_: nullcontext())
    monkeypatch.setattr(backend, "device_gpu", lambda device: named_gpu("H100"))

    def plan(training: bool) -> object:
        variant, shape = Variant(aux=torch.float16, training=training), torch.Size((16, 100, 1, D))
        return backend._plan(choose, "forward", get_cell("lstm"), shape, False, torch.bfloat16, variant, 0)

    assert plan(training=False)
    with pytest.raises(KernelUnavailable, match="no room for the backward"):
        plan(training=True)
