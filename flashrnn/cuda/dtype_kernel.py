"""Kernels with one variant per dtype."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch

from flashrnn.cuda.arguments import Argument
from flashrnn.cuda.build import Binary, build
from flashrnn.cuda.launch import LoadedKernel, load
from flashrnn.cuda.parameters import Parameters, declaration
from flashrnn.cuda.source import definitions
from flashrnn.gpu import Gpu, device_gpu


@dataclass(frozen=True, eq=False)
class DtypeKernel:
    """The kernel flashrnn_<name> of kernels/<name>.cuh.

    Args:
        threads: threads per block; BLOCK_THREADS in the header.
        parameters: returns the kernel's parameters for a dtype.
        dependent: launch it as a programmatic dependent, on GPUs with such launches; see `LoadedKernel`.
    """

    name: str
    threads: int
    parameters: Callable[[torch.dtype], Parameters]
    dependent: bool = False

    def launch(self, threads: int, arguments: Mapping[str, Argument], dtype: torch.dtype, device: int) -> None:
        """Launch as many blocks as provide at least this number of threads."""
        loaded(self, dtype, device).launch(-(-threads // self.threads), arguments)

    def compile(self, dtype: torch.dtype, gpu: Gpu) -> Binary:
        """Return the compiled kernel. This needs no GPU."""
        return build(self.prelude(dtype), f"kernels/{self.name}.cuh", f"flashrnn_{self.name}", gpu.arch)

    def prelude(self, dtype: torch.dtype) -> str:
        """Return the printed source before the header."""
        constants = definitions(dtype, {"BLOCK_THREADS": self.threads}, {})
        return "\n".join((constants, declaration(self.parameters(dtype))))


@cache
def loaded(kernel: DtypeKernel, dtype: torch.dtype, device: int) -> LoadedKernel:
    """Return the kernel, loaded on a GPU."""
    gpu = device_gpu(device)
    binary, dependent = kernel.compile(dtype, gpu), kernel.dependent and gpu.clusters
    return load(binary, kernel.parameters(dtype), device, kernel.threads, 0, 1, False, dependent)
