"""The printed source before a fused kernel's header."""

from functools import lru_cache

import torch

from flashrnn.cells import Cell
from flashrnn.cells.gates import varying
from flashrnn.cells.hoisting import LoopCell
from flashrnn.cells.printers.cuda import early_values
from flashrnn.cells.trace import trace
from flashrnn.cuda.parameters import declaration
from flashrnn.cuda.resident.parameters import fused
from flashrnn.cuda.resident.tiling import Tiling, centres_weights, is_dense, is_helped, is_scaled, uses_early_sums
from flashrnn.cuda.source import cell_prelude, finite_at_zero
from flashrnn.cuda.spec import KernelSpec
from flashrnn.residual import GateFormat, filled

CHUNK_UNIT = 16  # steps: chunks of the backward's loop (kernels/chunks.cuh) are multiples of this
LAYER_CHUNKS = {"forward": 8, "backward": 16}
"""Steps of a chunk of concurrent layers (kernels/layers.cuh). In the backward, a product takes less time for 16 steps
at once than twice for 8, which would delay the loops."""


@lru_cache(maxsize=4096)
def gate_format(cell: Cell, heads: int, head_dim: int, dtype: torch.dtype) -> GateFormat:
    """Return the format of a head's gates for the backward.

    - PNDG: if no copy of a thread crosses the end of a piece. With several heads, pieces must also be whole 32-byte
      sectors: forwards of 12 x 56 took 1.2 times as long when two heads shared sectors. The pieces have the memory of
      the gradients of the head's inputs, so that a backward may overwrite the gates with these.
    - NDG+: if heads would otherwise share cache lines.
    - NDV: if there are gates that are a bias alone, which are not stored.
    - NDV+: if there are statistics.
    - NDG: otherwise.
    """
    if trace(cell).statistics.names:
        return "NDV+"
    if len(varying(cell)) < len(cell.gates):
        return "NDV"
    whole = head_dim % (8 if heads == 1 else 16) == 0 and head_dim % (2 * len(cell.gates)) == 0
    if whole and cell.input_gates == cell.gates and dtype.itemsize == 2:
        return "PNDG"
    return "NDG+" if filled(cell, heads, head_dim, dtype) else "NDG"


def prelude(spec: KernelSpec, tiling: Tiling, shared_bytes: int) -> str:
    """Return the source before a fused kernel's header: constants and the functions of the cell.

    The kernel computes the size of its shared memory itself, and asserts that it equals `shared_bytes`, with which it
    is launched.
    """
    cell, variant = spec.cell, spec.variant
    helped, centred = is_helped(spec, tiling), centres_weights(spec, tiling)
    early_sums = uses_early_sums(spec, tiling)
    constants = {
        "UNIT_TILES": tiling.unit_tiles,
        "K_SLICES": tiling.k_slices,
        "BATCH_TILES": tiling.batch_tiles,
        "SEQUENCES": tiling.columns if tiling.any_sequences else tiling.sequences,
        "ANY_SEQUENCES": tiling.any_sequences,
        "BLOCKS": tiling.blocks,
        "GRID": tiling.grid,
        "DENSE": is_dense(spec, tiling),
        "STAGES": tiling.stages,
        "REGISTER_FRAGMENTS": tiling.register_fragments,
        "GATES_IN_PIECES": len(cell.gates) > 1 and gate_format(cell, spec.heads, spec.head_dim, spec.dtype) == "PNDG",
        "FINITE_AT_ZERO": finite_at_zero(cell),
        "BIDIRECTIONAL": variant.bidirectional,
        "OVERLAPS": spec.gpu.warpgroup_products,
        "CHUNK_UNIT": CHUNK_UNIT,
        "LAYER_CHUNK": LAYER_CHUNKS[spec.direction],
        "SHARED_BYTES_EXPECTED": shared_bytes,
        "HELPED": helped,
        "LOADERS": tiling.loaders,
        "CENTRED": centred,
        "EARLY_SUMS": early_sums,
        "EARLY_VALUES": early_values(cell, spec.direction) if helped else 0,
    }
    parameters = fused(spec)
    d_aux = [f"params.{one.name}" for one in parameters if one.name.startswith("d_aux_")]  # of the backward
    array = f"#define D_AUX_ARRAY {{{', '.join(d_aux or ['nullptr'])}}}"
    layers = "#define LAYERS" if spec.layers > 1 else ""
    inputs = f"using input_number = {'gate' if isinstance(cell, LoopCell) else 'scalar'};"
    text = cell_prelude(spec, constants, is_scaled(spec), helped, centred, early_sums)
    return "\n".join((text, declaration(parameters), array, layers, inputs))
