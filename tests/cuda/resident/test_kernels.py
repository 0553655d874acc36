"""All kernels compile for all architectures, without register spills."""

import itertools
from dataclasses import replace

import pytest
import torch

from flashrnn import get_cell
from flashrnn.cuda.build import Binary
from flashrnn.cuda.machine_code import spills_between_products
from flashrnn.cuda.resident.kernel import SPILLED, compile_best
from flashrnn.cuda.spec import KernelSpec, Variant
from flashrnn.gpu import named_gpu
from tests.problems import LEAKY_ELMAN, MINIMAL_GATED, PEEPHOLE_LSTM, cell_name

pytestmark = pytest.mark.usefixtures("one_batch")

GPUS = {"A100": "sm_80", "H100": "sm_90a", "B200": "sm_100a"}
BUILT_IN = ("elman", "gru", "lstm", "slstm")
DIRECTIONS = ("forward", "backward")
TRAINING = Variant(aux=torch.float16, training=True)


def compiled(
    direction: str, cell, head_dim: int, gpu: str = "H100", dtype=torch.bfloat16, variant: Variant = TRAINING
) -> Binary:
    """Return the kernel of a model of width 768 for batch size 16."""
    sizes = max(1, 768 // head_dim), head_dim, 16, dtype
    return compile_best(KernelSpec(direction, get_cell(cell), *sizes, named_gpu(gpu), variant))[0]


def sizes() -> list[tuple[str, str, int]]:
    """Return GPU, cell and head size: all combinations on an H100, and each cell with some size on other GPUs."""
    sizes = (16, 64, 128, 256)
    elsewhere = [(gpu, cell, D) for gpu in ("A100", "B200") for cell, D in zip(BUILT_IN, sizes, strict=True)]
    return [*itertools.product(["H100"], BUILT_IN, sizes), *elsewhere]


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "cell", "head_dim"), sizes())
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_no_register_spills(direction, gpu, cell, head_dim):
    binary = compiled(direction, cell, head_dim, gpu)
    assert GPUS[gpu] in binary.path.name
    assert binary.spilled == 0


@pytest.mark.slow
@pytest.mark.parametrize("cell", BUILT_IN)
@pytest.mark.parametrize("gpu", ["H100", "B200"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_wide_heads_spill_only_before_the_time_loop(direction, gpu, cell):
    """Most registers contain R. Others are spilled once, and few of them are read in the loop."""
    assert_spills_before_the_loop(compiled(direction, cell, 768, gpu), loads=0 if direction == "forward" else 4)


def assert_spills_before_the_loop(binary: Binary, loads: int) -> None:
    assert binary.spilled <= SPILLED
    found, stores = spills_between_products(binary.code)
    assert found <= loads
    assert not stores


VARIANTS = {
    "inference": replace(TRAINING, aux=None, training=False),
    "reset": replace(TRAINING, reset=True),
    "gradients of all states": replace(TRAINING, aux=torch.float32, d_aux=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_no_register_spills_in_variants(direction, variant):
    assert compiled(direction, "slstm", 64, variant=variant).spilled == 0


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_no_register_spills_in_float16(direction, head_dim):
    assert compiled(direction, "lstm", head_dim, dtype=torch.float16).spilled == 0


WITH_TF32 = replace(TRAINING, aux=torch.float32, tf32=True)


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "head_dim"), [("elman", 256), ("gru", 64), ("lstm", 256), ("slstm", 64)])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_no_register_spills_in_float32_with_tf32(direction, cell, head_dim):
    assert compiled(direction, cell, head_dim, dtype=torch.float32, variant=WITH_TF32).spilled == 0


@pytest.mark.parametrize("direction", [pytest.param("forward", marks=pytest.mark.slow), "backward"])
def test_wide_heads_in_float32_with_tf32_spill_only_before_the_time_loop(direction):
    binary = compiled(direction, "lstm", 768, dtype=torch.float32, variant=WITH_TF32)
    assert_spills_before_the_loop(binary, loads=0 if direction == "forward" else 4)


@pytest.mark.slow
@pytest.mark.parametrize("cell", [MINIMAL_GATED, PEEPHOLE_LSTM, LEAKY_ELMAN], ids=cell_name)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_no_register_spills_in_user_cells(direction, cell):
    assert compiled(direction, cell, 64).spilled == 0


@pytest.mark.parametrize("head_dim", [22, *(pytest.param(D, marks=pytest.mark.slow) for D in (2, 100))])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_no_register_spills_for_padded_heads(direction, head_dim):
    assert compiled(direction, "gru", head_dim).spilled == 0
