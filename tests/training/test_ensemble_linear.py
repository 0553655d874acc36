"""Linear layers of ensembles have the same gradients as F.linear."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from training.ensemble_linear import InParts


@pytest.mark.parametrize("rows", [(64, 40), (7, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("own", [0, None], ids=["own inputs", "the same inputs"])
def test_gradients_equal_pytorch(rows, own):
    torch.manual_seed(0)
    networks = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4, bias=False)) for _ in range(3)]
    weights, _ = stack_module_state(networks)
    x = torch.randn(*(() if own is None else (3,)), *rows, 8)

    def gradients():
        y = vmap(lambda weights, x: functional_call(networks[0], weights, (x,)), in_dims=(0, own))(weights, x)
        return torch.autograd.grad(y.square().sum(), list(weights.values()))

    with InParts():
        ours = gradients()
    for gradient, expected in zip(ours, gradients(), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)
