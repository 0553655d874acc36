"""Haste (haste_pytorch 0.5.0rc0 on PyPI, from 2020), compiled from its sources.

PyTorch compiles it here, because its own build asks for GPUs that CUDA 13 no longer supports.
"""

import shutil
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

from benchmarks.cases import Case, Job
from benchmarks.peers import layer
from benchmarks.timing import Effort

NAME = "haste_0.5.0"
LAYERS = {"lstm": "LSTM", "layernorm_lstm": "LayerNormLSTM", "layernorm_gru": "LayerNormGRU"}
"""Its layers by the name of the cell."""


def supports(case: Case) -> bool:
    return case.N == 1 and case.function in LAYERS


def run(job: Job, effort: Effort, package: ModuleType) -> dict:
    """Measure its time-major layer in float32, the dtype of its kernels, including the input product."""
    return layer(job, effort, getattr(package, LAYERS[job.case.function]), torch.float32)


def load(sources: Path) -> ModuleType:
    """Return the package. It is compiled on first use, which takes a minute."""
    package = sources / "frameworks" / "pytorch"
    if not (package / "lstm.cc").is_file():
        raise ValueError(f"haste_sources={sources} does not contain the unpacked haste_pytorch-0.5.0rc0.tar.gz")
    sys.modules["haste_pytorch_lib"] = _kernels(sources)
    spec = spec_from_file_location("haste_pytorch", package / "__init__.py", submodule_search_locations=[str(package)])
    sys.modules["haste_pytorch"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["haste_pytorch"])
    return sys.modules["haste_pytorch"]


def _kernels(sources: Path) -> ModuleType:
    build = Path(cpp_extension.get_default_build_root()) / NAME
    build.mkdir(parents=True, exist_ok=True)
    (build / "lock").unlink(missing_ok=True)  # left by a killed run; this one would wait for it forever
    sources_of_kernels = sorted((sources / "lib").glob("*_gpu.cu.cc"))
    kernels = [build / file.stem for file in sources_of_kernels]
    for file, kernel in zip(sources_of_kernels, kernels, strict=True):
        shutil.copy2(file, kernel)  # the suffix tells the compiler that this is CUDA
    return cpp_extension.load(
        "haste_pytorch_lib",
        [str(file) for file in (*sorted((sources / "frameworks" / "pytorch").glob("*.cc")), *kernels)],
        extra_include_paths=[str(sources / "lib")],
        extra_cuda_cflags=["-O3", "-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_HALF_CONVERSIONS__"],
        build_directory=str(build),
    )
