"""Loads compiled kernels on a GPU and launches them on PyTorch's current stream."""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from flashrnn.cuda.build import Binary
from flashrnn.gpu import device_gpu


class LoadedKernel:
    """A kernel on one GPU, with its launch shape: blocks of `threads` in groups of `blocks`.

    A group is a cluster, or, in a `grid`, blocks anywhere on the GPU that are certain to run at the same time. `beside`
    lets the kernel begin when all blocks of the one before it in the stream run and have said so.
    """

    def __init__(
        self,
        binary: Binary,
        device: int,
        threads: int,
        shared_bytes: int,
        blocks: int,
        grid: bool,
        beside: bool = False,
    ) -> None:
        from cuda.bindings import driver
        from cuda.core import Device, ObjectCode

        with torch.cuda.device(device):  # which puts back the caller's
            Device(device).set_current()
            self._kernel = ObjectCode.from_cubin(binary.code, name=str(binary.path)).get_kernel(binary.entry)
        self.device, self.threads, self.shared_bytes, self.blocks, self.grid, self.beside = (
            device, threads, shared_bytes, blocks, grid, beside,
        )  # fmt: skip
        self._config = cache(self._make_config)
        attribute = driver.CUfunction_attribute
        values = {attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: shared_bytes}
        if blocks > 8 and not grid:
            values[attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED] = 1
        for name, value in values.items():
            (error,) = driver.cuKernelSetAttribute(name, value, self._kernel.handle, device)
            if error != driver.CUresult.CUDA_SUCCESS:
                raise RuntimeError(f"{binary.entry}: the driver refuses {name.name} = {value}: {error.name}")
        self.at_once = self._groups_at_once()
        if not self.at_once:
            raise RuntimeError(
                f"{binary.entry}: this GPU has no room for {blocks} blocks with {shared_bytes} bytes of shared memory "
                "each at a time; another process or a partition (MIG) may hold part of it. Use backend='vanilla'"
            )

    def _groups_at_once(self) -> int:
        occupancy = self._kernel.occupancy
        if self.grid or self.blocks == 1:
            per_multiprocessor = occupancy.max_active_blocks_per_multiprocessor(self.threads, self.shared_bytes)
            return per_multiprocessor * device_gpu(self.device).multiprocessors // self.blocks
        return occupancy.max_active_clusters(self._config(1), stream=_current_stream(self.device))

    def rounds(self, groups: int) -> Iterator[tuple[int, int]]:
        """(first group, number of groups) of each launch: blocks of a grid wait for each other, so all have to run."""
        together = self.at_once if self.grid else groups
        return ((first, min(together, groups - first)) for first in range(0, groups, together))

    def __call__(self, groups: int, *arguments: Tensor | int | None) -> None:
        """Launch `groups` groups of blocks; None is a null pointer."""
        from cuda.core import launch

        values = [_argument(a) for a in arguments]
        with torch.cuda.device(self.device):  # the default stream is that of the current device
            launch(_current_stream(self.device), self._config(groups), self._kernel, *values)

    def _make_config(self, groups: int):
        from cuda.core import LaunchConfig

        clusters = {} if self.grid or self.blocks == 1 else {"cluster": self.blocks}
        return LaunchConfig(
            grid=groups * self.blocks if self.grid else groups,
            block=self.threads,
            shmem_size=self.shared_bytes,
            is_cooperative=self.grid,
            programmatic_stream_serialization=self.beside,
            **clusters,
        )


@cache
def load(
    binary: Binary, device: int, threads: int, shared_bytes: int, blocks: int, grid: bool, beside: bool = False
) -> LoadedKernel:
    return LoadedKernel(binary, device, threads, shared_bytes, blocks, grid, beside)


def zeros(device: int, size: int) -> int:
    """The address of `size` zero bytes on a GPU, which nobody writes to and which stay there."""
    largest, _ = _ZEROS.get(device, (0, 0))
    if size > largest:
        size = max(2 * largest, size, 2**20)
        _ZEROS[device] = size, _allocate_zeros(device, size)
    return _ZEROS[device][1]


_ZEROS: dict[int, tuple[int, int]] = {}  # of a GPU: bytes and address; smaller ones before them may still be in use


def _allocate_zeros(device: int, size: int) -> int:
    """PyTorch's memory would not do: what it gives out under a CUDA graph goes with the graph."""
    from cuda.bindings import driver

    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("call flashrnn once with this batch size before capturing it in a CUDA graph")
        error, address = driver.cuMemAlloc(size)
        if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            torch.cuda.empty_cache()
            error, address = driver.cuMemAlloc(size)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise torch.OutOfMemoryError(f"no {size} bytes on the GPU for states of zero: {error.name}")
        driver.cuMemsetD8(address, 0, size)
        torch.cuda.synchronize()  # any stream may read them
    return int(address)


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
