"""The constants before a kernel's source."""

import re
from dataclasses import replace

import pytest
import torch

from flashrnn import Cell, get_cell
from flashrnn.cells.gates import recurrent_only
from flashrnn.cuda.build import build
from flashrnn.cuda.resident import resources
from flashrnn.cuda.resident.source import prelude
from flashrnn.cuda.resident.tiling import Tiling
from flashrnn.cuda.spec import KernelSpec, Variant
from flashrnn.gpu import named_gpu
from tests.problems import MINIMAL_GATED

TILING = Tiling(
    unit_tiles=2, k_slices=2, batch_tiles=1, sequences=8, blocks=2, grid=False, stages=2, register_fragments=4
)
PLAIN = Variant(aux=torch.float16, training=True)


def prelude_of(cell: Cell, dtype: torch.dtype = torch.bfloat16, variant: Variant = PLAIN) -> str:
    return prelude(KernelSpec("forward", cell, 3, 40, 16, dtype, named_gpu("H100"), variant), TILING, 1234)


def constants(cell: Cell, variant: Variant = PLAIN) -> dict[str, int | list[int]]:
    text = prelude_of(cell, variant=variant)
    numbers = {name: int(value) for name, value in re.findall(r"constexpr int (\w+) = (-?\d+);", text)}
    tables = re.findall(r"constexpr int (\w+)\[\] = \{(.*)\};", text)
    return numbers | {name: [int(value) for value in values.split(",")] for name, values in tables}


def test_constants_of_sizes_and_tiling():
    found = constants(get_cell("lstm"))
    sizes = {"HEADS": 3, "D": 40, "GATES": 4, "GR": 4, "GI": 4, "GU": 0, "STATES": 2, "SHARED_BYTES_EXPECTED": 1234}
    tiled = {"UNIT_TILES": 2, "K_SLICES": 2, "BATCH_TILES": 1, "BLOCKS": 2, "GRID": 0, "STAGES": 2}
    tiled["REGISTER_FRAGMENTS"] = 4
    assert found.items() >= (sizes | tiled).items()


def test_constants_of_variants():
    constants_of = {"reset": "RESET", "training": "STORE_GATES", "d_aux": "HAS_D_AUX"}
    for field, constant in constants_of.items():
        for value in (False, True):
            assert constants(get_cell("lstm"), variant=replace(PLAIN, **{field: value}))[constant] == value
    for aux, number in ((None, "float"), (torch.float32, "float"), (torch.float16, "gate")):
        text = prelude_of(get_cell("lstm"), variant=replace(PLAIN, aux=aux))
        assert f"using aux_number = {number};" in text
        assert f"constexpr int STORE_AUX = {int(aux is not None)};" in text


def test_scalar_type():
    assert "#define SCALAR_BF16" in prelude_of(get_cell("lstm"))
    assert "SCALAR_BF16" not in prelude_of(get_cell("lstm"), torch.float16)


def test_constants_of_gates():
    lstm = constants(get_cell("lstm"))
    assert lstm["INPUT_OF"] == lstm["RECURRENT_OF"] == [0, 1, 2, 3]
    assert lstm["RECURRENT_ONLY_OF"] == [-1, -1, -1, -1]
    gru = constants(get_cell("gru"))  # gates g (recurrent-only), r, z, n (input-only)
    assert gru["INPUT_OF"] == [-1, 0, 1, 2]
    assert gru["RECURRENT_OF"] == [0, 1, 2, -1]
    assert gru["RECURRENT_ONLY_OF"] == [0, -1, -1, -1]
    assert recurrent_only(get_cell("gru")) == ("g",)
    assert constants(MINIMAL_GATED)["RECURRENT_ONLY_OF"] == [-1, 0, -1]  # u (both), r (recurrent-only), f (input)


def test_constants_of_cells():
    assert constants(get_cell("lstm"))["FINITE_AT_ZERO"] == 1
    assert constants(Cell("inverse", lambda g, h: g / h, ("h",)))["FINITE_AT_ZERO"] == 0
    assert constants(Cell("inverse_gradient", lambda g, h: torch.sqrt(g) + h, ("h",)))["FINITE_AT_ZERO"] == 0
    assert constants(get_cell("lstm"))["USES_H"] == 0  # h has no element-wise part in an LSTM
    assert constants(get_cell("gru"))["USES_H"] == 1
    assert constants(Cell("sum", lambda g, h: g + h, ("h",)))["FACTORS"] == 1  # arrays are not empty


GRID = replace(TILING, grid=True, k_slices=8, blocks=8)


@pytest.mark.parametrize(
    ("direction", "chosen", "dtype"),
    [
        ("forward", TILING, torch.bfloat16),
        ("forward", GRID, torch.float32),
        ("backward", TILING, torch.float32),
        ("backward", GRID, torch.bfloat16),
    ],
    ids=lambda value: ("grid" if value.grid else "cluster") if isinstance(value, Tiling) else str(value),
)
def test_kernel_and_tiling_agree_on_shared_memory(direction, chosen, dtype):
    """Otherwise, the kernel does not compile."""
    spec = KernelSpec(direction, get_cell("elman"), 1, 64, 16, dtype, named_gpu("H100"), PLAIN)
    chosen = replace(chosen, register_fragments=0)  # all of R in shared memory; bfloat16 has fewer than four
    shared = resources.shared_bytes(spec, chosen)

    def compile_with(shared_bytes: int):
        source = prelude(spec, chosen, shared_bytes)
        return build(source, f"resident/kernels/{direction}.cuh", f"flashrnn_{direction}", "sm_90a")

    assert compile_with(shared).registers > 0
    with pytest.raises(RuntimeError, match=r"tiling\.py"):
        compile_with(shared + 16)
