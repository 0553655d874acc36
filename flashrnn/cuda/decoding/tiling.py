"""How a step of a language model is laid out on a GPU: constants of its kernel."""

from dataclasses import dataclass

from flashrnn.cuda.source import cell_prelude
from flashrnn.cuda.spec import KernelSpec

_VECTOR = 64  # bytes of a row that four lanes load at once
_MOST_WARPS = 12
_MOST_SLOTS = 24


@dataclass(frozen=True)
class ModelSpec:
    """Everything that the kernel of a step depends on."""

    kernel: KernelSpec  # its batch is that of the largest call
    blocks: int
    hidden: int
    classes: int


@dataclass(frozen=True)
class StepTiling:
    """A layout: warps of a block of threads, chunks of weights in its memory, and for how many sequences it is."""

    warps: int
    slots: int
    sequences: int

    @property
    def threads(self) -> int:
        return 32 * self.warps


def largest_batch(spec: KernelSpec) -> int:
    """Return for how many sequences at most there is a kernel: more take too many registers, and matrix products of all
    of them at once are as fast."""
    return 8 if spec.dtype.itemsize == 4 else 16


def unsupported_sizes(spec: ModelSpec) -> str | None:
    """Return why no kernel serves a model of these sizes; None if one does."""
    kernel = spec.kernel
    width, numbers = kernel.heads * kernel.head_dim, _VECTOR // kernel.dtype.itemsize
    if kernel.head_dim % numbers:
        return f"heads of {kernel.head_dim} units are not a multiple of {numbers}"
    for name, size in {"width": width, "head size": kernel.head_dim}.items():
        if size % 128 and size & (size - 1):
            return f"{name} {size} is neither a multiple of 128 nor a power of two"
    if spec.hidden % width:
        return f"the MLP's {spec.hidden} units are not a multiple of the width {width}"
    if kernel.batch > largest_batch(kernel):
        return f"a batch of {kernel.batch} is larger than {largest_batch(kernel)}"
    return None if tiling(spec) else "its sums do not fit into shared memory"


def tiling(spec: ModelSpec) -> StepTiling | None:
    """Return the layout of a model; None if there is none."""
    vectors = _vectors(spec)
    warps = max(n for n in range(1, _MOST_WARPS + 1) if vectors % n == 0)
    sequences = 8 if spec.kernel.batch <= 8 else 16
    for slots in range(_MOST_SLOTS, 1, -1):
        found = StepTiling(warps, slots, sequences)
        if shared_bytes(spec, found) <= spec.kernel.gpu.shared_per_block:
            return found
    return None


def shared_bytes(spec: ModelSpec, tiling: StepTiling) -> int:
    """Return the bytes of `Shared` in kernels/step.cuh."""
    kernel = spec.kernel
    width = kernel.heads * kernel.head_dim
    fifo = tiling.slots * _warp_vectors(spec, tiling) * tiling.threads * 16
    sums = tiling.warps * max(4, len(kernel.cell.gates)) * tiling.sequences * 8 * 4
    residual = tiling.sequences * _output_tiles(spec) * 8 * 4
    operand = tiling.sequences * (width * kernel.dtype.itemsize + _VECTOR)
    return fifo + sums + residual + operand


def _vectors(spec: ModelSpec) -> int:
    return spec.kernel.heads * spec.kernel.head_dim * spec.kernel.dtype.itemsize // _VECTOR


def _warp_vectors(spec: ModelSpec, tiling: StepTiling) -> int:
    return -(-_vectors(spec) // tiling.warps)


def _output_tiles(spec: ModelSpec) -> int:
    """Return how many tiles of eight units of the residual stream a block of threads computes."""
    return -(-spec.kernel.heads * spec.kernel.head_dim // (8 * spec.kernel.gpu.multiprocessors))


def prelude(spec: ModelSpec, tiling: StepTiling) -> str:
    """Return the source before kernels/step.cuh."""
    constants = {
        "BLOCKS": spec.blocks,
        "HIDDEN": spec.hidden,
        "CLASSES": spec.classes,
        "WARPS": tiling.warps,
        "SLOTS": tiling.slots,
        "SEQS": tiling.sequences,
        "SEQ_TILES": -(-tiling.sequences // 16),
        "OUTPUT_TILES": _output_tiles(spec),
        "SHARED_BYTES_EXPECTED": shared_bytes(spec, tiling),
    }
    return cell_prelude(spec.kernel, constants)
