"""Arguments of kernels are passed by name and checked."""

import ctypes

import pytest
import torch

from flashrnn import get_cell
from flashrnn.cuda.arguments import Argument, Packed, check
from flashrnn.cuda.parameters import Parameter, declaration
from flashrnn.cuda.resident.parameters import fused
from flashrnn.cuda.spec import KernelSpec, Variant
from flashrnn.gpu import named_gpu

PARAMETERS = (
    Parameter("x", "const float* __restrict__", torch.float32, ("B", 3)),
    Parameter("y", "float*", torch.float32),
    Parameter("launch", "u64"),
    Parameter("B", "i64"),
)
X, Y = torch.zeros(2, 3), torch.zeros(5)


def in_memory(packed: Packed, arguments: dict[str, Argument]) -> list[int]:
    """Return the bytes that a kernel receives."""
    packed.pack(arguments)
    addresses = (ctypes.c_void_p * len(PARAMETERS)).from_address(packed.address)
    return [ctypes.c_int64.from_address(address).value for address in addresses]


def test_arguments_are_packed_by_name():
    packed = Packed(PARAMETERS, {"B": 2})
    assert in_memory(packed, {"x": X, "y": None, "launch": 2**62}) == [X.data_ptr(), 0, 2**62, 2]
    assert in_memory(packed, {"launch": 7, "y": Y, "x": 64}) == [64, Y.data_ptr(), 7, 2]


@pytest.mark.parametrize(
    ("arguments", "name"), [({"x": X, "y": Y}, "launch"), ({"x": X, "y": Y, "launch": 1, "b": 2}, "b")]
)
def test_wrong_names_are_an_error(arguments, name):
    with pytest.raises(TypeError, match=rf"\['{name}'\]"):
        Packed(PARAMETERS, {"B": 2}).pack(arguments)


@pytest.mark.parametrize("known", [{"b": 2}, {"launch": 2}], ids=["unknown", "not the last"])
def test_known_arguments_must_be_the_last(known):
    with pytest.raises(TypeError, match=rf"'launch', 'B'\].*\['{next(iter(known))}'\]"):
        Packed(PARAMETERS, known)


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (X.double(), r"x .*torch\.float32 \[2, 3\].*torch\.float64 \[2, 3\]"),
        (X[:, :2], r"x .*torch\.float32 \[2, 3\].*torch\.float32 \[2, 2\]"),
    ],
    ids=["dtype", "shape"],
)
def test_tensor_with_wrong_shape_or_dtype_is_an_error(x, expected):
    with pytest.raises(TypeError, match=expected):
        Packed(PARAMETERS, {"B": 2}).pack({"x": x, "y": Y, "launch": 0})


def test_empty_tensor_is_a_null_pointer():
    check(PARAMETERS, {"x": torch.empty(0, dtype=torch.float16), "y": Y, "launch": 0, "B": 2})


def test_gradients_of_other_states_are_parameters_if_there_are_any():
    variant = Variant(aux=torch.float32, training=True)
    spec = KernelSpec("backward", get_cell("slstm"), 1, 64, 16, torch.bfloat16, named_gpu("H100"), variant)
    with_gradients = KernelSpec(**{**vars(spec), "variant": Variant(aux=torch.float32, training=True, d_aux=True)})
    added = [one.name for one in fused(with_gradients) if one not in fused(spec)]
    assert added == ["d_aux_0", "d_aux_1", "d_aux_2"]
    assert "const float* __restrict__ d_aux_2_, const float* __restrict__ d_last_" in declaration(fused(with_gradients))


def test_struct_has_the_parameters_as_members():
    assert declaration(PARAMETERS).splitlines() == [
        "struct Params {",
        "  const float* __restrict__ x;  // [B, 3]",
        "  float* y;",
        "  u64 launch;",
        "  i64 B;",
        "};",
        "#define PARAMETERS const float* __restrict__ x_, float* y_, u64 launch_, i64 B_",
        "#define PARAMETER_NAMES x_, y_, launch_, B_",
    ]
