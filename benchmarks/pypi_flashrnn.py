"""The process in which flashrnn 1.0.8 from PyPI is built and timed: `python -m benchmarks.pypi_flashrnn FOLDER`.

FOLDER contains the unpacked wheel. Its package has the same name as that of this project. It therefore needs its own
process, which imports nothing of this project but `timing` and `worker`.
"""

import importlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.timing import Effort, measure, random_inputs
from benchmarks.worker import serve

Shapes = Mapping[str, Sequence[int]]

_STEPS = 16  # time steps of the call that builds; binaries do not depend on them


def load(folder: Path) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the package's function. Its device query does not compile under CUDA 13, so its result is set here."""
    sys.path.insert(0, str(folder))
    package = importlib.import_module("flashrnn")
    if not Path(package.__file__).is_relative_to(folder):
        raise RuntimeError(f"{package.__file__} was imported in place of the package in {folder}")
    sys.modules["flashrnn.flashrnn.flashrnn"].get_gpu_info = _gpu_info
    return package.flashrnn


def _gpu_info(device_id: int) -> dict[str, int]:
    gpu = torch.cuda.get_device_properties(device_id)
    return {
        "maxThreadsPerBlock": 1024,
        "regsPerMultiprocessor": 65536,
        "multiProcessorCount": gpu.multi_processor_count,
        "sharedMemPerBlockOptin": gpu.shared_memory_per_block_optin,
    }


def _build(flashrnn: Callable, backend: str, function: str, shapes: Shapes, dtype: str) -> dict:
    start = time.monotonic()
    B, _, *rest = shapes["Wx"]
    inputs = random_inputs(shapes | {"Wx": (B, _STEPS, *rest)}, getattr(torch, dtype))
    _h(flashrnn, backend, inputs, function, dtype)  # builds forward and backward
    torch.cuda.synchronize()
    return {"build_s": round(time.monotonic() - start, 1)}


def _measure(
    flashrnn: Callable, backend: str, function: str, shapes: Shapes, dtype: str, training: bool, effort: Sequence[int]
) -> dict:
    inputs = random_inputs(shapes, getattr(torch, dtype))
    return measure(partial(_h, flashrnn, backend, inputs, function, dtype), inputs, training, Effort(*effort))


def _h(flashrnn: Callable, backend: str, inputs: Sequence[Tensor], function: str, dtype: str) -> Tensor:
    states, _ = flashrnn(*inputs, function=function, backend=backend, dtype=dtype)
    return states[0]


if __name__ == "__main__":
    flashrnn = load(Path(sys.argv[1]))
    serve({"build": partial(_build, flashrnn), "measure": partial(_measure, flashrnn)})
