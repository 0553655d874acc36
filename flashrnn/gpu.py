"""Properties of GPUs, from the driver or, without a GPU, by name."""

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Gpu:
    """Limits that decide how a recurrent kernel can be laid out."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_per_block: int  # bytes, the largest amount that a block can request
    registers: int = 65536  # 32-bit, per multiprocessor
    registers_per_thread: int = 255
    threads_per_block: int = 1024

    @property
    def clusters(self) -> bool:
        """Return whether blocks can form clusters with distributed shared memory."""
        return self.capability >= (9, 0) and self.capability[0] != 12

    @property
    def warpgroup_products(self) -> bool:
        """Return whether a warpgroup multiplies matrices in shared memory (wgmma), as on Hopper alone."""
        return self.capability[0] == 9

    @property
    def cluster_sizes(self) -> tuple[int, ...]:
        """Return the possible numbers of blocks of a cluster; more than 8 need a kernel attribute."""
        return tuple(range(1, 17)) if self.clusters else (1,)

    def clusters_at_once(self, size: int, blocks: int = 1) -> int:
        """Return how many clusters of `size` blocks run at the same time, with `blocks` blocks per multiprocessor.

        A cluster stays within a graphics processing cluster (GPC), in which some of the 18 multiprocessors are
        disabled. An H100 ran 7 clusters of 16 blocks, 15 of 8 and 30 of 4. With two to four blocks per multiprocessor,
        an H200 ran as many of three or more as if two GPCs had 18 multiprocessors, five had 16, and one had 8.
        """
        if size == 1:
            return self.multiprocessors * blocks
        whole, rest = divmod(self.multiprocessors, 18)
        of_rest = blocks * 8 // size if rest and size <= 8 else 0
        complete = min(whole, 2) if blocks > 1 else 0
        return complete * (blocks * 18 // size) + (whole - complete) * (blocks * 16 // size) + of_rest

    @property
    def arch(self) -> str:
        """Return the compiler's name for the architecture, with its architecture-specific instructions."""
        major, minor = self.capability
        return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


_KIB = 1024
NAMED = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100", (8, 0), 108, 163 * _KIB),
        Gpu("RTX 3090", (8, 6), 82, 99 * _KIB),
        Gpu("RTX 4090", (8, 9), 128, 99 * _KIB),
        Gpu("H100", (9, 0), 132, 227 * _KIB),
        Gpu("H200", (9, 0), 132, 227 * _KIB),
        Gpu("B200", (10, 0), 148, 227 * _KIB),
    )
}
"""GPUs by name, by NVIDIA's data sheets and the compute capability table of the CUDA programming guide."""


def named_gpu(name: str) -> Gpu:
    """Return the GPU of this name; raise ValueError with the known names if there is none."""
    if name not in NAMED:
        raise ValueError(f"unknown GPU {name!r}; known by name: {', '.join(NAMED)}")
    return NAMED[name]


@cache
def device_gpu(index: int) -> Gpu:
    """Return the GPU torch.device("cuda", index), as its driver describes it."""
    p = torch.cuda.get_device_properties(index)
    return Gpu(p.name, (p.major, p.minor), p.multi_processor_count, p.shared_memory_per_block_optin)


def nvidia_gpu(device: torch.device) -> Gpu | None:
    """Return the NVIDIA GPU of `device`, as its driver describes it; None for another device."""
    return None if device.type != "cuda" or torch.version.hip else device_gpu(device.index or 0)
