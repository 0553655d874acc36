"""The kernels of Mamba's scan on a GPU, compared with the CPU."""

import pytest
import torch

from models.mixers.selective_scan import selective_scan
from tests.models.test_selective_scan import gradients, inputs


@pytest.mark.parametrize("sizes", [(5, 40, 256, 16), (2, 1, 70, 5), (2, 513, 70, 16), (1, 9, 64, 200)], ids=str)
@pytest.mark.parametrize("resets", [False, True], ids=["no_reset", "reset"])
def test_scan_equals_the_cpu(sizes, resets):
    tensors = inputs(*sizes)
    reset = torch.rand(sizes[:2]) < 0.1 if resets else None
    expected = selective_scan(*tensors, reset)
    on_gpu = [x.detach().cuda().requires_grad_() for x in tensors]
    found = selective_scan(*on_gpu, None if reset is None else reset.cuda())
    ours = *found, *gradients(*(x.cpu() for x in found), on_gpu)
    for x, other in zip(ours, (*expected, *gradients(*expected, tensors)), strict=True):
        assert (x.cpu() - other).norm() <= 1e-4 * other.norm()
