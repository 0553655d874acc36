"""Haste (PyPI haste_pytorch 0.5.0rc0, of 2020), compiled from its sources.

Its own build names GPUs that CUDA 13 no longer supports, so that PyTorch compiles its LSTM here.
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
_MODULE = """#include <torch/extension.h>
void lstm_init(py::module&);
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { lstm_init(m); }
"""


def supports(case: Case) -> bool:
    return case.N == 1 and case.function == "lstm"


def run(job: Job, effort: Effort, package: ModuleType) -> dict:
    """Measure its layer in float32, for which its kernels are, time-major, input product included."""
    return layer(job, effort, package.LSTM, torch.float32)


def load(sources: Path) -> ModuleType:
    """Return the package, compiled if it is not yet."""
    package = sources / "frameworks" / "pytorch"
    if not (package / "lstm.cc").is_file():
        raise ValueError(f"haste_sources={sources} does not hold the unpacked haste_pytorch-0.5.0rc0.tar.gz")
    sys.modules["haste_pytorch_lib"] = _kernels(sources)
    spec = spec_from_file_location("haste_pytorch", package / "__init__.py", submodule_search_locations=[str(package)])
    sys.modules["haste_pytorch"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["haste_pytorch"])
    return sys.modules["haste_pytorch"]


def _kernels(sources: Path) -> ModuleType:
    build = Path(cpp_extension.get_default_build_root()) / NAME
    build.mkdir(parents=True, exist_ok=True)
    (build / "lock").unlink(missing_ok=True)  # of a run that was killed; this one would wait for it without end
    kernels = [build / f"lstm_{direction}_gpu.cu" for direction in ("forward", "backward")]
    for kernel in kernels:  # the compiler goes by the ending
        shutil.copy2(sources / "lib" / f"{kernel.name}.cc", kernel)
    module = build / "module.cc"
    if not module.exists():  # a new file would be compiled again
        module.write_text(_MODULE)
    return cpp_extension.load(
        "haste_pytorch_lib",
        [str(file) for file in (module, sources / "frameworks" / "pytorch" / "lstm.cc", *kernels)],
        extra_include_paths=[str(sources / "lib")],
        extra_cuda_cflags=["-O3", "-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_HALF_CONVERSIONS__"],
        build_directory=str(build),
    )
