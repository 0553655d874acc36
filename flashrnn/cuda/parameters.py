"""The parameters of kernels: defined once, and printed for the compiler. arguments.py packs what is passed for them.

A kernel takes them as a list and builds the struct `Params` of them, whose members its functions read. With the struct
itself as the parameter, the compiler allocates registers differently, and the loops of some kernels get up to 47
instructions more (docs/dev/log.md). Structs that read members later hold a copy of `Params`, because a reference also
costs instructions.
"""

from dataclasses import dataclass

import torch

from flashrnn.cells.gates import constant, recurrent_only
from flashrnn.cells.hoisting import Hoisted
from flashrnn.cells.trace import trace
from flashrnn.cuda.spec import KernelSpec
from flashrnn.residual import head_numbers, residual_dtype


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter of 8 bytes: a number or a pointer to a tensor."""

    name: str
    type: str  # in CUDA C++
    dtype: torch.dtype | None = None  # of a tensor; None for a number, or a tensor of any dtype
    shape: tuple[int | str, ...] = ()  # of a tensor; names refer to other parameters, () is not checked


Parameters = tuple[Parameter, ...]


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


def fused(spec: KernelSpec) -> Parameters:
    """Return the parameters of {forward,backward}.cuh in resident/kernels."""
    return _fused_forward(spec) if spec.direction == "forward" else _fused_backward(spec)


def streaming(spec: KernelSpec) -> Parameters:
    """Return the parameters of {forward,backward}.cuh in streaming/kernels."""
    return _stream_forward(spec) if spec.direction == "forward" else _stream_backward(spec)


def _numbers(*names: str) -> Parameters:
    return tuple(Parameter(name, "i64") for name in names)


class _Tensors:
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


B, T = "B", "T"
# Strides in bytes between steps are arguments, because the time loop does not recompute what is in constant memory.
_FUSED_NUMBERS = _numbers(
    "B", "T", "row_b", "row_t", "first_group", "x_step", "h_step", "aux_step", "gates_step", "used_sequences"
)


def _fused_forward(spec: KernelSpec) -> Parameters:
    tensors, (S, G, GI, GR, _), N, D = _Tensors(spec), _counts(spec), spec.heads, spec.head_dim
    return (
        tensors.reads("x", "scalar", B, T, GI, N, D),
        tensors.reads("R", "scalar", GR, N, D, D),
        tensors.reads("bias", "scalar" if spec.variant.half_bias else "float", G, N, D),
        tensors.reads("initial", "float", S, B, N, D),
        tensors.reads("resets", "u32"),
        tensors.writes("h", "scalar", B, T, N, D),
        tensors.writes("aux", "aux_number", S - 1, B, T, N, D),
        tensors.writes("last", "float", S, B, N, D),
        tensors.writes("gates", "gate", B, T, N, head_numbers(spec.cell, N, D, spec.dtype)),
        Parameter("workspace", "uint4*", torch.uint8),
        Parameter("launch", "u64"),
        *(_chunks() if spec.layers > 1 else ()),
        *_FUSED_NUMBERS,
    )


def _chunks() -> Parameters:
    """Return the counters of chunks that a kernel waits for, the blocks that count each, and those it increments."""
    return (
        Parameter("arrived", "const u32*", torch.int32),
        *_numbers("producers"),
        Parameter("done", "u32*", torch.int32),
    )


def _fused_backward(spec: KernelSpec) -> Parameters:
    tensors, (S, G, GI, GR, GU), N, D = _Tensors(spec), _counts(spec), spec.heads, spec.head_dim
    other_states = range(S - 1) if spec.variant.d_aux else ()
    return (
        tensors.reads("R", "scalar", GR, N, D, D),
        *([tensors.reads("bias", "float", G, N, D)] if constant(spec.cell) else []),  # for gates that are not stored
        tensors.reads("initial", "float", S, B, N, D),
        tensors.reads("resets", "u32"),
        tensors.reads("h", "scalar", B, T, N, D),
        tensors.reads("aux", "aux_number", S - 1, B, T, N, D),
        tensors.reads("first_aux", "aux_number", S - 1, B, N, D),
        tensors.shares("gates", "const gate", B, T, N, head_numbers(spec.cell, N, D, spec.dtype)),
        tensors.reads("d_h", "scalar", B, T, N, D),
        *(tensors.reads(f"d_aux_{i}", "float", B, T, N, D) for i in other_states),
        tensors.reads("d_last", "float", S, B, N, D),
        tensors.shares("d_x", "scalar", B, T, GI, N, D),  # may alias gates
        tensors.writes("d_u", "scalar", B, T, GU, N, D),
        tensors.writes("d_bias", "float"),
        tensors.writes("d_initial", "float", S, B, N, D),
        Parameter("progress", "u32*", torch.int32),
        Parameter("workspace", "u64*", torch.uint8),
        Parameter("launch", "u64"),
        *(_chunks() if spec.layers > 1 else ()),
        *_FUSED_NUMBERS,
    )


def _stream_forward(spec: KernelSpec) -> Parameters:
    tensors, (S, G, GI, _, _), N, D = _Tensors(spec), _counts(spec), spec.heads, spec.head_dim
    return (
        tensors.reads("x", "scalar", B, T, GI, N, D),
        Parameter("R", "const uint4* __restrict__", spec.dtype),
        tensors.reads("bias", "float", G, N, D),
        tensors.reads("reset", "unsigned char", B, T),
        tensors.shares("exchange", "scalar"),
        Parameter("counters", "u32*", torch.int32),
        tensors.writes("h", "scalar", B, T, N, D),
        tensors.writes("aux", "aux_number", S - 1, B, T, N, D),
        tensors.writes("state", "float", S, B, N, D),
        *_stream_gates(spec, ""),
        *_numbers("B", "T", "row_b", "row_t"),
    )


def _stream_gates(spec: KernelSpec, const: str) -> Parameters:
    """Return the parameter for stored gates and, if steps reduce over units, those of the exchange between blocks."""
    N, D, dtype = spec.heads, spec.head_dim, residual_dtype(spec.dtype)
    if not trace(spec.cell).reduces:
        return (
            Parameter("gates", f"{const}struct UnitGates* __restrict__", dtype, (B, T, N, D, len(spec.cell.gates))),
        )
    return (
        Parameter("gates", f"{const}gate* __restrict__", dtype, (B, T, N, head_numbers(spec.cell, N, D, spec.dtype))),
        Parameter("parts", "uint4*", torch.float32),
        *_numbers("first_item"),
    )


def _stream_backward(spec: KernelSpec) -> Parameters:
    tensors, (S, G, GI, _, GU), N, D = _Tensors(spec), _counts(spec), spec.heads, spec.head_dim
    return (
        Parameter("R", "const uint4* __restrict__", spec.dtype),
        tensors.reads("reset", "unsigned char", B, T),
        tensors.shares("exchange", "scalar"),
        Parameter("counters", "u32*", torch.int32),
        tensors.reads("initial", "float", S, B, N, D),
        tensors.reads("h", "scalar", B, T, N, D),
        tensors.reads("aux", "aux_number", S - 1, B, T, N, D),
        *([tensors.reads("bias", "float", G, N, D)] if trace(spec.cell).reduces else []),
        *_stream_gates(spec, "const "),
        tensors.reads("d_h", "scalar", B, T, N, D),
        tensors.reads("d_aux", "float", S - 1, B, T, N, D),
        tensors.writes("d_x", "scalar", B, T, GI, N, D),
        tensors.writes("d_u", "scalar", B, T, GU, N, D),
        tensors.shares("d_bias", "float", B, G, N, D),
        tensors.writes("d_state", "float", S, B, N, D),
        *_numbers("B", "T", "row_b", "row_t"),
    )


def weight_gradient(spec: KernelSpec) -> Parameters:
    """Return the parameters of kernels/weight_gradient.cuh."""
    GR, N, D = len(spec.cell.recurrent_gates), spec.heads, spec.head_dim
    return (
        *_gradient_rows(spec),
        _Tensors(spec).writes("partial", "float"),
        Parameter("d_R", "u32* __restrict__", spec.dtype, (GR, N, D, D)),
        *_numbers("B", "T", "row_t", "block_rows"),
    )


def short_gradients(spec: KernelSpec) -> Parameters:
    """Return the parameters of kernels/short_gradients.cuh."""
    GR, N, D = len(spec.cell.recurrent_gates), spec.heads, spec.head_dim
    tensors, width = _Tensors(spec), len(spec.cell.input_gates) * N * D
    return (
        *_gradient_rows(spec),
        tensors.shares("input", "const scalar", B, T, "features"),
        Parameter("partial", "const float2* __restrict__", torch.float32, ("partials", "pairs", 2)),
        Parameter("d_R", "Pair* __restrict__", spec.dtype, (GR, N, D, D)),
        Parameter("d_W", "Pair* __restrict__", spec.dtype, (width, "features")),
        Parameter("d_b", "void* __restrict__"),
        *_numbers("features", "half_bias", "B", "T", "row_t", "partials", "pairs"),
    )


def single_step(spec: KernelSpec) -> Parameters:
    """Return the parameters of resident/kernels/single_step.cuh."""
    tensors, (S, G, GI, GR, _), N, D = _Tensors(spec), _counts(spec), spec.heads, spec.head_dim
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
        *_numbers("features", "B"),
    )


def concurrent_gradient(spec: KernelSpec) -> Parameters:
    """Return the parameters of resident/kernels/concurrent_gradient.cuh."""
    GR, N, D = len(spec.cell.recurrent_gates), spec.heads, spec.head_dim
    return (
        *_gradient_rows(spec),
        _Tensors(spec).writes("d_R", "scalar", GR, N, D, D),
        _Tensors(spec).writes("sums", "float"),
        Parameter("added", "u32*", torch.int32),
        Parameter("progress", "const u32*", torch.int32),
        *_numbers("producers", "B", "T", "row_t"),
    )


def input_product(dtype: torch.dtype) -> Parameters:
    """Return the parameters of resident/kernels/input_product.cuh."""
    return (
        Parameter("rows", "const scalar*", dtype),
        Parameter("W", "const scalar* __restrict__", dtype),
        Parameter("product", "scalar*", dtype),
        *_chunks(),
        *_numbers("B", "T", "row_t"),
    )


def _gradient_rows(spec: KernelSpec) -> Parameters:
    """Return the parameters for the rows over which d_R is summed: gradients of gates, h, and initial h or null."""
    tensors, (_, _, GI, _, GU), N, D = _Tensors(spec), _counts(spec), spec.heads, spec.head_dim
    return (
        tensors.shares("d_x", "const scalar", B, T, GI, N, D),
        tensors.shares("d_u", "const scalar", B, T, GU, N, D),
        tensors.shares("h", "const scalar", B, T, N, D),
        tensors.shares("initial", "const scalar", B, N, D),
        tensors.shares("reset", "const unsigned char", B, T),
    )


def sum_of_partials(dtype: torch.dtype) -> Parameters:
    """Return the parameters of kernels/sum_of_partials.cuh."""
    return (
        Parameter("partial", "const float2* __restrict__", torch.float32, ("partials", "pairs", 2)),
        Parameter("total", "Pair* __restrict__", dtype, ("pairs", 2)),
        *_numbers("partials", "pairs"),
    )


def gather_rows(dtype: torch.dtype) -> Parameters:
    """Return the parameters of kernels/gather_rows.cuh."""
    return (
        Parameter("x", "const uint4* __restrict__"),
        Parameter("index", "const i64* __restrict__", torch.int64),
        Parameter("gathered", "uint4* __restrict__"),
        *_numbers("vectors", "all", "first"),
    )


def reset_bits(dtype: torch.dtype) -> Parameters:
    """Return the parameters of kernels/reset_bits.cuh."""
    return (
        Parameter("reset", "const unsigned char* __restrict__", torch.bool, ("B", "T")),
        Parameter("bits", "u32* __restrict__", torch.int32),
        *_numbers("B", "T", "of_b", "of_t"),
    )


TENSORS_PER_LAUNCH = 4  # of resize_rows


def resize_rows(dtype: torch.dtype) -> Parameters:
    """Return the parameters of kernels/resize_rows.cuh."""
    pointers = "const u16* __restrict__", "u16* __restrict__"
    found = []
    for i in range(TENSORS_PER_LAUNCH):
        x, resized, *numbers = resized_names(i)
        found += [Parameter(name, kind) for name, kind in zip((x, resized), pointers, strict=True)]
        found += _numbers(*numbers)
    return tuple(found)


def resized_names(i: int) -> tuple[str, ...]:
    """Return the names of the parameters for tensor i, in the order of `Resize` in the header."""
    names = "x", "resized", "rows", "from", "to", "of_x", "of_resized", "groups", "at_once", "blocks"
    return tuple(f"{name}_{i}" for name in names)


def hoisted(
    parts: Hoisted, direction: str, heads: int, head_dim: int, dtype: torch.dtype, bias: torch.dtype
) -> Parameters:
    """Return the parameters of kernels/hoisted.cuh."""
    N, D, Gi, V = heads, head_dim, len(parts.cell.input_gates), len(parts.values)
    given = (
        Parameter("x", "const scalar* __restrict__", dtype, ("rows", Gi, N, D)),
        Parameter("bias", "const bias_number* __restrict__", bias),
    )
    if direction == "forward":
        return (*given, Parameter("values", "scalar* __restrict__", dtype, ("rows", V, N, D)), *_numbers("rows"))
    return (
        *given,
        Parameter("d_values", "const scalar* __restrict__", dtype, ("rows", V, N, D)),
        Parameter("d_x", "scalar* __restrict__", dtype, ("rows", Gi, N, D)),
        Parameter("d_bias", "float* __restrict__", torch.float32),
        *_numbers("rows"),
    )


def _counts(spec: KernelSpec) -> tuple[int, int, int, int, int]:
    """Return the numbers of states, gates, and gates with input, with recurrent part, and recurrent-only."""
    cell = spec.cell
    kinds = cell.states, cell.gates, cell.input_gates, cell.recurrent_gates, recurrent_only(cell)
    return tuple(map(len, kinds))
