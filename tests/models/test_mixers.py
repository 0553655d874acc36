"""Mixers: pieces with carried states equal the whole sequence, and documents do not affect each other."""

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

import flashrnn
from models.backbone import SequenceModel, carries_state
from models.mixers import AttentionMixer, NNLSTMMixer, RNNMixer
from training.optim import adamw

B, T, d, N = 3, 11, 16, 2

MIXERS = {
    "attention": lambda: AttentionMixer(d, num_heads=N),
    "attention_without_positions": lambda: AttentionMixer(d, num_heads=N, rope_base=None),
    "window": lambda: AttentionMixer(d, num_heads=N, window=4),
    **{cell: lambda cell=cell: RNNMixer(d, num_heads=N, function=cell) for cell in ("elman", "gru", "lstm", "slstm")},
    "slstm_conv": lambda: RNNMixer(d, num_heads=N, function="slstm", conv_width=4),
    "gru_conv": lambda: RNNMixer(d, num_heads=N, function="gru", conv_width=2),
}


@pytest.fixture(params=MIXERS)
def mixer(request):
    torch.manual_seed(0)
    return MIXERS[request.param]().double()


@pytest.fixture(params=["no_reset", "reset"])
def reset(request):
    if request.param == "no_reset":
        return None
    return torch.rand(B, T, generator=torch.Generator().manual_seed(1)) < 0.3


def in_pieces(mixer, x, reset, lengths):
    outputs, state, start = [], None, 0
    for length in lengths:
        piece = slice(start, start + length)
        y, state = mixer(x[:, piece], state, None if reset is None else reset[:, piece])
        outputs.append(y)
        start += length
    return torch.cat(outputs, dim=1), state


@pytest.mark.parametrize("lengths", [[1] * T, [2, 7, 2]], ids=["steps", "pieces"])
def test_pieces_equal_the_whole(mixer, reset, lengths):
    x = torch.randn(B, T, d, dtype=torch.float64)
    whole, state_of_whole = mixer(x, reset=reset)
    pieces, state = in_pieces(mixer, x, reset, lengths)
    torch.testing.assert_close(pieces, whole)
    for ours, expected in zip(state, state_of_whole, strict=True):
        torch.testing.assert_close(ours, expected)


def test_documents_do_not_affect_each_other(mixer):
    x = torch.randn(B, T, d, dtype=torch.float64)
    reset = torch.zeros(B, T, dtype=torch.bool)
    reset[:, 4] = True
    together, _ = mixer(x, reset=reset)
    alone, _ = mixer(x[:, 4:])
    torch.testing.assert_close(together[:, 4:], alone)


def test_resets_in_only_some_pieces(mixer):
    x = torch.randn(B, T, d, dtype=torch.float64)
    reset = torch.zeros(B, T, dtype=torch.bool)
    reset[1:, 5] = True
    whole, _ = mixer(x, reset=reset)
    state, outputs = None, []
    for piece, given in ((slice(0, 3), None), (slice(3, 7), reset[:, 3:7]), (slice(7, 10), None), (slice(10, T), None)):
        y, state = mixer(x[:, piece], state, given)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole)


def test_initial_state_is_zero(mixer):
    if not carries_state(mixer):
        pytest.skip("its state is its tokens")
    x = torch.randn(B, T, d, dtype=torch.float64)
    zeros = tuple(torch.zeros_like(part) for part in mixer(x)[1])
    torch.testing.assert_close(mixer(x, zeros)[0], mixer(x)[0])


def test_causal(mixer):
    x = torch.randn(B, T, d, dtype=torch.float64)
    changed = x.clone()
    changed[:, 6:] += 1
    torch.testing.assert_close(mixer(x)[0][:, :6], mixer(changed)[0][:, :6])


