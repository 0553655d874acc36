"""float32 if PyTorch allows TF32: errors of a bf16x2 split, and changes of the setting."""

import pytest
import torch

from flashrnn import flashrnn, get_cell
from flashrnn.accuracy import BOUNDS, relative_error
from flashrnn.cuda.build import build
from flashrnn.cuda.launch import load
from flashrnn.cuda.parameters import Parameter
from flashrnn.cuda.source import definitions
from flashrnn.gpu import device_gpu
from tests.problems import results
from tests.suite import (
    CELL_CASES,
    LAYOUT_CASES,
    RESET_CASES,
    SIZE_CASES,
    Case,
    allowing_tf32,
    check_tf32,
    inputs_for,
)
from tests.tolerances import assert_close

LSTM = get_cell("lstm")
LONG_CASES = [Case(B=16, T=1024, N=12, D=64), Case(get_cell("gru"), B=33, T=257, N=1, D=768)]

both_backends = pytest.mark.parametrize("backend", ["cuda_fused", "cuda"])


@pytest.mark.parametrize("case", [*CELL_CASES, *RESET_CASES, *SIZE_CASES, *LAYOUT_CASES, *LONG_CASES], ids=str)
@both_backends
def test_outputs_and_gradients(backend, case):
    check_tf32(backend, case, "cuda:0")
    check_tf32(backend, case, "cuda:0", flashrnn)


@both_backends
def test_results_follow_the_setting_of_each_call(backend):
    """Results without TF32 do not change; results with TF32 have larger errors, particularly dR."""
    inputs = inputs_for(backend, Case(B=16, T=50, N=2, D=64), torch.float32, torch.device("cuda", 0))
    options = {"function": LSTM, "backend": backend}
    before = results(flashrnn, inputs, **options)
    with allowing_tf32():
        coarse = results(flashrnn, inputs, **options)
    after = results(flashrnn, inputs, **options)
    reference = results(flashrnn, inputs.to(torch.float64), function=LSTM, backend="vanilla")
    assert_close(before, reference, torch.float32)
    assert all(torch.equal(before[name], after[name]) for name in before)
    errors = {name: relative_error(out, reference[name]) for name, out in coarse.items()}
    assert all(error > relative_error(before[name], reference[name]) for name, error in errors.items())
    assert errors["gradient of R"] > BOUNDS[torch.float32]


@pytest.mark.parametrize("allowed_in", ["forward", "backward"])
@pytest.mark.parametrize(("function", "D"), [("lstm", 64), ("lstm", 768), ("slstm", 768), ("gru", 1024)])
def test_setting_may_change_before_the_backward(function, D, allowed_in):
    """Even if this changes the backend, because the heads fit on the chip only with TF32."""
    cell = get_cell(function)
    inputs = inputs_for("cuda", Case(cell, B=9, T=12, N=1, D=D), torch.float32, torch.device("cuda", 0))

    def gradients(inputs, in_forward: bool, in_backward: bool) -> dict[str, torch.Tensor]:
        with allowing_tf32(in_forward):
            h, _ = flashrnn(*inputs, function=cell)
        with allowing_tf32(in_backward):
            found = torch.autograd.grad(h.square().sum(), inputs)
        return {f"gradient of {name}": d for name, d in zip(inputs._fields, found, strict=True)}

    out = gradients(inputs, allowed_in == "forward", allowed_in == "backward")
    reference = gradients(inputs.to(torch.float64), False, False)
    assert_close(out, reference, torch.float32, tf32=True)


FUNCTIONS = """#include "kernels/math.cuh"
extern "C" __global__ void functions(const float* x, const float* y, float* out, i64 count) {
  for (i64 i = threadIdx.x; i < count; i += blockDim.x) {
    out[i] = op_tanh(x[i]), out[count + i] = op_sigmoid(x[i]), out[2 * count + i] = op_exp(x[i]);
    out[3 * count + i] = op_div(x[i], y[i]);
  }
}"""


def test_errors_of_functions_are_smaller_than_those_of_products():
    """At most 2^-20 of each result, for arguments up to 8."""
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = 10 ** torch.empty(40000, device="cuda").uniform_(-30, 0.9, generator=generator)
    x, y = sizes * torch.randn(40000, device="cuda", generator=generator).sign(), sizes.flip(0)
    out = torch.empty(4, len(x), device="cuda")
    gpu = device_gpu(0)
    source = definitions(torch.float32, {}, {}, tf32=True) + "\n" + FUNCTIONS
    arguments = {"x": x, "y": y, "out": out, "count": len(x)}
    parameters = (*(Parameter(name, "float*", torch.float32) for name in ("x", "y", "out")), Parameter("count", "i64"))
    binary = build(source, "kernels/math.cuh", "functions", gpu.arch)
    load(binary, parameters, 0, 256, 0, 1, False).launch(1, arguments)
    a, b = x.double(), y.double()
    expected = torch.stack([a.tanh(), a.sigmoid(), a.exp(), a / b])
    assert ((out - expected) / expected).abs().max() <= 2**-20
