"""What a kernel is made for: the cache key of kernels, and the input of the solvers that choose tilings."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from flashrnn.cells import Cell
from flashrnn.gpu import Gpu
from flashrnn.problem import Problem, dtype_name, tf32_allowed


@dataclass(frozen=True)
class Variant:
    """What a call takes and returns, apart from its sizes."""

    reset: bool = False
    aux: torch.dtype | None = None  # of the stored states except h, at every step; None if these are not needed
    training: bool = False  # the forward stores gates for the backward
    d_aux: bool = False
    tf32: bool = False  # float32 products may have the precision of TF32
    half_bias: bool = False  # the forward reads biases in the dtype of Wx, otherwise in float32
    bidirectional: bool = False  # the second half of the heads goes backwards in time


@dataclass(frozen=True)
class KernelSpec:
    """Everything that a kernel and its tiling depend on. Kernels for d_R have the spec of their backward."""

    direction: str  # "forward" or "backward"
    cell: Cell
    heads: int
    head_dim: int
    batch: int
    dtype: torch.dtype  # of inputs and outputs
    gpu: Gpu
    variant: Variant = Variant()
    steps: int = 0  # typical number of steps of a short sequence (see SHORT); 0: not short
    any_sequences: bool = False  # prefer tilings with `Tiling.any_sequences`: see resident.tiling
    layers: int = 1  # concurrent layers of a network, each with its own kernel
    product_blocks: int = 0  # with several layers: blocks of the kernel that computes an input product

    @property
    def splits(self) -> int:
        """Return the number of tensor-core operands into which a float is split: SPLITS in kernels/common.cuh."""
        return 1 if self.dtype != torch.float32 else 2 if self.variant.tf32 else 3

    @property
    def of_all_variants(self) -> "KernelSpec":
        """Return the spec that all specs with the same tilings share."""
        return replace(self, variant=Variant(tf32=self.variant.tf32))

    def __str__(self) -> str:
        sizes = f"{self.heads} x {self.head_dim}, batch {self.batch}"
        short = f", {self.steps} steps" if self.steps else ""
        many = ", any sequences" if self.any_sequences else ""
        of = f"{self.layers} layers of {self.cell.name}" if self.layers > 1 else self.cell.name
        return f"{self.direction} of {of} {sizes}{short}{many}, {dtype_name(self.dtype)} on {self.gpu.name}"


class Concurrency(NamedTuple):
    """What runs concurrently with the kernel of a layer, on the remaining multiprocessors."""

    layers: int = 1  # concurrent layers, including this one
    product_blocks: int = 0  # of each kernel that computes an input product
    dependent: bool = False  # the kernel is a programmatic dependent launch: see `LoadedKernel`


ALONE = Concurrency()

SHORT = {8: 4, 32: 24}
"""Maximum time steps of a short sequence, in which loading R takes long -> the corresponding `KernelSpec.steps`."""


def short_steps(steps: int) -> int:
    """Return `KernelSpec.steps` for sequences of this number of time steps."""
    return next((about for most, about in SHORT.items() if steps <= most), 0)


def specs_of(problem: Problem) -> Iterator[KernelSpec]:
    """Yield a spec for each direction that the call needs.

    The batch size is one, because whether a kernel fits does not depend on it.
    """
    sizes = problem.cell, problem.heads, problem.head_dim, 1, problem.dtype, problem.gpu
    variant = Variant(problem.reset, tf32=problem.tf32)
    return (KernelSpec(direction, *sizes, variant) for direction in problem.directions)


def variant_of(reset: Tensor | None, h: Tensor, aux: Tensor, training: bool, d_aux: bool = False) -> Variant:
    """Return the variant of a call with these tensors."""
    aux_dtype = aux.dtype if len(aux) and aux.shape[2] else None
    tf32 = tf32_allowed(h.dtype, h.device)
    return Variant(reset is not None, aux_dtype, training, d_aux, tf32)