def test_window_hides_earlier_tokens():
    x = torch.randn(B, T, d, dtype=torch.float64)
    mixer = AttentionMixer(d, num_heads=N, window=4).double()
    whole, (keys, values, position) = mixer(x)
    torch.testing.assert_close(whole[:, -1], mixer(x[:, -4:])[0][:, -1])  # rotary embedding depends only on distances
    assert keys.shape == values.shape == (B, N, 3, d // N)
    assert position.tolist() == [T] * B


def test_heads_are_normalised_separately():
    """Scaling the output of one head has no effect, because heads do not share mean and variance."""
    torch.manual_seed(0)
    mixer = RNNMixer(d, num_heads=N, function="lstm").double()
    y, _ = mixer(torch.randn(B, T, d, dtype=torch.float64))
    heads = y.view(B, T, N, d // N)
    torch.testing.assert_close(heads.mean(-1), torch.zeros(B, T, N, dtype=torch.float64))
    assert (heads.std(-1, correction=0) - 1).abs().max() < 0.1


def test_convolution_feeds_only_its_gates():
    """If the weights of its gates are zero, the convolution has no effect; otherwise it has one."""
    torch.manual_seed(0)
    mixer = RNNMixer(d, function="slstm", conv_width=4).double()
    x = torch.randn(B, T, d, dtype=torch.float64)

    def influence_of_convolution():
        before, _ = mixer(x)
        with torch.no_grad():
            mixer.conv.weight.mul_(2)
        return (mixer(x)[0] - before).abs().max().item()

    assert influence_of_convolution() > 0
    with torch.no_grad():
        mixer.gates.weight.view(4, d, d)[:2] = 0  # i and f in the order i, f, z, o
    assert influence_of_convolution() == 0


def test_user_cell_with_convolution_gates():
    def step(a, b, h):
        return torch.tanh(a) * torch.sigmoid(b) + h / 2

    cell = flashrnn.Cell("ours", step, states=("h",))
    assert RNNMixer(d, function=cell, conv_width=2).conv_fed == [True, True]
    assert RNNMixer(d, function=cell, conv_width=2, conv_gates=("b",)).conv_fed == [False, True]


def test_projections_have_no_biases():
    names = {name for name, _ in RNNMixer(d, function="slstm").named_parameters()}
    assert names == {"gates.weight", "recurrence.R", "recurrence.b", "norm_weight"}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: RNNMixer(768, num_heads=7), "num_heads=7 .*d_model=768"),
        (lambda: RNNMixer(d, function="lsmt"), "'lsmt'.*elman.*lstm"),
        (lambda: RNNMixer(d, conv_width=-1), "conv_width=-1"),
        (lambda: RNNMixer(d, conv_gates=("i",)), r"conv_gates=\['i'\].*conv_width=0"),
        (lambda: RNNMixer(d, function="gru", conv_width=4, conv_gates=("i",)), r"'gru' .*\['i'\].*'r'"),
        (lambda: AttentionMixer(768, num_heads=7), "d_model=768 with num_heads=7"),
        (lambda: AttentionMixer(6, num_heads=2), "even"),
        (lambda: AttentionMixer(d, num_heads=2, window=0), "window=0.* 1 .*null"),
    ],
)
def test_wrong_arguments_are_an_error(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_nn_lstm_has_one_head_and_no_resets():
    with pytest.raises(ValueError, match=r"num_heads=2"):
        NNLSTMMixer(d, num_heads=2)
    with pytest.raises(ValueError, match=r"torch\.nn\.LSTM .*data\.reset_at_documents.*model=lstm"):
        NNLSTMMixer(d)(torch.randn(B, T, d), reset=torch.zeros(B, T, dtype=torch.bool))


def test_nn_lstm_equals_the_lstm_with_one_head():
    """With copied weights, the outputs equal those of model=lstm model.num_heads=1, also in pieces."""
    torch.manual_seed(0)
    theirs, ours = NNLSTMMixer(d).double(), RNNMixer(d, function="lstm").double()
    with torch.no_grad():
        ours.gates.weight.copy_(theirs.lstm.weight_ih_l0)
        ours.recurrence.R.copy_(theirs.lstm.weight_hh_l0.view(4, 1, d, d))
        ours.recurrence.b.copy_((theirs.lstm.bias_ih_l0 + theirs.lstm.bias_hh_l0).view(4, 1, d))
    x = torch.randn(B, T, d, dtype=torch.float64)
    torch.testing.assert_close(ours(x)[0], theirs(x)[0])
    torch.testing.assert_close(in_pieces(theirs, x, None, [2, 1, 8]), theirs(x))


def test_nn_lstm_trains_like_the_lstm_with_one_head():
    torch.manual_seed(0)
    models = [SequenceModel(11, mixer, d_model=d, num_blocks=2).double() for mixer in (NNLSTMMixer, RNNMixer)]
    theirs, ours = models
    carried = {name: weight for name, weight in theirs.state_dict().items() if ".lstm." not in name}
    for index, block in enumerate(theirs.blocks):
        place, lstm = f"blocks.{index}.mixer", block.mixer.lstm
        carried[f"{place}.gates.weight"] = lstm.weight_ih_l0
        carried[f"{place}.recurrence.R"] = lstm.weight_hh_l0.view(4, 1, d, d)
        carried[f"{place}.recurrence.b"] = lstm.bias_ih_l0.view(4, 1, d)
    ours.load_state_dict(carried)
    optimizers = [adamw(model) for model in models]
    ids = torch.randint(11, (B, T))
    for _ in range(4):
        losses = [F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()) for model in models]
        torch.testing.assert_close(*losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def test_rotary_angles_are_computed_once():
    """Otherwise, a compiled model would compute sines for every element of every layer."""
    calls = 0

    def count(graph, inputs):
        nonlocal calls
        calls += sum(node.target is torch.ops.models.rotary_angles.default for node in graph.graph.nodes)
        return graph

    layers = torch.nn.ModuleList(AttentionMixer(d, num_heads=N) for _ in range(3))

    def forward(x):
        for layer in layers:
            x = x + layer(x)[0]
        return x

    backend = aot_autograd(
        fw_compiler=count, bw_compiler=lambda graph, _: graph, partition_fn=min_cut_rematerialization_partition
    )
    torch.compile(forward, fullgraph=True, backend=backend)(torch.randn(B, T, d))
    assert calls == 1
