"""States that are carried from batch to batch, and hybrids, on a GPU."""

from functools import partial

import pytest
import torch

from models.backbone import SequenceModel
from models.generation.decoder import Decoder
from models.generation.sampler import SamplingParams
from models.mixers import AttentionMixer, RNNMixer
from training.compiled_loss import CompiledLoss

MIXERS = {
    "slstm": partial(RNNMixer, function="slstm", num_heads=2, conv_width=4),
    "window": partial(AttentionMixer, num_heads=2, window=6, rope_base=None),
    "attention": partial(AttentionMixer, num_heads=2),
}
BOUND = 2e-2  # relative error of a loss in bfloat16


def model(*pattern):
    torch.manual_seed(0)
    return SequenceModel(50, MIXERS, d_model=64, num_blocks=len(pattern), pattern=pattern).cuda()


@pytest.fixture
def ids():
    return torch.randint(50, (3, 33), device="cuda", generator=torch.Generator("cuda").manual_seed(1))


def test_windows_with_carried_states_have_the_loss_of_the_whole_text(ids):
    """In bfloat16, with all kinds of states."""
    hybrid = model("slstm", "window", "attention")
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        whole, _ = hybrid.loss(ids[:, :-1], ids[:, 1:])
        states, losses = None, []
        for start in range(0, 32, 8):
            window = slice(start, start + 8), slice(start + 1, start + 9)
            loss, _, states = hybrid.loss(ids[:, window[0]], ids[:, window[1]], None, states, True)
            losses.append(loss)
    assert abs(torch.stack(losses).mean() - whole) < BOUND * whole


def test_carried_states_are_compiled_once(ids):
    """Losses and gradients equal those of the eager model."""
    recurrent = model("slstm", "slstm")
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    found = {}
    for name, loss_of in (("eager", recurrent.loss), ("compiled", CompiledLoss(recurrent.loss))):
        recurrent.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            with torch.no_grad():
                states = recurrent.loss(ids[:, :1], ids[:, :1], None, None, True)[2]
            states = [tuple(torch.zeros_like(part) for part in state) for state in states]
            losses = []
            for start in (0, 8, 16):
                inputs, labels = ids[:, start : start + 8], ids[:, start + 1 : start + 9]
                loss, _, states = loss_of(inputs.contiguous(), labels.contiguous(), None, states, True)
                states = [tuple(part.clone() for part in state) for state in states]
                loss.backward()
                losses.append(loss.item())
        found[name] = torch.tensor(losses), torch.cat([p.grad.flatten() for p in recurrent.parameters()])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for ours, expected in zip(found["compiled"], found["eager"], strict=True):
        assert (ours - expected).norm() < BOUND * expected.norm()


def test_hybrid_generates_in_a_cuda_graph(ids):
    """The ring buffer of keys and values is shorter than the text."""
    hybrid = model("slstm", "window", "attention").eval()
    logits, states = hybrid.read(ids[:, :9])
    decoder = Decoder(hybrid, SamplingParams(), states, 3, 64)
    chosen = [decoder.load([0, 1, 2], logits, states, 9).read()]
    chosen += [decoder.advance(4).read() for _ in range(5)]
    text = torch.cat((ids[:, :9], torch.cat(chosen).T.cuda()), dim=1)
    with torch.no_grad():
        expected = hybrid(text)[:, 8:-1]
    of_chosen = expected.gather(2, text[:, 9:, None]).squeeze(2)
    assert (expected.amax(2) - of_chosen).max() < 1e-3


def test_memory_does_not_grow_with_the_number_of_windows():
    recurrent, window = model("slstm", "slstm"), torch.randint(50, (3, 129), device="cuda")

    @torch.no_grad()
    def peak(windows):
        states = None
        torch.cuda.reset_peak_memory_stats()
        for _ in range(windows):
            states = recurrent.loss(window[:, :-1], window[:, 1:], None, states, True)[2]
        return torch.cuda.max_memory_allocated()

    peak(2)  # compiles
    assert peak(512) == peak(2)
