"""The gradients of all weights after a short sequence, in one launch.

Computed separately, they take two launches and, in a layer, a cuBLAS product, each of which takes the host longer than
the GPU.
"""

from functools import cache

import torch
from torch import Tensor

from flashrnn.cuda.build import Binary, build
from flashrnn.cuda.launch import LoadedKernel, load
from flashrnn.cuda.parameters import B, Parameter, Parameters, T, Tensors, declaration, numbers
from flashrnn.cuda.source import definitions
from flashrnn.cuda.spec import SHORT, KernelSpec
from flashrnn.cuda.weight_gradient import gradient_rows, previous_h, sizes_and_indices
from flashrnn.memory_format import aligned

MOST_ROWS = 256  # steps x sequences; beyond, other kernels read less, because their blocks have more units
_UNITS, _COLUMNS, _WARPS = 128, 64, 4  # of a block
_ROW_BYTES, _STAGES = 64, 3  # of a unit in the rows of a load; loads in flight and in use
THREADS = 32 * _WARPS


class ShortGradients:
    """The gradients of R, b and W after backward passes of a spec.

    All tensors [B, T, ...] have the same memory format.
    """

    def __init__(self, spec: KernelSpec, steps: int, time_major: bool, partials: int, device: int) -> None:
        """Compile and load the kernel. `partials` is the number of partial sums of the gradient of b."""
        cell, N, D = spec.cell, spec.heads, spec.head_dim
        self._R, self._b = (len(cell.recurrent_gates), N, D, D), (len(cell.gates), N, D)
        self._width = len(cell.input_gates) * N * D
        pairs = len(cell.gates) * N * D // 2
        known = {"B": spec.batch, "T": steps, "row_t": spec.batch if time_major else 1}
        self._launch = _kernel(spec, device).bind(**known, partials=partials, pairs=pairs)
        self._tiles = N * _tiles(self._R[0] * D, _UNITS) * _tiles(D, _COLUMNS)  # of d_R
        self._of_W, self._of_b = _tiles(self._width, _UNITS), _tiles(pairs, THREADS)
        self._vector = min(16 // spec.dtype.itemsize, D & -D)

    def multiplies(self, x: Tensor) -> bool:
        """Return whether the kernel computes the gradient of W for a layer input x [..., features]."""
        return x.shape[-1] % self._vector == 0

    def __call__(
        self,
        d_Wx: Tensor,
        d_u: Tensor,
        h: Tensor,
        states: Tensor | None,
        reset: Tensor | None,
        partial: Tensor,
        b_dtype: torch.dtype,
        x: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the gradients of R, of b in `b_dtype` and, if x is given, of W.

        Args:
            d_Wx: the gradient of the input products, in the memory order of h. Their shapes are ignored.
            d_u: the gradient of the recurrent-only gates, as for `products.weight_gradient_of_states`.
            h: after every step.
            states: the initial states [S, B, N, D], or None.
            reset: [B, T], or None.
            partial: float32 [partials, G, N, D]; its sum is the gradient of b.
            b_dtype: float32, or the dtype of h.
            x: the layer's input, contiguous and in the memory order of h.
        """
        d_R, d_b = h.new_empty(*self._R), h.new_empty(*self._b, dtype=b_dtype)
        features, d_W, blocks = 0, None, self._tiles + self._of_b
        if x is not None:
            features = x.shape[-1]
            d_W = h.new_empty(self._width, features)
            blocks += self._of_W * _tiles(features, _COLUMNS)
        arguments = {
            "d_x": d_Wx,
            "d_u": d_u,
            **previous_h(h, states, reset),
            "input": None if x is None else aligned(x),
            "partial": partial,
            "d_R": d_R,
            "d_W": d_W,
            "d_b": d_b,
            "features": features,
            "half_bias": int(b_dtype == h.dtype),
        }
        self._launch(blocks, arguments)
        return d_R, d_b, d_W


def _tiles(number: int, of: int) -> int:
    return -(-number // of)


def serves(spec: KernelSpec, steps: int) -> bool:
    """Return whether backward passes of a spec with this number of steps use this kernel."""
    return spec.head_dim % 2 == 0 and steps <= max(SHORT) and spec.batch * steps <= MOST_ROWS


def parameters(spec: KernelSpec) -> Parameters:
    """Return the parameters of kernels/short_gradients.cuh."""
    GR, N, D = len(spec.cell.recurrent_gates), spec.heads, spec.head_dim
    tensors, width = Tensors(spec), len(spec.cell.input_gates) * N * D
    return (
        *gradient_rows(spec),
        tensors.shares("input", "const scalar", B, T, "features"),
        Parameter("partial", "const float2* __restrict__", torch.float32, ("partials", "pairs", 2)),
        Parameter("d_R", "Pair* __restrict__", spec.dtype, (GR, N, D, D)),
        Parameter("d_W", "Pair* __restrict__", spec.dtype, (width, "features")),
        Parameter("d_b", "void* __restrict__"),
        *numbers("features", "half_bias", "B", "T", "row_t", "partials", "pairs"),
    )


@cache
def _kernel(spec: KernelSpec, device: int) -> LoadedKernel:
    shape = THREADS, shared_bytes(spec), 1, False
    return load(compile_kernel(spec), parameters(spec), device, *shape)


def shared_bytes(spec: KernelSpec) -> int:
    """Return the size of a block's shared memory."""
    padded = (_UNITS + _COLUMNS) * spec.dtype.itemsize + 2 * 16
    return _STAGES * _rows(spec) * padded


def _rows(spec: KernelSpec) -> int:
    """Return the number of rows per load."""
    return _ROW_BYTES // spec.dtype.itemsize


def compile_kernel(spec: KernelSpec) -> Binary:
    """Return the compiled kernel. This needs no GPU."""
    return build(
        prelude(spec), "kernels/short_gradients.cuh", "flashrnn_short_gradients", spec.gpu.arch, f"weights of {spec}"
    )


def prelude(spec: KernelSpec) -> str:
    """Return the printed source before the header."""
    sizes, indices = sizes_and_indices(spec)
    constants = {
        "UNITS": _UNITS,
        "COLUMNS": _COLUMNS,
        "WARPS": _WARPS,
        "ROWS": _rows(spec),
        "STAGES": _STAGES,
        "SHARED_BYTES_EXPECTED": shared_bytes(spec),
    }
    source = definitions(spec.dtype, sizes | constants, indices)
    return "\n".join((source, declaration(parameters(spec))))
