"""The input product between two concurrent layers: its tiling and its kernel, kernels/input_product.cuh."""

from dataclasses import dataclass
from functools import cache
from itertools import product

import torch

from flashrnn.cuda.build import Binary, build
from flashrnn.cuda.launch import LoadedKernel, load
from flashrnn.cuda.parameters import Parameter, Parameters, declaration, numbers
from flashrnn.cuda.resident import solver
from flashrnn.cuda.resident.parameters import chunks
from flashrnn.cuda.resident.source import LAYER_CHUNKS
from flashrnn.cuda.source import definitions
from flashrnn.cuda.spec import KernelSpec

OPERATIONS = 1600  # floating-point operations of a block per clock cycle, fitted on an H200 (docs/dev/log.md)
THREADS = 256
_STAGES = 6, 5, 4, 3  # stages of rows in shared memory: as many as fit


@dataclass(frozen=True)
class ProductTiling:
    """How the product between two layers is distributed over blocks; names as in kernels/input_product.cuh."""

    K: int
    width: int
    columns: int
    rows: int
    backward: bool = False
    stages: int = min(_STAGES)

    @property
    def blocks(self) -> int:
        return -(-self.width // self.columns)

    @property
    def chunk(self) -> int:
        """Return the steps of a chunk."""
        return LAYER_CHUNKS["backward" if self.backward else "forward"]

    @property
    def shared_bytes(self) -> int:
        depth = -(-self.K // 64) * 64
        weights = depth * self.columns * 2 if self.backward else self.columns * (depth * 2 + 16)
        return weights + self.stages * self.rows * 128

    def step_operations(self, batch: int) -> int:
        """Return the floating-point operations of a block per time step."""
        return 2 * batch * self.columns * self.K

    @staticmethod
    def of(spec: KernelSpec) -> "ProductTiling | None":
        """Return the tiling with the fewest blocks that is as fast as a layer's steps; None if there is none."""
        H, backward = spec.heads * spec.head_dim, spec.direction == "backward"
        gates = len(spec.cell.input_gates) * H
        K, width = (gates, H) if backward else (H, gates)
        step = solver.cycles(spec, solver.likely_tiling(spec))
        sizes = [(columns, rows) for columns in (128, 64, 32) for rows in (256, 128, 64) if rows > 64 or columns == 128]
        for (columns, rows), stages in product(sizes, _STAGES):
            tiling = ProductTiling(K, width, columns, rows, backward, stages)
            idle = rows > 128 and spec.batch * tiling.chunk <= rows // 2
            fits = tiling.shared_bytes <= spec.gpu.shared_per_block
            if fits and not idle and tiling.step_operations(spec.batch) <= step * OPERATIONS:
                return tiling
        return None


def parameters(dtype: torch.dtype) -> Parameters:
    """Return the parameters of resident/kernels/input_product.cuh."""
    return (
        Parameter("rows", "const scalar*", dtype),
        Parameter("W", "const scalar* __restrict__", dtype),
        Parameter("product", "scalar*", dtype),
        *chunks(),
        *numbers("B", "T", "row_t"),
    )


def compile_product(spec: KernelSpec, tiling: ProductTiling) -> Binary:
    """Return the compiled kernel of a product. This needs no GPU."""
    header, entry = "resident/kernels/input_product.cuh", "flashrnn_input_product"
    return build(prelude(spec.dtype, tiling), header, entry, spec.gpu.arch, str(spec))


def prelude(dtype: torch.dtype, tiling: ProductTiling) -> str:
    """Return the printed source before the header."""
    constants = {
        "BACKWARD": tiling.backward,
        "K": tiling.K,
        "WIDTH": tiling.width,
        "COLUMNS": tiling.columns,
        "ROWS": tiling.rows,
        "STAGES": tiling.stages,
        "LAYER_CHUNK": tiling.chunk,
        "SHARED_BYTES_EXPECTED": tiling.shared_bytes,
    }
    return "\n".join((definitions(dtype, constants, {}), declaration(parameters(dtype))))


@cache
def product_kernel(spec: KernelSpec, tiling: ProductTiling, cluster: int, device: int) -> LoadedKernel:
    shape = THREADS, tiling.shared_bytes, cluster, False
    return load(compile_product(spec, tiling), parameters(spec.dtype), device, *shape, dependent=True)
