"""Backend `cuda` with heads that only it supports: blocks with several items, odd sizes."""

import pytest
import torch

from flashrnn import get_cell
from tests.suite import Case, check


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(get_cell("lstm"), B=40, T=5, N=1, D=4096),
        Case(get_cell("slstm"), B=65, T=6, N=3, D=1001, reset=True),
        Case(get_cell("gru"), B=200, T=5, N=2, D=777, time_major=True),
    ],
    ids=str,
)
def test_wide_heads(case, dtype):
    check("cuda", case, dtype, "cuda:0")
