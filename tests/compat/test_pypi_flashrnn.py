"""`flashrnn.compat.nxai` compared with FlashRNN 1.0.8, whose backend "vanilla" runs on CPUs."""

import inspect
from dataclasses import asdict, fields

import pytest
import torch

from flashrnn.compat import nxai
from tests.compat.problem import AXES, OTHERS, random_call, results
from tests.tolerances import assert_close

FUNCTIONS = ("lstm", "slstm", "gru", "elman")


@pytest.mark.parametrize("initial", [False, True], ids=["from zero", "from states"])
@pytest.mark.parametrize("T", [1, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_results_equal_flashrnn_1_0_8(flashrnn_108, function, dtype, T, initial):
    call, options = random_call(function, dtype, T, initial), {"function": function, "backend": "vanilla"}
    expected = results(flashrnn_108.flashrnn, call, **options)
    for backend in ("vanilla", "auto"):
        out = results(nxai.flashrnn, call, function=function, backend=backend)
        assert {name: x.dtype for name, x in out.items()} == {name: x.dtype for name, x in expected.items()}
        assert_close(out, expected, dtype)


@pytest.mark.parametrize("layouts", [AXES, *OTHERS], ids=lambda layouts: "-".join(layouts.values()))
@pytest.mark.parametrize("function", FUNCTIONS)
def test_layouts_equal_flashrnn_1_0_8(flashrnn_108, function, layouts):
    call = random_call(function, torch.float64)
    sizes = {"num_heads": call.b.shape[1], "head_dim": call.b.shape[2]}
    expected, out = (
        results(
            package.flashrnn,
            call.permuted(layouts),
            config=package.FlashRNNConfig("vanilla", function, dtype="float32", **sizes, **layouts),
        )
        for package in (flashrnn_108, nxai)
    )
    assert_close(out, expected, torch.float64)


def test_arguments_equal_flashrnn_1_0_8(flashrnn_108):
    assert list(inspect.signature(nxai.flashrnn).parameters) == list(
        inspect.signature(flashrnn_108.flashrnn).parameters
    )


@pytest.mark.parametrize("function", FUNCTIONS)
def test_configuration_equals_flashrnn_1_0_8(flashrnn_108, function):
    options = {"backend": "vanilla", "function": function, "hidden_dim": 48, "num_heads": 3}
    ours, theirs = nxai.FlashRNNConfig(**options), flashrnn_108.FlashRNNConfig(**options)
    assert [field.name for field in fields(ours)] == [f.name for f in fields(theirs) if not f.name.startswith("_")]
    of_kernels = {"constants", *(f"dtype_{letter}" for letter in "brga")}  # ignored, or must not be set
    expected = {name: value for name, value in asdict(theirs).items() if name in asdict(ours).keys() - of_kernels}
    assert {name: value for name, value in asdict(ours).items() if name in expected} == expected
    assert ours.input_dim == theirs.input_dim
