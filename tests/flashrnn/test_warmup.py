"""After `warmup`, calls of these sizes compile nothing."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flashrnn import UnsupportedProblem, flashrnn, get_cell, warmup
from flashrnn.__main__ import main
from flashrnn.cpu import build as cpu_build
from flashrnn.cuda import build, short_gradients, sum_of_partials, weight_gradient
from flashrnn.cuda.resident import backend, concurrent_gradient, kernel, single_step
from flashrnn.cuda.resident.kernel import compile_best
from flashrnn.cuda.spec import Variant
from flashrnn.gpu import named_gpu
from flashrnn.problem import aux_dtype
from tests.problems import random_inputs

LSTM, H100 = get_cell("lstm"), named_gpu("H100")


@pytest.fixture
def compiled(monkeypatch, tmp_path) -> list[str]:
    """Return a list of the compiled kernels. Compilation is faked, with a new cache folder."""
    entries = []

    def compile_(source, entry, arch):
        entries.append(entry)
        return b"code", "Used 40 registers, 0 bytes spill stores"

    monkeypatch.setenv("FLASHRNN_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "_compile", compile_)
    forget()
    yield entries
    forget()


def forget() -> None:
    """Forget loaded kernels, as in a new process."""
    loaded = weight_gradient._kernel, short_gradients._kernel
    for cached in (build.build, kernel._compile_bucket, backend._chosen, backend._plan, *loaded):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("steps", "bidirectional"),
    [
        (1000, False),
        pytest.param(1000, True, marks=pytest.mark.slow),
        pytest.param(20, False, marks=pytest.mark.slow),
        pytest.param(4, True, marks=pytest.mark.slow),
    ],
)
def test_training_call_compiles_nothing_after_warmup(compiled, monkeypatch, steps, bidirectional):
    steps_of = []
    sizes = {"heads": 1, "head_dim": 256, "batch": [16, 40], "bidirectional": bidirectional}
    assert warmup("lstm", **sizes, gpu="H100", progress=steps_of.append) == "cuda_fused"
    assert [one.done for one in steps_of] == list(range(1, steps_of[0].total + 1))
    assert ("flashrnn_concurrent_gradient" in compiled) is not bidirectional
    forget()
    compiled.clear()
    loaded = SimpleNamespace(at_once=1000, waves=lambda groups: [(0, groups)], bind=lambda **_: None)
    monkeypatch.setattr(backend, "device_gpu", lambda index: H100)
    for module in (backend, weight_gradient, short_gradients):
        monkeypatch.setattr(module, "load", lambda *_, **__: loaded)
    variant = Variant(aux=aux_dtype(LSTM, torch.bfloat16, all_states=False), training=True, bidirectional=bidirectional)
    for batch in (16, 40):
        call = LSTM, torch.Size((batch, steps, 1 + bidirectional, 256)), False, torch.bfloat16
        for half_bias in (False, True):
            backend._plan(compile_best, "forward", *call, replace(variant, half_bias=half_bias), 0)
        plan = backend._plan(compile_best, "backward", *call, variant, 0)
        if plan.overlapped:
            concurrent_gradient.compile_kernel(plan.spec, plan.overlapped)
        if not bidirectional:
            single_step.compile_kernel(single_step.spec_of(LSTM, 1, 256, batch, torch.bfloat16, H100))
    sum_of_partials.KERNEL.compile(torch.bfloat16, H100)
    sum_of_partials.KERNEL.compile(torch.float32, H100)
    assert compiled == []


def test_warmup_of_backend_cuda_for_inference(compiled):
    assert warmup("gru", head_dim=4096, batch=4, training=False, gpu="H100") == "cuda"
    assert compiled == ["flashrnn_stream_forward"]


def test_call_on_the_cpu_compiles_nothing_after_warmup(monkeypatch):
    assert warmup("gru", heads=2, head_dim=12, batch=1, dtype=torch.float32, backend="cpu_fused") == "cpu_fused"
    monkeypatch.setattr(cpu_build, "_compiled", lambda *_: pytest.fail("compiled in a call"))
    inputs = random_inputs(get_cell("gru"), 3, 4, 2, 12, torch.float32)
    flashrnn(*inputs, function="gru", backend="cpu_fused")[0].sum().backward()


def test_unsupported_sizes_are_an_error():
    with pytest.raises(UnsupportedProblem, match=r"'cuda_fused': forward"):
        warmup(head_dim=4096, batch=1, gpu="H100", backend="cuda_fused")
    with pytest.raises(ValueError, match="'H1000'"):
        warmup(head_dim=64, batch=1, gpu="H1000")
    with pytest.raises(ValueError, match=r"'cpu'.* cpu_fused"):
        warmup(head_dim=64, batch=1, backend="cpu")
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        warmup(head_dim=64, batch=[8, 0])


def test_command_shows_progress(compiled, capsys):
    sizes = ["--batch", "1", "8", "--gpu", "A100"]
    assert main(["warmup", "--heads", "2", "--head-dim", "32", *sizes, "--inference"]) == 0
    *steps, end = capsys.readouterr().out.splitlines()
    assert steps[-1].startswith(f"{len(steps)}/{len(steps)}")
    assert "cuda_fused" in end
    assert main(["warmup", "--heads", "1", "--head-dim", "4096", *sizes, "--backend", "cuda_fused"]) == 1
    assert "error: backend 'cuda_fused': " in capsys.readouterr().err
