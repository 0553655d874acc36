"""A report on this machine: hardware and software, what each backend supports, and a test of each backend."""

import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from tempfile import TemporaryFile

import torch
from torch import Tensor

from flashrnn.accuracy import BOUNDS, relative_error
from flashrnn.cache import cache_folder, make_folder
from flashrnn.cells import LSTM
from flashrnn.functional import flashrnn
from flashrnn.gpu import nvidia_gpu
from flashrnn.problem import Backend, Problem

TYPICAL = (
    (12, 64, torch.bfloat16),
    (1, 768, torch.bfloat16),
    (1, 4096, torch.bfloat16),
    (12, 63, torch.bfloat16),
    (12, 64, torch.float32),
    (1, 768, torch.float32),
)
"""Heads, head size and dtype of typical problems."""


def environment() -> dict[str, str]:
    """Return the properties of the machine that belong in a bug report, by name."""
    return {
        "GPU": "; ".join(_gpus()),
        "driver": _driver(),
        "Python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": f"{torch.__version__}, for {_platform_of_torch()}",
        "cuda-core": _version("cuda-core"),
        "cuda-bindings": _version("cuda-bindings"),
        "NVRTC": _nvrtc(),
        "triton": _version("triton"),
        "numba": _version("numba"),
        "cache": _cache(),
    }


def _platform_of_torch() -> str:
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _nvrtc() -> str:
    from flashrnn.cuda.build import nvrtc_version

    try:
        return ".".join(map(str, nvrtc_version()))
    except ModuleNotFoundError:
        return "not known without cuda-bindings"
    except Exception as error:  # of whatever kind a missing library is
        return f"not found: {_one_line(error)}"


def _driver() -> str:
    try:
        from cuda.core import system

        kernel, cuda = system.get_kernel_mode_driver_version(), system.get_user_mode_driver_version()
        return f"{'.'.join(map(str, kernel))}, up to CUDA {'.'.join(map(str, cuda))}"
    except ModuleNotFoundError:
        return "not known without cuda-core"
    except Exception as error:
        return f"none found: {_one_line(error)}"


def _gpus() -> Iterator[str]:
    for index in range(torch.cuda.device_count()):
        gpu = nvidia_gpu(torch.device("cuda", index))
        if gpu is None:
            yield torch.cuda.get_device_name(index)
        else:
            yield (
                f"{gpu.name}, compute capability {'.'.join(map(str, gpu.capability))}, {gpu.multiprocessors} "
                f"multiprocessors with {gpu.shared_per_block // 1024} KiB of shared memory"
            )
    if not torch.cuda.is_available():
        try:
            torch.cuda.init()
            yield "none"
        except Exception as error:  # AssertionError or RuntimeError, by the cause
            yield f"none: {_one_line(error)}"


def _cache() -> str:
    folder = cache_folder()
    try:
        make_folder(folder)
        with TemporaryFile(dir=folder):
            return f"{folder}, writable"
    except OSError as error:
        return f"{folder}, NOT WRITABLE ({error.strerror}): set FLASHRNN_CACHE to a folder that can be written to"


def devices() -> list[torch.device]:
    """Return the default GPU, if there is one, and the CPU."""
    names = ("cuda:0", "cpu") if torch.cuda.is_available() else ("cpu",)
    return [torch.device(name) for name in names]


def typical_problems(device: torch.device) -> list[Problem]:
    return [
        Problem(LSTM, heads, head_dim, dtype, device, training=True, reset=False) for heads, head_dim, dtype in TYPICAL
    ]


def answer(backend: Backend, problem: Problem) -> str | None:
    """Return why the backend does not support the problem; None if it does."""
    try:
        return backend.unsupported_reason(problem)
    except Exception as error:  # a library that is there and broken
        return f"the check failed: {_named(error)}"


@dataclass(frozen=True)
class Outcome:
    """Result of a self-test: seconds of two forward and backward passes, and the largest relative error."""

    failure: str | None
    error: float
    first: float
    next: float


def self_test(backend: Backend, device: torch.device) -> Outcome | None:
    """Test a small LSTM against the float64 reference; return None if the backend does not claim to support it."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    B, T, N, D = 4, 16, 2, 32
    error, seconds = float("nan"), [float("nan")] * 2
    try:
        if backend.unsupported_reason(Problem(LSTM, N, D, dtype, device, training=True, reset=False)) is not None:
            return None
        inputs = _random_inputs(B, T, N, D, dtype, device)
        exact = _results("vanilla", *(x.detach().double().requires_grad_() for x in inputs))
        for k in range(2):
            start = time.perf_counter()
            found = _results(backend.name, *inputs)
            seconds[k] = time.perf_counter() - start
    except Exception as reason:  # anything: this is what the test is for
        return Outcome(_named(reason), error, *seconds)
    errors = {name: relative_error(found[name], exact[name]) for name in exact}
    wrong = [f"{name} {error:.1e}" for name, error in errors.items() if not error <= BOUNDS[dtype]]  # nan is wrong too
    failure = f"relative error of {', '.join(wrong)}, at most {BOUNDS[dtype]:.0e} is right" if wrong else None
    return Outcome(failure, max(errors.values()), *seconds)


def _random_inputs(B: int, T: int, N: int, D: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Return random Wx, R and b."""
    generator, G = torch.Generator().manual_seed(0), len(LSTM.gates)
    Wx, R, b = (torch.randn(shape, generator=generator) for shape in ((B, T, G, N, D), (G, N, D, D), (G, N, D)))
    return tuple(x.to(device, dtype).requires_grad_() for x in (Wx, R / D**0.5, b))


def _results(backend: str, Wx: Tensor, R: Tensor, b: Tensor) -> dict[str, Tensor]:
    """Return h and gradients, after the GPU has computed them."""
    h, last = flashrnn(Wx, R, b, function=LSTM, backend=backend)
    gradients = torch.autograd.grad(h.square().sum() + last.sum(), (Wx, R, b))
    if Wx.is_cuda:
        torch.cuda.synchronize(Wx.device)
    return {"h": h.detach()} | dict(zip(("d_Wx", "d_R", "d_b"), gradients, strict=True))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {_one_line(error)}"
