"""Ensembles on a GPU: vmap over fused kernels and training in CUDA graphs, compared with single networks."""

import pytest
import torch

from flashrnn import FlashRNN
from tests.tiny_runs import SHORT, TINY, config
from training.together import Batches, Ensemble, Learner


@pytest.mark.parametrize("function", ["lstm", "gru"])
def test_vmap_equals_single_networks(function):
    networks = [FlashRNN(16, 64, function=function, backend="cuda_fused").cuda() for _ in range(3)]
    x, (weights, _) = torch.randn(20, 5, 16, device="cuda"), torch.func.stack_module_state(networks)
    out = torch.func.vmap(lambda weights: torch.func.functional_call(networks[0], weights, (x,))[0])(weights)
    out.square().sum().backward()
    for k, network in enumerate(networks):
        alone = network(x)[0]
        alone.square().sum().backward()
        torch.testing.assert_close(out[k], alone, rtol=1e-4, atol=1e-5)
        for name, parameter in network.named_parameters():
            torch.testing.assert_close(weights[name].grad[k], parameter.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("model", ["lstm", "transformer", "mlstm", "mamba", "mamba2 model.mixer.head_dim=8"])
def test_steps_in_a_cuda_graph_equal_eager_steps(model, tmp_path):
    device = torch.device("cuda")
    configs = [
        config(
            *TINY["parity"], *SHORT, *f"model={model}".split(), f"optim.lr={lr}", "logger=none", f"run_dir={tmp_path}"
        )
        for lr in (1e-3, 3e-3)
    ]
    batches = Batches(configs[0], device)
    graphed, eager = (Ensemble([Learner(one, batches, device) for one in configs]) for _ in range(2))
    graphed.capture()
    for ensemble in (graphed, eager):
        while ensemble.left:
            ensemble.step()
    torch.cuda.synchronize()
    for ours, theirs in zip(graphed.learners, eager.learners, strict=True):
        for parameter, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
            torch.testing.assert_close(parameter, other, rtol=1e-3, atol=1e-4)
    assert None not in graphed.evaluate()
