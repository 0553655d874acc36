"""The kernel that packs reset masks into bits, on the processor."""

import pytest
import torch

from flashrnn.cuda import dtype_kernel
from flashrnn.cuda.reset_bits import reset_bits
from tests.cuda.host_kernel import loaded_on_host


@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize(("batch", "steps", "taken"), [(1, 1333, 1024), (1, 21, 5), (3, 77, 33), (200, 1, 1)])
def test_resets_are_packed_to_bits_from_any_layout(monkeypatch, batch, steps, taken, time_major):
    monkeypatch.setattr(dtype_kernel, "loaded", loaded_on_host)
    reset = torch.rand(batch, steps, generator=torch.Generator().manual_seed(0)) < 0.3
    reset = reset[:, :taken]  # rows with gaps between them
    reset = reset.T.contiguous().T if time_major else reset
    bits = reset_bits(reset)
    assert bits.shape == (batch, -(-taken // 32))
    found = bits[..., None] >> torch.arange(32) & 1
    assert torch.equal(found.flatten(1)[:, :taken].bool(), reset)
    assert not found.flatten(1)[:, taken:].any()
