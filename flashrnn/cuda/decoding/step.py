"""One decoding step of a language model as a single cooperative launch."""

from collections.abc import Callable, Mapping
from functools import cache

import torch

from flashrnn.cuda.arguments import Argument
from flashrnn.cuda.build import Binary, build
from flashrnn.cuda.decoding.tiling import (
    COLUMNS,
    THREADS,
    WARPS,
    ModelSpec,
    StepTiling,
    head_exchanges,
    output_tiles,
    padding,
    row_blocks,
    shared_bytes,
    stream_rows,
    tiling,
)
from flashrnn.cuda.launch import load
from flashrnn.cuda.parameters import Parameter, Parameters, declaration
from flashrnn.cuda.source import cell_prelude


def parameters(spec: ModelSpec) -> Parameters:
    """Return the parameters of kernels/step.cuh or kernels/step_of_many.cuh."""
    dtype, number = spec.kernel.dtype, "signed char" if spec.int8 else "scalar"
    width = spec.kernel.heads * spec.kernel.head_dim

    def weight(name: str, *shape: int) -> Parameter:
        return Parameter(name, "const scalar* __restrict__", dtype, shape)

    return (
        Parameter("base", "const char*", torch.uint8),
        Parameter("table", "const i64* __restrict__", torch.int64, (spec.blocks, COLUMNS)),
        Parameter("embedding", "const scalar* __restrict__", dtype),
        weight("norm", width),
        Parameter("head", f"const {number}* __restrict__", torch.int8 if spec.int8 else dtype, (spec.classes, width)),
        Parameter("head_scale", "const float* __restrict__", torch.float32, (spec.classes,)),
        Parameter("tokens", "const i64*", torch.int64, ("B",)),
        *exchanged(spec),
        Parameter("best", "u64*", torch.int64, ("B",)),
        Parameter("counters", "u32*", torch.int32, (3,)),
        Parameter("logits", "scalar*", dtype, ("B", spec.classes)),
        Parameter("chosen", "i64*", torch.int64, ("B",)),
        Parameter("history", "i64*", torch.int64),
        Parameter("cursor", "i64*", torch.int64, (1,)),
        Parameter("keys", "u32*", torch.int32, ("B",)),
        Parameter("temperature", "const float*", torch.float32, (1,)),
        Parameter("B", "i64"),
    )


def exchanged(spec: ModelSpec) -> Parameters:
    """Return the parameters through which thread blocks exchange results."""
    dtype, width, many = spec.kernel.dtype, spec.kernel.heads * spec.kernel.head_dim, tiling(spec).many
    slices, row = (2 * spec.hidden // width, width + padding(dtype)) if many else (1, spec.hidden)
    of_both = (
        Parameter("hidden_state", "float*", torch.float32, ("B", width)),
        Parameter("hidden", "scalar*", dtype, (slices, "B", row)),
    )
    found = head_exchanges(spec)
    vectors, tiles = max((one.vectors for one in found), default=1), width // 4  # a tile has at most two contributions
    of_both += (Parameter("partials", "float*", torch.float32, (len(found), "B", tiles, 4 * vectors)),)
    if not many:
        return *of_both, Parameter("residual", "float*", torch.float32, ("B", width))
    return (
        *of_both,
        Parameter("normalized", "scalar*", dtype, (2, "B", row)),
        Parameter("parts", "float*", torch.float32, (slices // 2, "B", width)),
    )


@cache
def load_step(spec: ModelSpec, device: int) -> tuple[Callable[[int, Mapping[str, Argument]], None], int]:
    """Return the launcher of the kernel on a GPU, and the number of thread blocks to launch."""
    binary, chosen = compile_step(spec)
    kernel = load(binary, parameters(spec), device, THREADS, shared_bytes(spec, chosen), 1, True)
    return kernel.launch, spec.kernel.gpu.multiprocessors


def compile_step(spec: ModelSpec) -> tuple[Binary, StepTiling]:
    """Return the kernel compiled for the GPU of the spec, and its tiling."""
    chosen = tiling(spec)
    made_for = f"a step of {spec.blocks} blocks, {spec.kernel}"
    return build(prelude(spec, chosen), *header_and_entry(chosen), spec.kernel.gpu.arch, made_for), chosen


def header_and_entry(chosen: StepTiling) -> tuple[str, str]:
    """Return the kernel's file and name."""
    name = "step_of_many" if chosen.many else "step"
    return f"decoding/kernels/{name}.cuh", f"flashrnn_{name}"


def prelude(spec: ModelSpec, chosen: StepTiling) -> str:
    """Return the printed source before the kernel's header."""
    constants = {
        "BLOCKS": spec.blocks,
        "HIDDEN": spec.hidden,
        "HEAD_EXCHANGES": len(head_exchanges(spec)),
        "CLASSES": spec.classes,
        "INT8": spec.int8,
        "GRID": spec.kernel.gpu.multiprocessors,
        "WARPS": WARPS,
        "SLOTS": chosen.slots,
        "SEQS": chosen.sequences,
        "MANY": chosen.many,
        "OUTPUT_TILES": output_tiles(spec),
        "ROW_BLOCKS": row_blocks(spec, chosen),
        "STREAM_ROWS": stream_rows(spec, chosen),
        "SHARED_BYTES_EXPECTED": shared_bytes(spec, chosen),
    }
    return "\n".join((cell_prelude(spec.kernel, constants), declaration(parameters(spec))))
