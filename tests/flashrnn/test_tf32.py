"""PyTorch's setting for TF32 in problems."""

import warnings
from collections.abc import Callable

import pytest
import torch

from flashrnn import get_cell
from flashrnn.dispatch import choose
from flashrnn.gpu import named_gpu
from flashrnn.problem import Problem, tf32_allowed

CUDA = torch.device("cuda")
PRODUCTS = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def _as_before():
    yield
    torch.set_float32_matmul_precision("highest")
    PRODUCTS.fp32_precision = "none"


def old_flag(allowed: bool) -> None:
    PRODUCTS.allow_tf32 = allowed


def new_flag(allowed: bool) -> None:
    PRODUCTS.fp32_precision = "tf32" if allowed else "ieee"


def new_flag_of_everything(allowed: bool) -> None:
    torch.backends.fp32_precision = "tf32" if allowed else "none"


def high(allowed: bool) -> None:
    torch.set_float32_matmul_precision("high" if allowed else "highest")


def medium(allowed: bool) -> None:
    torch.set_float32_matmul_precision("medium" if allowed else "highest")


@pytest.mark.parametrize("set_to", [old_flag, new_flag, new_flag_of_everything, high, medium])
def test_all_ways_to_set_tf32_are_detected(set_to: Callable[[bool], None]):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for allowed in (True, False, True, False):
            set_to(allowed)
            assert tf32_allowed(torch.float32, CUDA) is allowed


def test_old_and_new_settings_can_be_mixed():
    torch.set_float32_matmul_precision("highest")
    PRODUCTS.fp32_precision = "tf32"
    assert tf32_allowed(torch.float32, CUDA)
    torch.set_float32_matmul_precision("high")
    PRODUCTS.fp32_precision = "ieee"
    assert not tf32_allowed(torch.float32, CUDA)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_tf32_applies_only_to_float32_on_gpus(dtype):
    PRODUCTS.fp32_precision = "tf32"
    assert not tf32_allowed(dtype, CUDA)
    assert not tf32_allowed(torch.float32, torch.device("cpu"))


def test_backend_depends_on_the_tf32_setting():
    """An sLSTM with one head of 768 units fits on the chip only with TF32."""
    problem = Problem(get_cell("slstm"), 1, 768, torch.float32, CUDA, True, False, named_gpu("H100"))
    for tf32, backend in ((False, "cuda"), (True, "cuda_fused"), (False, "cuda")):
        assert choose("auto", problem._replace(tf32=tf32)).name == backend
