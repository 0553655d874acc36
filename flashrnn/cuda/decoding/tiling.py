"""The tiling of a decoding step of a language model: the constants of its kernel."""

from dataclasses import dataclass

import torch

from flashrnn.cells.gates import varying
from flashrnn.cells.printers.cuda import Exchange, exchanges
from flashrnn.cells.trace import trace
from flashrnn.cuda.spec import KernelSpec

_VECTOR = 64  # bytes of a row that four lanes load together
COLUMNS = 12  # of the table of addresses
WARPS = 8  # of a thread block, for products
THREADS = 32 * (WARPS + 4)  # one more warpgroup copies weights
_MOST_SLOTS, _FEWEST_SLOTS = 24, 4
_FEW = WARPS  # largest number of sequences of kernels/step.cuh; kernels/step_of_many.cuh serves more
_MOST_WIDTH = 1024  # so that a warp's registers hold a row and its operands


@dataclass(frozen=True)
class ModelSpec:
    """Everything that the kernel of a decoding step depends on."""

    kernel: KernelSpec  # its batch is the largest that is served
    blocks: int
    hidden: int
    classes: int
    int8: bool = False  # the weights of linear layers are int8


@dataclass(frozen=True)
class StepTiling:
    """A tiling: the slots for chunks of weights in a block's shared memory, and the largest number of sequences."""

    slots: int
    sequences: int

    @property
    def many(self) -> bool:
        """Return whether the kernel is that of kernels/step_of_many.cuh."""
        return self.sequences > _FEW


def largest_batch(spec: KernelSpec) -> int:
    """Return the largest batch that a kernel serves: its operands must fit into registers."""
    return 8 if spec.dtype.itemsize == 4 else 64


def unsupported_sizes(spec: ModelSpec) -> str | None:
    """Return why no kernel serves a model of these sizes; None if one does."""
    kernel = spec.kernel
    if kernel.gpu.capability < (9, 0):
        return f"{kernel.gpu.name} has no bulk copies that complete on an mbarrier (compute capability 9.0)"
    width, numbers = kernel.heads * kernel.head_dim, _VECTOR // kernel.dtype.itemsize
    if kernel.head_dim % numbers:
        return f"the head size {kernel.head_dim} is not a multiple of {numbers}"
    if reason := unsupported_norms(width, kernel.head_dim):
        return reason
    if width > _MOST_WIDTH:
        return f"the width {width} is larger than {_MOST_WIDTH}"
    if spec.hidden % width:
        return f"the MLP's {spec.hidden} units are not a multiple of the width {width}"
    if kernel.batch > largest_batch(kernel):
        return f"a batch of {kernel.batch} is larger than {largest_batch(kernel)}"
    slices = spec.hidden // width
    if kernel.batch > _FEW and kernel.gpu.multiprocessors < slices:
        return f"{kernel.gpu.name} has {kernel.gpu.multiprocessors} multiprocessors, but {slices} are needed"
    if head_exchanges(spec) and kernel.gpu.multiprocessors < width // 8:
        return f"{kernel.gpu.name} has fewer than {width // 8} multiprocessors, one for each eight units"
    return None if tiling(spec) else "its weights and partial sums exceed the shared memory of a multiprocessor"


def unsupported_norms(width: int, head_dim: int) -> str | None:
    """Return why a warp cannot normalise rows of these sizes; None if it can."""
    for name, size in {"width": width, "head size": head_dim}.items():
        if size % 128 and (size & (size - 1) or size < 4):
            return f"{name} {size} is neither a multiple of 128 nor a power of two"
    return None


def tiling(spec: ModelSpec) -> StepTiling | None:
    """Return the tiling for a model; None if none fits."""
    sequences = _sequences(spec.kernel.batch)
    for slots in range(_MOST_SLOTS, _FEWEST_SLOTS - 1, -1):
        found = StepTiling(slots, sequences)
        if shared_bytes(spec, found) <= spec.kernel.gpu.shared_per_block:
            return found
    return None


def _sequences(batch: int) -> int:
    """Return the number of sequences of the kernel that serves a batch."""
    return next(size for size in (_FEW, 32, 64) if size >= batch)


def shared_bytes(spec: ModelSpec, tiling: StepTiling) -> int:
    """Return the size in bytes of `Shared` in kernels/step.cuh or kernels/step_of_many.cuh."""
    size, width = spec.kernel.dtype.itemsize, _width(spec)
    recurrent, weights = spec.kernel.head_dim * size + _VECTOR, width * size + _VECTOR
    if spec.int8:
        weights = width + _VECTOR // size
    slots = tiling.slots * (8 * max(recurrent, weights) + 16)  # with two barriers for each
    table = 8 * spec.blocks * COLUMNS
    products = _aligned(slots + table + 4)
    operand = tiling.sequences * (width * size + _VECTOR)
    moments = 2 * WARPS * 8
    if tiling.many:
        sums = WARPS * _sums(spec) * 4 * 32 * 4
        stream = stream_rows(spec, tiling) * width * 4
        return _aligned(products + operand + sums + stream + 2 * moments + 8 * (tiling.sequences // 16))
    sums = WARPS * _sums(spec) * tiling.sequences * 8 * 4
    stream = tiling.sequences * width * 4
    residual = tiling.sequences * output_tiles(spec) * 8 * 4
    return products + sums + stream + residual + operand + moments


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


def _width(spec: ModelSpec) -> int:
    return spec.kernel.heads * spec.kernel.head_dim


def _sums(spec: ModelSpec) -> int:
    """Return how many tiles have sums in shared memory at a time: a multiple of four, whose rows fill a warp."""
    return -(-len(varying(spec.kernel.cell)) // 4) * 4


def head_exchanges(spec: ModelSpec) -> list[Exchange]:
    """Return the exchanges between the units of a head in a step of the cell."""
    if not trace(spec.kernel.cell).reduces:
        return []
    return [one for one in exchanges(spec.kernel.cell, "forward") if one.words]


def output_tiles(spec: ModelSpec) -> int:
    """Return how many tiles of eight units of the residual stream a thread block computes."""
    return -(-_width(spec) // (8 * spec.kernel.gpu.multiprocessors))


def row_blocks(spec: ModelSpec, tiling: StepTiling) -> int:
    """Return how many thread blocks normalise rows."""
    return min(tiling.sequences, spec.kernel.gpu.multiprocessors)


def stream_rows(spec: ModelSpec, tiling: StepTiling) -> int:
    """Return how many rows each of these blocks normalises."""
    return -(-tiling.sequences // row_blocks(spec, tiling))


def padding(dtype: torch.dtype) -> int:
    """Return the padding elements after a row of an operand in shared memory, which put rows in different banks."""
    return _VECTOR // dtype.itemsize
