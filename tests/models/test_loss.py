"""The chunked loss has the value and gradients of PyTorch's cross-entropy, without storing all logits."""

import pytest
import torch
from torch.nn import functional as F

from models import loss
from models.loss import IGNORE, linear_cross_entropy

M, d, V = 200, 16, 37


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch):
    monkeypatch.setattr(loss, "CHUNK", 64 * V)  # chunks of 64 rows, the last one shorter


def problem(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(M, d, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, d, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(V, (M,), generator=generator)
    labels[::7] = IGNORE
    return x, weight, labels


def reference(x, weight, labels, factor=1.0):
    x, weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    value = F.cross_entropy(x @ weight.T, labels, ignore_index=IGNORE)
    return value, torch.autograd.grad(factor * value, (x, weight))


def relative(ours, expected):
    return ((ours - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("factor", [1.0, 0.3], ids=["plain", "accumulated"])
def test_equals_cross_entropy(factor):
    x, weight, labels = problem()
    value, right = linear_cross_entropy(x, weight, labels)
    gradients = torch.autograd.grad(factor * value, (x, weight))
    expected, expected_gradients = reference(x, weight, labels, factor)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradients, expected_gradients)
    assert torch.equal(right, (x @ weight.T).argmax(-1) == labels)


def test_finite_differences():
    x, weight, labels = problem()
    x = x[:70].detach().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, w: linear_cross_entropy(x, w, labels[:70])[0], (x, weight), fast_mode=True
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(compiled):
    """With padding, in bfloat16: errors are those of rounding x, weight and logits once; gradients are float32.

    Only the two gradients are stored for the backward pass, and nothing of size M x V.
    """
    function = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager") if compiled else None
    x, weight, labels = problem(torch.float32)
    kept = []
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t),
    ):
        value, _ = (function or linear_cross_entropy)(x, weight, labels)
    assert sum(kept) <= x.numel() + weight.numel() + 1
    gradients = torch.autograd.grad(value, (x, weight))
    expected, expected_gradients = reference(x, weight, labels)
    assert value.dtype == gradients[0].dtype == gradients[1].dtype == torch.float32
    assert relative(value, expected) < 2**-8
    for ours, of_reference in zip(gradients, expected_gradients, strict=True):
        assert relative(ours, of_reference) < 2 * 2**-8


def test_scale_of_the_gradient_is_not_rounded():
    """In half precision, 1 / 171 would have a relative error of up to 2^-9 in all rows."""
    x, weight, labels = problem(torch.bfloat16)
    x.data.mul_(1e-3)  # logits near zero, so that rounding does not affect the softmax
    value, _ = linear_cross_entropy(x, weight, labels)
    (gradient,) = torch.autograd.grad(value, x)
    _, (expected, _) = reference(x, weight, labels)
    slope = (gradient.double() * expected).sum() / expected.pow(2).sum()
    assert slope.item() == pytest.approx(1, abs=2**-11)


def test_nothing_is_saved_without_gradients():
    x, weight, labels = problem()
    with torch.no_grad():
        value, _ = linear_cross_entropy(x, weight, labels)
    assert not value.requires_grad
    torch.testing.assert_close(value, reference(x, weight, labels)[0])


def test_loss_without_labels():
    x, weight, _ = problem()
    value, right = linear_cross_entropy(x, weight, torch.full((M,), IGNORE))
    assert value.isnan()
    assert not right.any()


def test_extreme_logits_stay_finite():
    x, weight, labels = problem(torch.float32)
    x.data.mul_(1e4)
    value, _ = linear_cross_entropy(x, weight, labels)
    assert relative(value, reference(x, weight, labels)[0]) < 1e-5


def test_gradients_of_many_rows_are_finite_in_float16():
    """All rows have the same label, and the sum of its gradients is beyond the range of float16."""
    x = (4 * torch.ones(40_000, 8)).requires_grad_()
    weight = torch.zeros(2, 8, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        value, _ = linear_cross_entropy(x, weight, torch.zeros(len(x), dtype=torch.long))
    (value * len(x)).backward()
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("M", [1, 63, 65, 1000, 65_536])
@pytest.mark.parametrize("V", [2, 50_257])
def test_chunks_have_a_limited_size(monkeypatch, M, V):
    monkeypatch.setattr(loss, "CHUNK", 2**28)
    rows = loss._rows_of_a_chunk(M, V)
    assert rows % 64 == 0
    assert rows * V <= 2**28 + 64 * V
