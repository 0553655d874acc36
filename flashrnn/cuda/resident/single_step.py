"""A single time step of a layer, for few sequences, in one launch.

An input product by cuBLAS takes the host about as long as all the rest of a step without gradients, and a kernel for
sequences loads R in an order that pays for several steps.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from flashrnn.cells import Cell
from flashrnn.cells.trace import trace
from flashrnn.cuda.build import Binary, build
from flashrnn.cuda.launch import LoadedKernel, load
from flashrnn.cuda.parameters import B, Parameters, Tensors, counts, declaration, numbers
from flashrnn.cuda.resident.calls import Backward, each_state
from flashrnn.cuda.resident.source import gate_format
from flashrnn.cuda.source import cell_prelude
from flashrnn.cuda.spec import KernelSpec, Variant
from flashrnn.gpu import Gpu
from flashrnn.problem import aux_dtype, empty_aux, state_dtype
from flashrnn.residual import empty_gates, head_numbers

MOST_SEQUENCES = 64
MOST_WORK = {2: 2**22, 4: 2**23}  # sequences times units², by the bytes of a weight: beyond, tensor cores are faster
_SEQUENCES, _WARPS = 8, 4  # of a block; its sequences share a warp's rows of the weights
THREADS = 32 * _WARPS


class SingleStep:
    """Steps of layers with the sizes and dtype of a spec (`spec_of`), and what their backward passes share, if any."""

    def __init__(self, spec: KernelSpec, device: torch.device, backward: Backward | None = None) -> None:
        """Compile and load the kernel."""
        cell, B, N, D = spec.cell, spec.batch, spec.heads, spec.head_dim
        self.states, self.batch, self.size, self.backward = len(cell.states), B, N * D, backward
        self.gate_format = gate_format(cell, N, D, spec.dtype)
        self._launch = _kernel(spec, device.index).bind(B=B)
        self._blocks = -(-self.size // _WARPS) * -(-B // _SEQUENCES)
        rows = torch.empty(B, 1, 1, N, D, dtype=spec.dtype, device="meta")
        residual = empty_aux(cell, rows, False, True), empty_gates(cell, rows, True, self.gate_format)
        self._residual = [(tuple(one.shape), one.dtype) for one in residual]
        self._initial, self._zeros = [f"initial_{i}" for i in range(self.states)], [None] * self.states

    def of_layer(
        self,
        x: Tensor,
        W: Tensor,
        R: Tensor,
        b: Tensor | None,
        states: Sequence[Tensor],
        reset: Tensor | None,
        training: bool,
    ) -> tuple[Tensor, Tensor | None, Sequence[Tensor], Tensor | None]:
        """Return h [..., H], aux, the last states and gates; aux and gates are None without `training`.

        Args:
            x: [..., features], contiguous, with a row for each sequence.
            W: [Gi * H, features].
            R: [Gr, N, D, D].
            b: [G, N, D]; None means zeros. Weights have the dtype of x.
            states: the initial states [1, B, H], contiguous and in state dtype; an empty sequence means zeros.
            reset: bool, an element for each sequence, or None.
            training: a backward pass follows.
        """
        h, aux, gates = x.new_empty(*x.shape[:-1], self.size), None, None
        if training:
            aux, gates = [x.new_empty(shape, dtype=dtype) for shape, dtype in self._residual]
        last = x.new_empty(self.states, self.batch, self.size, dtype=state_dtype(x.dtype))
        arguments = {
            "x": x,
            "W": W.contiguous(),
            "R": R.contiguous(),
            "bias": None if b is None else b.contiguous(),
            "reset": None if reset is None else reset.contiguous(),
            "h": h,
            "aux": aux,
            "gates": gates,
            "last": last,
            **dict(zip(self._initial, states or self._zeros, strict=True)),
            "features": x.shape[-1],
        }
        self._launch(self._blocks, arguments)
        return h, aux, each_state(last), gates


def spec_of(cell: Cell, heads: int, head_dim: int, batch: int, dtype: torch.dtype, gpu: Gpu) -> KernelSpec:
    """Return the spec of steps, with or without resets and a backward pass."""
    aux = aux_dtype(cell, dtype, all_states=False) if len(cell.states) > 1 else None
    return KernelSpec("forward", cell, heads, head_dim, batch, dtype, gpu, Variant(aux=aux))


def serves(cell: Cell, size: int, batch: int, dtype: torch.dtype) -> bool:
    """Return whether steps of `size` units use this kernel: those of few sequences, without reductions over units."""
    few = batch <= MOST_SEQUENCES and batch * size**2 <= MOST_WORK[dtype.itemsize]
    return few and not trace(cell).reduces


def parameters(spec: KernelSpec) -> Parameters:
    """Return the parameters of resident/kernels/single_step.cuh."""
    tensors, (S, G, GI, GR, _), N, D = Tensors(spec), counts(spec), spec.heads, spec.head_dim
    return (
        tensors.reads("x", "scalar", B, "features"),
        tensors.reads("W", "scalar", GI, N, D, "features"),
        tensors.reads("R", "scalar", GR, N, D, D),
        tensors.reads("bias", "scalar", G, N, D),
        tensors.reads("reset", "unsigned char", B),
        tensors.writes("h", "scalar", B, N, D),
        tensors.writes("aux", "aux_number", S - 1, B, N, D),
        tensors.writes("gates", "gate", B, N, head_numbers(spec.cell, N, D, spec.dtype)),
        tensors.writes("last", "float", S, B, N, D),
        *(tensors.reads(f"initial_{i}", "float", B, N, D) for i in range(S)),
        *numbers("features", "B"),
    )


@cache
def _kernel(spec: KernelSpec, device: int) -> LoadedKernel:
    return load(compile_kernel(spec), parameters(spec), device, THREADS, 0, 1, False)


def compile_kernel(spec: KernelSpec) -> Binary:
    """Return the compiled kernel. This needs no GPU."""
    header, entry = "resident/kernels/single_step.cuh", "flashrnn_single_step"
    return build(prelude(spec), header, entry, spec.gpu.arch, f"a single step of {spec}")


def prelude(spec: KernelSpec) -> str:
    """Return the printed source before the header. It is the same for all batch sizes and for training."""
    states = range(len(spec.cell.states))
    in_pieces = gate_format(spec.cell, spec.heads, spec.head_dim, spec.dtype) == "PNDG"
    constants = {"SEQS": _SEQUENCES, "WARPS": _WARPS, "GATES_IN_PIECES": in_pieces}
    return "\n".join(
        (
            cell_prelude(spec, constants),
            declaration(parameters(spec)),
            f"#define INITIAL_STATES {', '.join(f'params.initial_{i}' for i in states)}",
        )
    )
