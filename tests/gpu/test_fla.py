"""Layers of flash-linear-attention as mixers, within the rounding errors of bfloat16."""

from functools import partial
from importlib.util import find_spec

import pytest
import torch

from models.backbone import SequenceModel
from models.generation.decoder import Decoder
from models.generation.sampler import SamplingParams

pytest.importorskip("fla")

B, T, d = 3, 20, 64
BOUND = 2e-2  # relative error: several roundings of bfloat16 (2^-8) in a layer


def mixers():
    from models.mixers.fla import FLAMixer

    sizes = {"num_heads": 2, "head_dim": 32, "expand_v": 1}
    return {
        "gated_deltanet": partial(FLAMixer, layer="GatedDeltaNet", allow_neg_eigval=True, **sizes),
        "deltaproduct": partial(FLAMixer, layer="GatedDeltaProduct", num_householder=2, **sizes),
    }


@pytest.fixture(params=["gated_deltanet", "deltaproduct"])
def build(request):
    torch.manual_seed(0)
    return mixers()[request.param]


@pytest.fixture
def build_trained(build):
    """Return a function that builds a mixer with correct gradients, or skip the test."""
    if not _gradients_are_right():
        pytest.skip(
            "flash-linear-attention computes no gradients of gated deltas on Hopper with Triton 3.4 to 3.7.0 (its #640)"
        )
    return build


def _gradients_are_right():
    from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1

    return not IS_NVIDIA_HOPPER or not TRITON_ABOVE_3_4_0 or TRITON_ABOVE_3_7_1 or find_spec("tilelang") is not None


@pytest.fixture
def x():
    return torch.randn(B, T, d, device="cuda", generator=torch.Generator("cuda").manual_seed(1))


def relative(ours, expected):
    return ((ours - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("lengths", [[12, 8], [12, *[1] * 8]], ids=["pieces", "steps"])
def test_pieces_equal_the_whole(build, x, lengths):
    mixer = build(d).cuda().eval()
    with torch.no_grad():
        whole, last = mixer(x)
        outputs, state = [], None
        for piece in x.split(lengths, dim=1):
            y, state = mixer(piece, state)
            outputs.append(y)
    assert relative(torch.cat(outputs, dim=1), whole) < BOUND
    for ours, expected in zip(state, last, strict=True):
        assert relative(ours.float(), expected.float()) < BOUND


def test_initial_state_is_zero(build, x):
    mixer = build(d).cuda().eval()
    with torch.no_grad():
        expected, state = mixer(x)
        y, _ = mixer(x, tuple(torch.zeros_like(part) for part in state))
    assert relative(y, expected) < BOUND


def test_documents_do_not_affect_each_other(build, x):
    mixer = build(d).cuda().eval()
    reset = torch.zeros(B, T, dtype=torch.bool, device="cuda")
    reset[:, 7] = True
    with torch.no_grad():
        together, _ = mixer(x, reset=reset)
        alone, _ = mixer(x[:, 7:])
    assert relative(together[:, 7:], alone) < BOUND


def test_every_parameter_has_a_gradient(build_trained, x):
    mixer = build_trained(d).cuda()
    mixer(x)[0].square().sum().backward()
    assert [name for name, p in mixer.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_gradients_pass_through_states(build_trained, x):
    mixer = build_trained(d).cuda()
    _, state = mixer(x)
    y, _ = mixer(x, tuple(part.detach().requires_grad_() for part in state))
    y.square().sum().backward()
    assert all(p.grad is not None for p in mixer.parameters())


def test_generation_on_static_buffers(build):
    model = SequenceModel(20, build, d_model=d, num_blocks=2).cuda().eval()
    ids = torch.randint(20, (2, 7), device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    logits, states = model.read(ids)
    decoder = Decoder(model, SamplingParams(), states, 2, 32)
    chosen = [decoder.load([0, 1], logits, states, 7).read()]
    chosen += [decoder.advance(1).read() for _ in range(5)]
    text = torch.cat((ids, torch.cat(chosen).T.cuda()), dim=1)
    with torch.no_grad():
        expected = model(text)[:, 6:-1]
    of_chosen = expected.gather(2, text[:, 7:, None]).squeeze(2)
    assert (expected.amax(2) - of_chosen).max() < 0.05  # the likeliest token, within the rounding errors of bfloat16
