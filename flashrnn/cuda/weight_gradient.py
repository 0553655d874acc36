"""d_R after the time loop. Narrow heads have a kernel of their own: a library product with so few results would not
fill a GPU."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from flashrnn import products
from flashrnn.cells.gates import class_indices, recurrent_only
from flashrnn.cuda.build import Binary, build
from flashrnn.cuda.launch import LoadedKernel, load
from flashrnn.cuda.parameters import B, Parameter, Parameters, T, Tensors, counts, declaration, numbers
from flashrnn.cuda.source import definitions
from flashrnn.cuda.spec import KernelSpec
from flashrnn.cuda.sum_of_partials import sum_of_partials
from flashrnn.memory_format import aligned, contiguous

WIDEST = 128  # head size; larger ones were not tried
_ROWS = 32  # rows per load
_STAGES = 5  # loads in flight and in use, if they fit
_UNITS = 256  # of a block, over gates and heads: their sums are in registers
_CLUSTER = 8  # blocks that reduce their sums, on GPUs with clusters


@dataclass(frozen=True)
class Tiling:
    """How many gates and heads a block computes; names as in kernels/weight_gradient.cuh."""

    gates: int
    heads: int
    warps: int
    stages: int
    blocks: int  # per cluster
    shared_bytes: int
    groups: int  # of gates and heads; each is a set of clusters that read the same rows

    @staticmethod
    def of(spec: KernelSpec) -> "Tiling":
        """Return the tiling for a spec."""
        heads, gpu = spec.heads, spec.gpu
        padded, all_gates = -(-spec.head_dim // 16) * 16, len(spec.cell.recurrent_gates)
        gate_groups = -(-all_gates * padded // _UNITS)
        gates = -(-all_gates // gate_groups)
        together = min(heads, max(1, _UNITS // (gates * padded)))
        tiles = gates * padded // 16
        warps = together * tiles // (1 if tiles % 2 else 2)
        stage = (gates + 1) * _ROWS * (together * padded * 2 + 16)
        stages = min(_STAGES, gpu.shared_per_block // stage)
        blocks = _CLUSTER if gpu.clusters else 1
        results = together * gates * padded * (padded + 8) * 4 if gpu.clusters else 0
        groups = -(-all_gates // gates) * -(-heads // together)
        return Tiling(gates, together, warps, stages, blocks, max(stages * stage, results), groups)


class WeightGradient:
    """d_R after backward passes of a spec. All tensors [B, T, ...] have the same memory format."""

    def __init__(self, spec: KernelSpec, steps: int, time_major: bool, device: int) -> None:
        """Compile and load the kernel, if there is one for this spec."""
        self._spec, self.has_kernel = spec, has_kernel(spec)
        if not self.has_kernel:
            return
        kernel, tiling = _kernel(spec, device)
        B, T = spec.batch, steps
        k_splits = max(1, min(spec.gpu.multiprocessors // tiling.groups, B * T // (_STAGES * _ROWS)) // tiling.blocks)
        self._partials = k_splits if k_splits > 1 or tiling.blocks == 1 else 0
        self._shape = len(spec.cell.recurrent_gates), spec.heads, spec.head_dim, spec.head_dim
        sizes = {"B": B, "T": T, "row_t": B if time_major else 1, "block_rows": -(-B * T // (k_splits * tiling.blocks))}
        self._launch, self._groups = kernel.bind(**sizes), k_splits * tiling.groups

    def __call__(self, d_Wx: Tensor, d_u: Tensor, h: Tensor, states: Tensor | None, reset: Tensor | None) -> Tensor:
        """Return d_R, as `products.weight_gradient_of_states` does. With a kernel, the shape of h is ignored."""
        if not self.has_kernel:
            cell, bidirectional = self._spec.cell, self._spec.variant.bidirectional
            return products.weight_gradient_of_states(cell, d_Wx, d_u, h, states, reset, bidirectional)
        partial = d_R = None
        if self._partials:
            partial = h.new_empty((self._partials, *self._shape), dtype=torch.float32)
        else:
            d_R = h.new_empty(self._shape)
        arguments = {
            "d_x": d_Wx,
            "d_u": d_u,
            **previous_h(h, states, reset),
            "partial": partial,
            "d_R": d_R,
        }
        self._launch(self._groups, arguments)
        return d_R if partial is None else sum_of_partials(partial, h.dtype)


def parameters(spec: KernelSpec) -> Parameters:
    """Return the parameters of kernels/weight_gradient.cuh."""
    GR, N, D = len(spec.cell.recurrent_gates), spec.heads, spec.head_dim
    return (
        *gradient_rows(spec),
        Tensors(spec).writes("partial", "float"),
        Parameter("d_R", "u32* __restrict__", spec.dtype, (GR, N, D, D)),
        *numbers("B", "T", "row_t", "block_rows"),
    )


def gradient_rows(spec: KernelSpec) -> Parameters:
    """Return the parameters for the rows over which d_R is summed: gradients of gates, h, and initial h or null."""
    tensors, (_, _, GI, _, GU), N, D = Tensors(spec), counts(spec), spec.heads, spec.head_dim
    return (
        tensors.shares("d_x", "const scalar", B, T, GI, N, D),
        tensors.shares("d_u", "const scalar", B, T, GU, N, D),
        tensors.shares("h", "const scalar", B, T, N, D),
        tensors.shares("initial", "const scalar", B, N, D),
        tensors.shares("reset", "const unsigned char", B, T),
    )


def previous_h(h: Tensor, states: Tensor | None, reset: Tensor | None) -> dict[str, Tensor | None]:
    """Return the arguments from which kernels/previous_h.cuh takes h before each step."""
    initial = None if states is None else aligned(states[0].to(h.dtype).contiguous())
    return {"h": aligned(h), "initial": initial, "reset": contiguous(reset)}


def has_kernel(spec: KernelSpec) -> bool:
    """Return whether the kernel of this module computes d_R for a spec, rather than a library product."""
    return spec.dtype.itemsize == 2 and spec.head_dim % 2 == 0 and spec.head_dim <= WIDEST


def prepare_weight_gradient(spec: KernelSpec, device: int) -> None:
    """Compile and load what `WeightGradient` will need."""
    if has_kernel(spec):
        _kernel(spec, device)


@cache
def _kernel(spec: KernelSpec, device: int) -> tuple[LoadedKernel, Tiling]:
    binary, tiling = compile_kernel(spec)
    shape = 32 * tiling.warps, tiling.shared_bytes, tiling.blocks, False
    return load(binary, parameters(spec), device, *shape), tiling


def compile_kernel(spec: KernelSpec) -> tuple[Binary, Tiling]:
    """Return the compiled kernel and its tiling. This needs no GPU."""
    tiling, entry = Tiling.of(spec), "flashrnn_weight_gradient"
    return build(prelude(spec, tiling), "kernels/weight_gradient.cuh", entry, spec.gpu.arch, str(spec)), tiling


def prelude(spec: KernelSpec, tiling: Tiling) -> str:
    """Return the printed source before the header."""
    sizes, indices = sizes_and_indices(spec)
    constants = {
        "GATES_AT_ONCE": tiling.gates,
        "HEADS_AT_ONCE": tiling.heads,
        "ROWS": _ROWS,
        "STAGES": tiling.stages,
        "CLUSTER": tiling.blocks,
        "SHARED_BYTES_EXPECTED": tiling.shared_bytes,
    }
    source = definitions(spec.dtype, sizes | constants, indices)
    return "\n".join((source, declaration(parameters(spec))))


def sizes_and_indices(spec: KernelSpec) -> tuple[dict[str, int], dict]:
    """Return constants of the cell for kernels of d_R: sizes, and the indices of its gates in d_Wx and d_u."""
    cell = spec.cell
    sizes = {
        "HEADS": spec.heads,
        "D": spec.head_dim,
        "GR": len(cell.recurrent_gates),
        "GI": len(cell.input_gates),
        "GU": len(recurrent_only(cell)),
        "RESET": spec.variant.reset,
        "BIDIRECTIONAL": spec.variant.bidirectional,
    }
    indices = {
        "INPUT_OF": class_indices(cell.recurrent_gates, cell.input_gates),
        "RECURRENT_ONLY_OF": class_indices(cell.recurrent_gates, recurrent_only(cell)),
    }
    return sizes, indices
