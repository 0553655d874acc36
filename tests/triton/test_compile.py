"""Compilation of kernels for NVIDIA and AMD without a GPU, and the shared memory that they use."""

import re
import subprocess

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flashrnn import Cell, get_cell
from flashrnn.cells.printers.functions import Function
from flashrnn.cells.printers.triton import device_function
from flashrnn.gpu import named_gpu
from flashrnn.residual import residual_dtype
from flashrnn.triton import kernels
from flashrnn.triton.launch import kernel_constants, load, num_warps, padded, prefetch
from tests.cells.graphs import every_operator
from tests.cells.test_triton import apply
from tests.problems import BUILT_IN, COMPETING, cell_name

LSTM, SLSTM = get_cell("lstm"), get_cell("slstm")
LARGE = (get_cell("gru"), SLSTM)  # the step of an LSTM is a part of the sLSTM's, that of an Elman network of all
HALF_POINTERS = ("x", "R", "h", "h_before", "d_h", "d_x", "d_u")
FLOAT_POINTERS = ("bias", "initial", "aux", "last", "d_aux", "d_last", "d_bias", "d_initial")
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@pytest.fixture(scope="module", autouse=True)
def _cache_of_its_own(tmp_path_factory):
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


def compiled(
    direction: str,
    cell: Cell,
    D: int,
    dtype: torch.dtype,
    target: GPUTarget,
    shared_bytes: int,
    options: tuple[str, ...] = (),
):
    """Return the kernel for 768 units, compiled as by `launch`; `options` are the tensors that may be None."""
    kernel = getattr(kernels, direction)
    stages = prefetch(direction, cell, D, dtype, shared_bytes, "d_aux" in options)
    constants = kernel_constants(direction, cell, 768 // D, D, stages, interpret=False)
    types = dict.fromkeys(HALF_POINTERS, f"*{TYPES[dtype]}") | dict.fromkeys(FLOAT_POINTERS, "*fp32")
    types |= dict.fromkeys(kernels.SIZES, "i32") | {"reset": "*i8", "gates": f"*{TYPES[residual_dtype(dtype)]}"}
    absent = {"reset", "d_aux", "aux" if len(cell.states) == 1 and direction == "forward" else ""} - {*options}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants or name in absent else types[name] for name in names}
    values = {(k,): constants.get(name) for k, name in enumerate(names) if signature[name] == "constexpr"}
    aligned = {(k,): [["tt.divisibility", 16]] for k, name in enumerate(names) if signature[name].startswith("*")}
    warps = num_warps(padded(D), target.warp_size)
    source = ASTSource(kernel, signature, values, aligned)
    return triton.compile(source, target=target, options={"num_warps": warps})


def spilled(kernel, folder) -> int:
    """Return the bytes of a thread's stack, which contains spilled registers."""
    if "amdgcn" in kernel.asm:
        return int(re.search(r"\.private_segment_fixed_size: (\d+)", kernel.asm["amdgcn"])[1])
    (folder / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(folder / "kernel.cubin")]
    return int(re.search(r"STACK:(\d+)", subprocess.run(command, capture_output=True, text=True, check=True).stdout)[1])


NVIDIA = {name: GPUTarget("cuda", arch, 32) for name, arch in (("A100", 80), ("RTX 4090", 89), ("H100", 90))}
AMD = GPUTarget("hip", "gfx942", 64)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    "cell",
    [cell if cell in LARGE else pytest.param(cell, marks=pytest.mark.slow) for cell in BUILT_IN],
    ids=cell_name,
)
def test_no_register_spills_for_heads_of_64(cell, direction, tmp_path):
    kernel = compiled(direction, cell, 64, torch.bfloat16, NVIDIA["H100"], named_gpu("H100").shared_per_block)
    assert spilled(kernel, tmp_path) == 0


LONG = pytest.param(get_cell("layernorm_lstm"), marks=pytest.mark.slow)


@pytest.mark.parametrize("target", [NVIDIA["H100"], AMD], ids=["H100", "AMD"])
@pytest.mark.parametrize(
    "cell", [LONG, pytest.param(get_cell("layernorm_gru"), marks=pytest.mark.slow), COMPETING], ids=cell_name
)
def test_cells_with_reductions_compile(cell, target):
    """With and without padded units."""
    for direction, D in (("forward", 64), ("backward", 48)):
        kernel = compiled(direction, cell, D, torch.float16, target, 200 * 1024, ("reset",))
        assert kernel.metadata.shared <= 200 * 1024


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cell", "D", "dtype"),
    [("A100", LSTM, 128, torch.float16), ("H100", SLSTM, 128, torch.bfloat16), ("RTX 4090", LSTM, 64, torch.float32)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_largest_heads_fit_in_shared_memory(name, cell, D, dtype):
    shared_bytes = named_gpu(name).shared_per_block
    for direction in ("forward", "backward"):
        kernel = compiled(direction, cell, D, dtype, NVIDIA[name], shared_bytes, ("reset", "d_aux"))
        assert kernel.metadata.shared <= shared_bytes


@pytest.mark.parametrize("target", [NVIDIA["H100"], AMD], ids=["H100", "AMD"])
def test_all_operators_compile(target):
    """Operators of the interpreter are also available on GPUs."""
    graph = every_operator()
    function = Function("operators", graph, {"a": ("x", "y")}, {"out": tuple(graph.outputs)})
    (printed,) = load(device_function(function), "test", [function.name])
    constants = {"function": printed, "ARGUMENTS": 2, "RESULTS": len(graph.outputs), "SIZE": 32}
    signature = {"values": "*fp32", "results": "*fp32"} | dict.fromkeys(constants, "constexpr")
    places = {(k,): constants[name] for k, name in enumerate(signature) if name in constants}
    assert triton.compile(ASTSource(triton.jit(apply), signature, places, {}), target=target).asm


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_kernels_compile_for_amd(direction, tmp_path):
    kernel = compiled(direction, LSTM, 64, torch.bfloat16, AMD, 256 * 1024)
    assert kernel.metadata.shared <= 64 * 1024
    assert spilled(kernel, tmp_path) == 0
    assert "v_mfma" in kernel.asm["amdgcn"]
