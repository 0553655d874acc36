"""Loads compiled kernels on a GPU and launches them on PyTorch's current stream."""

from collections.abc import Iterator, Mapping
from functools import cache
from threading import Lock

import torch

from flashrnn._torch_private import current_device, current_stream
from flashrnn.cuda.arguments import Argument, Packed
from flashrnn.cuda.build import Binary
from flashrnn.cuda.parameters import Parameters
from flashrnn.gpu import device_gpu
from flashrnn.problem import KernelUnavailable, making_kernels


class LoadedKernel:
    """A kernel on one GPU and its launch shape: blocks of `threads` threads in groups of `blocks` blocks.

    A group is a cluster or, with `grid`, a cooperative group: blocks anywhere on the GPU that are co-resident. A
    `dependent` kernel is launched by programmatic dependent launch: it begins once all blocks of the previous kernel in
    the stream have called griddepcontrol.launch_dependents or ended, and itself waits until that kernel has completed.
    `at_once` groups can be co-resident on the GPU.
    """

    def __init__(
        self,
        binary: Binary,
        parameters: Parameters,
        device: int,
        threads: int,
        shared_bytes: int,
        blocks: int,
        grid: bool,
        dependent: bool = False,
    ) -> None:
        from cuda.bindings import driver
        from cuda.core import Device, ObjectCode

        refusal = f"{binary.entry} cannot be loaded on {device_gpu(device).name}"
        with making_kernels(refusal), torch.cuda.device(device):  # restores the caller's device
            Device(device).set_current()
            self._kernel = ObjectCode.from_cubin(binary.code, name=str(binary.path)).get_kernel(binary.entry)
        self._function = driver.CUfunction(int(self._kernel.handle))  # made once, not at each launch
        self.device, self.threads, self.shared_bytes, self.blocks, self.grid, self.dependent = (
            device, threads, shared_bytes, blocks, grid, dependent,
        )  # fmt: skip
        self._config = cache(self._make_config)
        self._parameters = parameters
        self.launch = self.bind()
        self._launch, results = driver.cuLaunchKernelEx, driver.CUresult
        self._success, self._no_context = results.CUDA_SUCCESS, results.CUDA_ERROR_INVALID_CONTEXT
        attribute = driver.CUfunction_attribute
        values = {attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: shared_bytes}
        if blocks > 8 and not grid:
            values[attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED] = 1
        for name, value in values.items():
            (error,) = driver.cuKernelSetAttribute(name, value, self._kernel.handle, device)
            if error != driver.CUresult.CUDA_SUCCESS:
                raise KernelUnavailable(f"{binary.entry}: the driver refuses {name.name} = {value}: {error.name}")
        with torch.cuda.device(device):
            self.at_once = self._groups_at_once()
        if not self.at_once:
            raise KernelUnavailable(
                f"{binary.entry}: this GPU cannot run {blocks} blocks with {shared_bytes} bytes of shared memory each "
                "at the same time; another process or a partition (MIG) may hold part of it"
            )

    def _groups_at_once(self) -> int:
        """Return how many groups can be co-resident on the GPU."""
        from cuda.core import LaunchConfig

        occupancy = self._kernel.occupancy
        if self.grid or self.blocks == 1:
            per_multiprocessor = occupancy.max_active_blocks_per_multiprocessor(self.threads, self.shared_bytes)
            return per_multiprocessor * device_gpu(self.device).multiprocessors // self.blocks
        config = LaunchConfig(grid=1, cluster=self.blocks, block=self.threads, shmem_size=self.shared_bytes)
        return occupancy.max_active_clusters(config, stream=_current_stream(self.device))

    def waves(self, groups: int) -> Iterator[tuple[int, int]]:
        """Yield (first group, number of groups) of each launch.

        Blocks of a `grid` wait for each other, so each of its launches has only as many groups as are co-resident;
        otherwise, there is one launch.
        """
        wave = self.at_once if self.grid else groups
        return ((first, min(wave, groups - first)) for first in range(0, groups, wave))

    def bind(self, **arguments: int) -> "Launch":
        """Return a launcher in which these arguments, the last ones of the kernel, are bound."""
        return Launch(self, Packed(self._parameters, arguments))

    def run(self, groups: int, arguments: int) -> None:
        """Launch `groups` groups of blocks.

        `arguments` is the address of an array with the addresses of all arguments.
        """
        if current_device() != self.device:
            with torch.cuda.device(self.device):
                return self.run(groups, arguments)
        config = self._config(groups, current_stream(self.device))
        (error,) = self._launch(config, self._function, arguments, 0)
        if error == self._no_context:
            self._enter_context()
            (error,) = self._launch(config, self._function, arguments, 0)
        if error != self._success:
            raise RuntimeError(f"launching {groups} groups of {self.blocks} blocks failed: {error.name}")

    def _enter_context(self) -> None:
        """Make the GPU's context current in a new thread: one of autograd's, if its memory comes from the cache."""
        from cuda.core import Device

        Device(self.device).set_current()

    def _make_config(self, groups: int, stream: int):
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = groups * self.blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes, config.hStream = self.shared_bytes, stream
        config.attrs = self._attributes()
        config.numAttrs = len(config.attrs)
        return config

    def _attributes(self) -> list:
        from cuda.bindings import driver

        ids, attributes = driver.CUlaunchAttributeID, []

        def add(name: str) -> "driver.CUlaunchAttributeValue":
            attributes.append(driver.CUlaunchAttribute())
            attributes[-1].id = getattr(ids, f"CU_LAUNCH_ATTRIBUTE_{name}")
            return attributes[-1].value

        if self.grid:
            add("COOPERATIVE").cooperative = 1
        elif self.blocks > 1:
            cluster = add("CLUSTER_DIMENSION").clusterDim
            cluster.x, cluster.y, cluster.z = self.blocks, 1, 1
        if self.dependent:
            add("PROGRAMMATIC_STREAM_SERIALIZATION").programmaticStreamSerializationAllowed = 1
        return attributes


class Launch:
    """Launches a kernel."""

    def __init__(self, kernel: LoadedKernel, packed: Packed) -> None:
        self._kernel, self._packed, self._packing = kernel, packed, Lock()

    def __call__(self, groups: int, arguments: Mapping[str, Argument]) -> None:
        """Launch `groups` groups of blocks with these arguments and the bound ones."""
        with self._packing:  # the driver copies the arguments before it returns, but other threads may run in between
            self._packed.pack(arguments)
            self._kernel.run(groups, self._packed.address)


load = cache(LoadedKernel)


def _current_stream(device: int):
    """Return PyTorch's current stream as a cuda-core stream.

    Not cached, because the default streams of all GPUs have the same handle.
    """
    from cuda.core import Stream

    return Stream.from_handle(current_stream(device))
