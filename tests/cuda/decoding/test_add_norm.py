"""The kernel `add_norm` on the processor, compared with float64."""

import pytest
import torch
from torch.nn import functional as F

from flashrnn import decoding
from flashrnn.accuracy import BOUNDS, relative_error
from flashrnn.cuda.decoding import add_norm
from flashrnn.decoding import unsupported_add_norm
from tests.cuda.host_kernel import HostKernel, compile_for_host


@pytest.fixture
def on_host(monkeypatch):
    """Let `add_norm` run on the processor."""

    def load_add_norm(heads, head_dim, dtype, device):
        parameters = add_norm.parameters(dtype, heads * head_dim)
        library = compile_for_host(
            "flashrnn_add_norm",
            add_norm.prelude(heads, head_dim, dtype),
            "decoding/kernels/add_norm.cuh",
        )
        return HostKernel(library, parameters, None, 32 * add_norm.WARPS, 0).launch

    monkeypatch.setattr(decoding, "load_add_norm", load_add_norm)


@pytest.mark.parametrize(
    ("rows", "heads", "head_dim", "dtype"),
    [(3, 4, 32, torch.bfloat16), (9, 1, 64, torch.float32), (2, 3, 128, torch.float16)],
)
def test_sums_and_norms_equal_float64(on_host, rows, heads, head_dim, dtype):
    torch.manual_seed(0)
    d = heads * head_dim
    weight, head_weight = (1 + 0.3 * torch.randn(2, d)).to(dtype)
    for by_head in (head_weight, None):
        x, update = torch.randn(2, rows, 1, d).to(dtype)
        added = update.double()
        if by_head is not None:
            added = F.layer_norm(added.view(rows, heads, head_dim), (head_dim,)).view(rows, 1, d) * by_head.double()
        expected = x.double() + added
        normed = decoding.add_norm(x, update, weight, by_head, head_dim)
        assert relative_error(x, expected) < BOUNDS[dtype]
        assert relative_error(normed, F.layer_norm(x.double(), (d,), weight.double())) < BOUNDS[dtype]


def test_reasons_for_unsupported_tensors():
    assert "cpu" in unsupported_add_norm(torch.zeros(2, 64), 64)
