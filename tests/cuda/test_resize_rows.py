"""The kernel that pads or truncates heads, on the processor."""

from functools import partial

import pytest
import torch
from torch.nn.functional import pad

from flashrnn import head_size
from flashrnn.cuda import dtype_kernel, resize_rows
from tests.cuda.host_kernel import loaded_on_host


@pytest.fixture
def on_host(monkeypatch):
    monkeypatch.setattr(dtype_kernel, "loaded", loaded_on_host)
    monkeypatch.setattr(resize_rows, "_MOST_THREADS", 200)  # so that each thread has several groups of rows


def check(tensors: list[torch.Tensor], size: int, axes: list[int]) -> None:
    out = resize_rows.resize_rows(tensors, size, axes)
    for resized, x, count in zip(out, tensors, axes, strict=True):
        assert resized.dtype == x.dtype
        assert torch.equal(resized, pad(x, (0, size - x.shape[-1]) * count))


@pytest.mark.parametrize(
    ("dtype", "before", "after"),
    [
        (torch.bfloat16, 63, 64),
        (torch.bfloat16, 136, 131),
        (torch.float32, 64, 63),
        (torch.float32, 3, 8),
        (torch.float64, 131, 136),
        (torch.float64, 8, 1),
        (torch.bfloat16, 1, 8),
    ],
)
def test_heads_are_truncated_or_padded_with_zeros(on_host, dtype, before, after):
    check([torch.randn(3, 17, before).to(dtype), torch.randn(2, before, before).to(dtype)], after, [1, 2])


def test_tensors_of_different_dtypes_and_alignments(on_host):
    """More tensors than fit in one launch."""
    odd = torch.randn(1 + 700 * 63).half()[1:].view(7, 100, 63)
    tensors = [
        odd,
        torch.randn(2, 3, 63, 63).bfloat16(),
        torch.randn(4, 63),
        torch.randn(5, 63).half(),
        torch.randn(63),
    ]
    check(tensors, 64, [1, 2, 1, 1, 1])


def test_tensors_without_rows(on_host):
    assert [x.shape for x in resize_rows.resize_rows([torch.randn(0, 63), torch.randn(2, 63)], 64, [1, 1])] == [
        (0, 64),
        (2, 64),
    ]
    assert resize_rows.resize_rows([torch.randn(0, 63)], 64, [1])[0].shape == (0, 64)


def test_gradients_and_memory_formats(on_host, monkeypatch):
    """Checks padded inputs, some without gradients, and results in time-major memory."""
    Wx = torch.randn(5, 3, 2, 7).transpose(0, 1).requires_grad_()
    R, b = torch.randn(4, 2, 7, 7).bfloat16().requires_grad_(), torch.randn(4, 2, 7, requires_grad=True)

    def run(resized) -> list[torch.Tensor]:
        rows, matrices, biases = resized(8, [1, 2, 1], Wx, R, b)
        assert rows.stride() == (16, 48, 8, 1)
        h = resized(7, [1], rows * rows)[0]
        return [rows, matrices, biases, h, *torch.autograd.grad([h.square().sum(), matrices.sum()], [Wx, R])]

    def by_torch(size, axes, *tensors) -> list[torch.Tensor]:
        return head_size._in_memory_order(partial(head_size._padded, size, axes), tensors)

    expected = run(by_torch)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for found, value in zip(run(head_size._Resized.apply), expected, strict=True):
        assert torch.equal(found, value)
        assert found.stride() == value.stride()
