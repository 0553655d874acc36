"""Loads compiled kernels on a GPU and launches them on PyTorch's current stream."""

from functools import cache

import torch
from torch import Tensor

from flashrnn.cuda.build import Binary


class LoadedKernel:
    """A kernel on one GPU, with its launch shape: blocks of `threads` in clusters of `cluster`."""

    def __init__(self, binary: Binary, device: int, threads: int, shared_bytes: int, cluster: int):
        from cuda.bindings import driver
        from cuda.core import Device, ObjectCode

        with torch.cuda.device(device):  # which puts back the caller's
            Device(device).set_current()
            self._kernel = ObjectCode.from_cubin(binary.code, name=str(binary.path)).get_kernel(binary.entry)
        self.device, self.threads, self.shared_bytes, self.cluster = device, threads, shared_bytes, cluster
        attribute = driver.CUfunction_attribute
        values = {attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: shared_bytes}
        if cluster > 8:
            values[attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED] = 1
        for name, value in values.items():
            (error,) = driver.cuKernelSetAttribute(name, value, self._kernel.handle, device)
            if error != driver.CUresult.CUDA_SUCCESS:
                raise RuntimeError(f"{binary.entry}: the driver refuses {name.name} = {value}: {error.name}")
        fits = self._kernel.occupancy.max_active_clusters
        if cluster > 1 and not fits(self._config(1), stream=_current_stream(device)):
            raise RuntimeError(
                f"{binary.entry}: this GPU has no room for a cluster of {cluster} blocks with {shared_bytes} bytes of "
                "shared memory each; another process or a partition (MIG) may hold part of it. Use backend='vanilla'"
            )

    def __call__(self, groups: int, *arguments: Tensor | int | None) -> None:
        """Launch `groups` clusters (blocks, if clusters are of one block); None is a null pointer."""
        from cuda.core import launch

        values = [_argument(a) for a in arguments]
        with torch.cuda.device(self.device):  # the default stream is that of the current device
            launch(_current_stream(self.device), self._config(groups), self._kernel, *values)

    def _config(self, groups: int):
        from cuda.core import LaunchConfig

        return LaunchConfig(
            grid=groups,
            cluster=self.cluster if self.cluster > 1 else None,
            block=self.threads,
            shmem_size=self.shared_bytes,
        )


@cache
def load(binary: Binary, device: int, threads: int, shared_bytes: int, cluster: int) -> LoadedKernel:
    return LoadedKernel(binary, device, threads, shared_bytes, cluster)


@cache
def _stream(handle: int):
    from cuda.core import Stream

    return Stream.from_handle(handle)


def _current_stream(device: int):
    """PyTorch's current stream as cuda-core has it."""
    return _stream(torch.cuda.current_stream(device).cuda_stream)


def _argument(value: Tensor | int | None) -> int:
    if value is None:
        return 0
    return value.data_ptr() if isinstance(value, Tensor) else value
