"""The parameters of kernels: defined beside each kernel's source, and printed for the compiler.

arguments.py packs what is passed for them.

A kernel takes them as a list and builds the struct `Params` of them, whose members its functions read. With the struct
itself as the parameter, the compiler allocates registers differently, and the loops of some kernels get up to 47
instructions more (docs/dev/log.md). Structs that read members later hold a copy of `Params`, because a reference also
costs instructions.
"""

from dataclasses import dataclass

import torch

from flashrnn.cells.gates import recurrent_only
from flashrnn.cuda.spec import KernelSpec
from flashrnn.residual import residual_dtype


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter of 8 bytes: a number or a pointer to a tensor."""

    name: str
    type: str  # in CUDA C++
    dtype: torch.dtype | None = None  # of a tensor; None for a number, or a tensor of any dtype
    shape: tuple[int | str, ...] = ()  # of a tensor; names refer to other parameters, () is not checked


Parameters = tuple[Parameter, ...]
B, T = "B", "T"  # the names of the parameters for batch and time, in shapes


def declaration(parameters: Parameters) -> str:
    """Return the definitions of the struct `Params` and of the lists PARAMETERS and PARAMETER_NAMES.

    A kernel takes the first list and builds `Params params{PARAMETER_NAMES};` from the second. The kernel's own
    parameters have names that end with _, so that its code can only read the members of `params`.
    """
    shapes = [f"  // [{', '.join(map(str, one.shape))}]" if one.shape else "" for one in parameters]
    members = [f"  {one.type} {one.name};{shape}" for one, shape in zip(parameters, shapes, strict=True)]
    taken = f"#define PARAMETERS {', '.join(f'{one.type} {one.name}_' for one in parameters)}"
    names = f"#define PARAMETER_NAMES {', '.join(f'{one.name}_' for one in parameters)}"
    return "\n".join(("struct Params {", *members, "};", taken, names))


def numbers(*names: str) -> Parameters:
    """Return parameters for integers."""
    return tuple(Parameter(name, "i64") for name in names)


class Tensors:
    """Creates the tensor parameters of a kernel, from the names of their element types in kernels/common.cuh."""

    def __init__(self, spec: KernelSpec) -> None:
        self._dtypes = {
            "scalar": spec.dtype,
            "gate": residual_dtype(spec.dtype),
            "aux_number": spec.variant.aux,
            "float": torch.float32,
            "unsigned char": torch.bool,
            "u32": torch.int32,
        }

    def reads(self, name: str, number: str, *shape: int | str) -> Parameter:
        """Return a parameter for a tensor that is only read during the kernel."""
        return Parameter(name, f"const {number}* __restrict__", self._dtypes[number], shape)

    def writes(self, name: str, number: str, *shape: int | str) -> Parameter:
        """Return a parameter for a tensor that the kernel writes and that shares its memory with no other."""
        return Parameter(name, f"{number}* __restrict__", self._dtypes[number], shape)

    def shares(self, name: str, number: str, *shape: int | str) -> Parameter:
        """Return a parameter for a tensor that is also written through other pointers, by blocks or kernels."""
        return Parameter(name, f"{number}*", self._dtypes[number.removeprefix("const ")], shape)


def counts(spec: KernelSpec) -> tuple[int, int, int, int, int]:
    """Return the numbers of states, gates, and gates with input, with recurrent part, and recurrent-only."""
    cell = spec.cell
    kinds = cell.states, cell.gates, cell.input_gates, cell.recurrent_gates, recurrent_only(cell)
    return tuple(map(len, kinds))
