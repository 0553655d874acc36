"""The printed source before a kernel's header: sizes as constants, and the functions of the cell."""

import math
from collections.abc import Mapping, Sequence
from functools import cache

import torch

from flashrnn.cells import Cell
from flashrnn.cells.gates import class_indices, constant, recurrent_only, varying
from flashrnn.cells.printers.cuda import cell_functions, exchanges, head_functions
from flashrnn.cells.printers.pytorch import torch_function
from flashrnn.cells.trace import trace
from flashrnn.cuda.spec import KernelSpec
from flashrnn.residual import head_numbers

_SCALAR = {torch.bfloat16: "SCALAR_BF16", torch.float16: "SCALAR_F16", torch.float32: "SCALAR_F32"}


def cell_prelude(
    spec: KernelSpec,
    more: Mapping[str, int],
    scaled: bool = False,
    early: bool = False,
    of_centred: bool = False,
    early_sums: bool = False,
) -> str:
    """Return the source that all kernels of a cell need.

    `more`: further constants of this kernel; `scaled`: SCALED in kernels/common.cuh; `early`, `of_centred`,
    `early_sums`: see `head_functions`.
    """
    cell, variant, found = spec.cell, spec.variant, exchanges(spec.cell, spec.direction, early_sums)
    reduces, statistics = trace(cell).reduces, trace(cell).statistics
    constants = {
        "HEADS": spec.heads,
        "D": spec.head_dim,
        "GATES": len(cell.gates),
        "STORED": len(varying(cell)),
        "HEAD_NUMBERS": head_numbers(cell, spec.heads, spec.head_dim, spec.dtype),
        "GR": len(cell.recurrent_gates),
        "GI": len(cell.input_gates),
        "GU": len(recurrent_only(cell)),
        "STATES": len(cell.states),
        "FACTORS": max(1, len(trace(cell).factors.outputs)),
        "RESET": variant.reset,
        "STORE_AUX": variant.aux is not None,
        "STORE_GATES": variant.training,
        "HAS_D_AUX": variant.d_aux,
        "STATISTICS": len(statistics.names),
        "STATISTICS_NEEDED": statistics.needed,
        "AFTER": len(statistics.after),
        "EXCHANGES": len(found),
        "EXCHANGED_VECTORS": max((one.vectors for one in found), default=0),
        "EXCHANGED_PAIRS": max((one.pairs for one in found), default=0),
        "USES_H": cell.states[0] in trace(cell).factors.inputs,
        **more,
    }
    tables = {
        "INPUT_OF": class_indices(cell.gates, cell.input_gates),
        "RECURRENT_OF": class_indices(cell.gates, cell.recurrent_gates),
        "RECURRENT_ONLY_OF": class_indices(cell.gates, recurrent_only(cell)),
        "STORED_OF": class_indices(cell.gates, varying(cell)),
        "CONSTANT_OF": class_indices(cell.gates, constant(cell)),
        "AFTER_OF": class_indices(cell.states, statistics.after),
        "EXCHANGED_WORDS": [one.words for one in found] or [0],
    }
    aux_number = f"using aux_number = {'gate' if variant.aux == torch.float16 else 'float'};"
    return "\n".join(
        [
            definitions(spec.dtype, constants, tables, variant.tf32, scaled),
            f"#define REDUCES {int(reduces)}",
            '#include "kernels/math.cuh"',
            aux_number,
            head_functions(cell, early, of_centred, early_sums) if reduces else cell_functions(cell),
        ]
    )


def definitions(
    dtype: torch.dtype,
    constants: Mapping[str, int],
    tables: Mapping[str, Sequence[int]],
    tf32: bool = False,
    scaled: bool = False,
) -> str:
    """Return the dtype of inputs and outputs, constants and arrays as C++. `tf32`: see `Variant`."""
    lines = [f"#define {'SCALAR_SCALED' if scaled else 'SCALAR_TF32' if tf32 else _SCALAR[dtype]}"]
    lines += [f"constexpr int {name} = {int(value)};" for name, value in constants.items()]
    lines += [
        f"__device__ constexpr int {name}[] = {{{', '.join(map(str, values))}}};" for name, values in tables.items()
    ]
    lines.append('#include "kernels/common.cuh"')
    return "\n".join(lines)


@cache
def finite_at_zero(cell: Cell) -> bool:
    """Return whether padding, which is all zeros, stays finite, so that it needs no masks."""
    graphs = trace(cell)
    values = []
    for graph in (graphs.forward, graphs.factors, graphs.statistics.gradient):
        zeros = [torch.zeros((), dtype=torch.float64)] * len(graph.inputs)
        values += torch_function(graph, graph.inputs, list(graph.outputs))(*zeros)
    return all(math.isfinite(value) for value in values)
