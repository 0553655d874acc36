"""The kernel that copies rows, on the processor."""

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from flashrnn import FlashRNN, padded_rows
from flashrnn.cuda import dtype_kernel
from flashrnn.cuda.gather_rows import gather_rows, serves
from tests.cuda.host_kernel import loaded_on_host


@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.bfloat16, (40, 24)), (torch.float32, (7, 3, 4)), (torch.float64, (1, 2))], ids=str
)
def test_rows_are_gathered_or_padded(monkeypatch, dtype, shape):
    monkeypatch.setattr(dtype_kernel, "loaded", loaded_on_host)
    x, index = torch.randn(*shape).to(dtype), torch.randint(-1, shape[0], (700,))
    assert serves(x, len(index))
    expected = x[index]
    expected[index < 0] = 0
    assert torch.equal(gather_rows(x, index), expected)
    assert torch.equal(gather_rows(x, index, first=True), x[index.clamp(min=0)])


def test_only_rows_of_whole_vectors_are_gathered():
    assert not serves(torch.zeros(3, 7), 5)
    assert not serves(torch.zeros(3, 8), 0)
    assert not serves(torch.zeros(0, 8), 0)
    assert not serves(torch.zeros(1, 8).expand(2**31, 8), 2**31)


def test_packed_sequences_are_copied_by_it(monkeypatch):
    """Results and gradients equal those by PyTorch's operators."""
    network = FlashRNN(8, 8, bidirectional=True, dtype=torch.float64)
    data = [torch.randn(steps, 8, dtype=torch.float64, requires_grad=True) for steps in (3, 7, 1)]

    def results() -> list[torch.Tensor]:
        out, last = network(pack_sequence(data, enforce_sorted=False))
        loss = out.data.sin().sum() + sum(state.square().sum() for state in last)
        return [out.data, *last, *torch.autograd.grad(loss, [*data, *network.parameters()])]

    expected = results()
    monkeypatch.setattr(dtype_kernel, "loaded", loaded_on_host)
    monkeypatch.setattr(padded_rows, "_by_kernel", serves)
    torch.testing.assert_close(results(), expected)
