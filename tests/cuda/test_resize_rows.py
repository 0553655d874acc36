"""The kernel that makes rows longer or shorter, on the processor."""

import pytest
import torch
from torch.nn.functional import pad

from flashrnn.cuda import dtype_kernel, resize_rows
from tests.cuda.host_kernel import loaded_on_host


@pytest.fixture
def on_host(monkeypatch):
    monkeypatch.setattr(dtype_kernel, "loaded", loaded_on_host)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("before", "after"), [(63, 64), (64, 63), (1, 8), (8, 1), (131, 136), (136, 131)])
def test_rows_are_cut_off_or_padded_with_zeros(on_host, dtype, before, after):
    x = torch.randn(3, 17, before).to(dtype)
    out = resize_rows.resize_rows(x, after)
    assert out.dtype == dtype
    assert torch.equal(out, pad(x, (0, after - before)))


def test_no_rows(on_host):
    assert resize_rows.resize_rows(torch.randn(0, 63), 64).shape == (0, 64)
