"""Mamba, Mamba-2 and mLSTM: properties of all mixers, and results equal to transformers."""

from functools import partial

import pytest
import torch
from torch.func import functional_call, stack_module_state, vmap
from transformers import xLSTMConfig
from transformers.models.xlstm.modeling_xlstm import xLSTMBackend

from models.backbone import SequenceModel
from models.mixers.mamba import MambaMixer
from models.mixers.mamba2 import Mamba2Mixer
from models.mixers.mlstm import CHUNK, MLSTMMixer
from tests.models.test_mixers import in_pieces

B, T, d = 3, CHUNK + 6, 64
MIXERS = {
    "mamba": MambaMixer,
    "mamba2": partial(Mamba2Mixer, head_dim=32, state_size=16, chunk_size=CHUNK),
    "mlstm": MLSTMMixer,
}


@pytest.fixture(params=MIXERS)
def mixer(request):
    torch.manual_seed(0)
    return MIXERS[request.param](d)


@pytest.fixture
def x():
    return torch.randn(B, T, d, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def reset():
    return torch.rand(B, T, generator=torch.Generator().manual_seed(2)) < 0.1


@torch.no_grad()
@pytest.mark.parametrize("resets", [False, True], ids=["no_reset", "reset"])
def test_pieces_equal_the_whole(mixer, x, reset, resets):
    reset = reset if resets else None
    whole, state_of_whole = mixer(x, None, reset)
    pieces, state = in_pieces(mixer, x, reset, [1, 3, T - 4])
    torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=1e-4)
    for ours, expected in zip(state, state_of_whole, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_documents_do_not_affect_each_other(mixer, x):
    reset = torch.zeros(B, T, dtype=torch.bool)
    reset[:, 4] = True
    torch.testing.assert_close(mixer(x, None, reset)[0][:, 4:], mixer(x[:, 4:])[0], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_initial_state_is_zero(mixer, x):
    with torch.no_grad():
        expected, state = mixer(x)
        y, _ = mixer(x, tuple(torch.zeros_like(part) for part in state))
    torch.testing.assert_close(y, expected)


def test_causal(mixer, x):
    changed = x.clone()
    changed[:, 30:] += 1
    torch.testing.assert_close(mixer(x)[0][:, :30], mixer(changed)[0][:, :30], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("steps", [40, T])
def test_every_parameter_has_a_gradient(mixer, x, steps):
    mixer(x[:, :steps])[0].square().sum().backward()
    assert all(parameter.grad.isfinite().all() and parameter.grad.any() for parameter in mixer.parameters())


def test_mamba_with_half_precision_weights_is_an_error(x):
    with pytest.raises(ValueError, match=r"torch\.bfloat16.*bf16-mixed"):
        MambaMixer(d).bfloat16()(x.bfloat16())


def test_gradients_are_sums_over_documents(mixer, x):
    reset = torch.zeros(B, T, dtype=torch.bool)
    reset[:, 4] = True
    gradients = []
    for documents in ([mixer(x, reset=reset)[0]], [mixer(x[:, :4])[0], mixer(x[:, 4:])[0]]):
        mixer.zero_grad()
        sum(y.square().sum() for y in documents).backward()
        gradients.append([parameter.grad for parameter in mixer.parameters()])
    for ours, expected in zip(*gradients, strict=True):
        assert (ours - expected).norm() < 1e-4 * expected.norm()


@torch.no_grad()
@pytest.mark.parametrize("steps", [1, T])
@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_mamba_equals_transformers(x, steps, name):
    torch.manual_seed(0)
    mixer = MIXERS[name](d)
    torch.testing.assert_close(mixer(x[:, :steps])[0], mixer.layer(x[:, :steps]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["mamba2", "mlstm"])
def test_vmap_over_the_weights_of_several_models(x, name):
    mixers = [MIXERS[name](d) for _ in range(3)]
    weights, _ = stack_module_state(mixers)
    found = vmap(lambda weights: functional_call(mixers[0], weights, (x,))[0])(weights)
    for mixer, ours in zip(mixers, found, strict=True):
        torch.testing.assert_close(ours, mixer(x)[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("lengths", [[20, T - 20], [T - 1, 1]])
def test_gradients_through_pieces_equal_those_of_the_whole(mixer, x, lengths):
    """Including the gradients through states."""
    gradients = []
    for cut in ([T], lengths):
        mixer.zero_grad()
        y, _ = in_pieces(mixer, x, None, cut)
        y.square().sum().backward()
        gradients.append([parameter.grad for parameter in mixer.parameters()])
    for ours, expected in zip(*gradients, strict=True):
        assert (ours - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("steps", [1, 40, CHUNK, T])
def test_mlstm_of_any_length_equals_transformers(steps):
    config = xLSTMConfig(hidden_size=16, num_heads=2, num_hidden_layers=1, qk_dim_factor=1.0, v_dim_factor=1.0)
    torch.manual_seed(0)
    ours = MLSTMMixer(d).layer.mlstm_backend
    q, k, v = torch.randn(3, B, 2, steps, 8)
    gates = 15 * torch.rand(2, B, 2, steps) * torch.tensor([-1.0, 1.0]).view(2, 1, 1, 1)
    state = (torch.randn(B, 2, 8, 8), torch.randn(B, 2, 8), torch.randn(B, 2, 1))
    initial = dict(zip(("c_initial", "n_initial", "m_initial"), state, strict=True))
    arguments = dict(zip(("query", "key", "value", "igate", "fgate"), (q, k, v, *gates), strict=True))
    torch.testing.assert_close(
        ours(**arguments, **initial), xLSTMBackend(config)(**arguments, **initial), atol=1e-4, rtol=1e-4
    )


def test_backbone_keeps_the_initialisation_of_mixers():
    torch.manual_seed(0)
    model = SequenceModel(5, lambda width, **place: MLSTMMixer(width, num_heads=2, **place), d_model=d, num_blocks=2)
    layer = model.blocks[1].mixer.layer
    assert layer.fgate_preact.bias.tolist() == [3.0, 6.0]
    assert not layer.igate_preact.weight.any()
    model = SequenceModel(5, MambaMixer, d_model=d, num_blocks=2)
    bound = model.blocks[1].mixer.config.time_step_rank ** -0.5
    assert 0.9 * bound < model.blocks[1].mixer.layer.dt_proj.weight.abs().max() <= bound


def test_mlstm_heads_must_divide_the_width():
    with pytest.raises(ValueError, match=r"num_heads=5 .*d_model=64"):
        MLSTMMixer(64, num_heads=5)


def test_mamba_2_heads_must_divide_its_channels():
    with pytest.raises(ValueError, match=r"head_dim=48 .*expand \* d_model = 128"):
        Mamba2Mixer(64, head_dim=48)
