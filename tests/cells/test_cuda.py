"""Printed CUDA functions, compiled as host C++, agree with the graphs' PyTorch functions."""

import ctypes
import math
import re
import subprocess
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from flashrnn.cells.printers.cuda import cell_functions, device_function
from flashrnn.cells.trace import trace
from flashrnn.cuda.build import build
from tests.cells.graphs import by_graph, every_operator, operands, values_of
from tests.problems import CELLS, cell_name

# Exact versions of the operators in kernels/math.cuh.
HOST = """
#include <cmath>
#define DEVICE static inline
DEVICE float op_tanh(float x) { return std::tanh(x); }
DEVICE float op_sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
DEVICE float op_exp(float x) { return std::exp(x); }
DEVICE float op_expm1(float x) { return std::expm1(x); }
DEVICE float op_log(float x) { return std::log(x); }
DEVICE float op_log1p(float x) { return std::log1p(x); }
DEVICE float op_div(float a, float b) { return a / b; }
DEVICE float op_pow(float a, float b) { return std::pow(a, b); }
DEVICE float op_sqrt(float x) { return std::sqrt(x); }
DEVICE float op_rsqrt(float x) { return 1.0f / std::sqrt(x); }
DEVICE float op_sin(float x) { return std::sin(x); }
DEVICE float op_cos(float x) { return std::cos(x); }
DEVICE float op_exp2(float x) { return std::exp2(x); }
DEVICE float op_atan(float x) { return std::atan(x); }
DEVICE float op_erf(float x) { return std::erf(x); }
DEVICE float op_erfc(float x) { return std::erfc(x); }
DEVICE float op_floor(float x) { return std::floor(x); }
DEVICE float op_round(float x) { return std::nearbyint(x); }
DEVICE float op_fmod(float a, float b) { return std::fmod(a, b); }
DEVICE float op_copysign(float a, float b) { return std::copysign(a, b); }
DEVICE float op_abs(float x) { return std::fabs(x); }
DEVICE float op_sign(float x) { return float(x > 0) - float(x < 0); }
DEVICE float op_max(float a, float b) { return a > b || std::isnan(a) ? a : b; }
DEVICE float op_min(float a, float b) { return a < b || std::isnan(a) ? a : b; }
"""
ARGUMENT = re.compile(r"(?:const )?float \(&\w+\)\[(\d+)\]")


def compile_for_host(functions: dict[str, str], folder) -> ctypes.CDLL:
    """Return a library with a function `<key>_<name>(count, arrays of [count][size]...)` for every printed function."""
    source = [HOST]
    for key, text in functions.items():
        source.append(f"namespace {key} {{\n{text}\n}}")
        for name, arguments in re.findall(r"DEVICE void (\w+)\((.*)\) \{", text):
            sizes = ARGUMENT.findall(arguments)
            rows = ", ".join(f"float (*a{i})[{size}]" for i, size in enumerate(sizes))
            row = ", ".join(f"a{i}[k]" for i in range(len(sizes)))
            call = f"for (int k = 0; k < count; k++) {key}::{name}({row});"
            source.append(f'extern "C" void {key}_{name}(int count, {rows}) {{ {call} }}')
    (folder / "host.cpp").write_text("\n".join(source))
    command = ["gcc", "-x", "c++", "-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wno-unused-function", "-Werror"]
    command += ["-shared", "-fPIC", "host.cpp", "-o", "host.so", "-lm"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "host.so"))


def on_host(library: ctypes.CDLL, function: str, inputs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Return the outputs of a function for `inputs` [count, elements]; `sizes` are the elements per output."""
    inputs = [x.contiguous() for x in inputs]
    outputs = [torch.full((len(inputs[0]), size), math.nan) for size in sizes]
    getattr(library, function)(len(inputs[0]), *(ctypes.c_void_p(x.data_ptr()) for x in (*inputs, *outputs)))
    return outputs


@pytest.fixture(scope="module")
def cells_on_host(tmp_path_factory) -> ctypes.CDLL:
    return compile_for_host({cell.name: cell_functions(cell) for cell in CELLS}, tmp_path_factory.mktemp("host"))


@pytest.mark.parametrize("cell", CELLS, ids=cell_name)
def test_printed_functions_of_cells(cells_on_host, cell):
    graphs, names = trace(cell), (*cell.gates, *cell.states)
    gates, states = values_of(cell)
    values = torch.cat([gates, states], 1)
    new = [f"new_{state}" for state in cell.states]
    factors = [f"factor{k}" for k in range(len(graphs.factors.outputs))]

    (fresh,) = on_host(cells_on_host, f"{cell.name}_cell_forward", (gates, states), [len(new)])
    torch.testing.assert_close(fresh, by_graph(graphs.forward, names, new, values), rtol=1e-5, atol=1e-6)

    (found,) = on_host(cells_on_host, f"{cell.name}_cell_factors", (gates, states), [len(factors)])
    expected = by_graph(graphs.factors, names, factors, values)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)

    d_new = torch.randn(1000, len(new), generator=torch.Generator().manual_seed(1))
    sizes = [len(cell.gates), len(cell.states)]
    d_gates, d_states = on_host(cells_on_host, f"{cell.name}_cell_backward", (expected, d_new), sizes)
    cotangents = [f"d_{name}" for name in new]
    expected = by_graph(
        graphs.backward, (*factors, *cotangents), [f"d_{name}" for name in names], torch.cat([expected, d_new], 1)
    )
    torch.testing.assert_close(torch.cat([d_gates, d_states], 1), expected, rtol=1e-5, atol=1e-5)


def test_every_operator_and_constant(tmp_path):
    graph = every_operator()
    names = list(graph.outputs)
    library = compile_for_host({"all": device_function(graph, "operators", {"a": "xy"}, {"out": names})}, tmp_path)
    values = operands()
    (out,) = on_host(library, "all_operators", (values,), [len(names)])
    expected = by_graph(graph, "xy", names, values)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_math_cuh_has_every_operator():
    """NVRTC compiles the printed text with math.cuh's operators."""
    graph = every_operator()
    function = device_function(graph, "operators", {"a": "xy"}, {"out": list(graph.outputs)})
    size = len(graph.outputs)
    kernel = f"""#include "kernels/math.cuh"
{function}
extern "C" __global__ void all_operators(const float (*a)[2], float (*out)[{size}]) {{
  operators(a[threadIdx.x], out[threadIdx.x]);
}}"""
    assert build(kernel, "kernels/math.cuh", "all_operators", "sm_90a").spilled == 0
