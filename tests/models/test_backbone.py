"""The backbone: sizes as in the paper, initialisation, states, and wrong input."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from models.backbone import SequenceModel
from models.loss import IGNORE
from models.mixers import AttentionMixer, NNLSTMMixer, RNNMixer

MIXERS = {
    "lstm": partial(RNNMixer, function="lstm", num_heads=2),
    "slstm_conv": partial(RNNMixer, function="slstm", num_heads=2, conv_width=4),
    "attention": partial(AttentionMixer, num_heads=2),
    "hybrid": {"lstm": partial(RNNMixer, num_heads=4), "window": partial(AttentionMixer, window=4)},
}


def tiny(mixer="lstm", **options):
    torch.manual_seed(0)
    of_pattern = {"pattern": ["lstm", "window"], "num_heads": 2} if mixer == "hybrid" else {}
    return SequenceModel(11, MIXERS[mixer], **{"d_model": 16, "num_blocks": 2, **of_pattern, **options})


def test_nn_lstm_is_initialised_like_our_lstm():
    torch.manual_seed(0)
    theirs, ours = (
        SequenceModel(11, mixer, d_model=128, num_blocks=1).blocks[0].mixer for mixer in (NNLSTMMixer, RNNMixer)
    )
    pairs = (theirs.lstm.weight_ih_l0, ours.gates.weight), (theirs.lstm.weight_hh_l0, ours.recurrence.R)
    for their, our in pairs:
        assert their.std().item() == pytest.approx(our.std().item(), rel=0.02)
    assert not any(bias.any() for bias in (theirs.lstm.bias_ih_l0, theirs.lstm.bias_hh_l0, ours.recurrence.b))


@pytest.mark.parametrize(
    ("mixer", "millions"),
    [
        (partial(AttentionMixer, num_heads=12), 162),
        (partial(RNNMixer, function="lstm", num_heads=12), 164),
        (partial(RNNMixer, function="slstm", num_heads=12), 164),
        (partial(RNNMixer, function="lstm", num_heads=1), 190),
        (partial(RNNMixer, function="slstm", num_heads=1), 190),
        (NNLSTMMixer, 190),
    ],
)
def test_parameter_counts_equal_the_paper(mixer, millions):
    """Whole millions, truncated as in the table of arXiv 2412.07752; the matrices alone have 164.49 and 190.44 M."""
    with torch.device("meta"):
        model = SequenceModel(50_257, mixer, d_model=768, num_blocks=12)
    assert sum(parameter.numel() for parameter in model.parameters()) // 10**6 == millions


@pytest.mark.parametrize("mixer", MIXERS)
def test_checkpointed_blocks_have_the_same_gradients_with_less_memory(mixer):
    input_ids = torch.randint(11, (3, 9))
    gradients, kept = [], []
    for checkpoint_blocks in (False, True):
        model, saved = tiny(mixer), {}
        model.checkpoint_blocks = checkpoint_blocks
        pack = lambda tensor, saved=saved: saved.setdefault(tensor.data_ptr(), tensor)  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss, _ = model.loss(input_ids, input_ids)
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        kept.append(sum(tensor.nbytes for tensor in saved.values()))
    torch.testing.assert_close(*gradients)
    assert kept[1] < kept[0] / 2


@pytest.mark.parametrize("mixer", MIXERS)
def test_token_by_token_equals_the_whole_sequence(mixer):
    model = tiny(mixer).double()
    input_ids = torch.randint(11, (3, 9))
    reset = torch.rand(3, 9) < 0.2
    expected = model(input_ids, reset=reset)
    states, steps = None, []
    for t in range(9):
        logits, states = model(input_ids[:, t : t + 1], states, reset[:, t : t + 1], return_states=True)
        steps.append(logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), expected)


def test_recurrent_state_does_not_grow():
    model = tiny("slstm_conv")
    shapes = []
    for T in (1, 50):
        _, states = model(torch.zeros(3, T, dtype=torch.int64), return_states=True)
        shapes.append([part.shape for state in states for part in state])
    assert shapes[0] == shapes[1]


def test_compiles_without_graph_breaks():
    model = tiny("slstm_conv", num_blocks=1)
    input_ids = torch.randint(11, (3, 9))
    compiled = torch.compile(model.loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(input_ids, input_ids), model.loss(input_ids, input_ids))


@pytest.mark.parametrize("mixer", MIXERS)
def test_loss_equals_the_cross_entropy_of_the_logits(mixer):
    model = tiny(mixer).double()
    input_ids, labels = torch.randint(11, (2, 3, 9))
    labels[0, 4:] = IGNORE
    reset = torch.rand(3, 9) < 0.2
    loss, right = model.loss(input_ids, labels, reset)
    logits = model(input_ids, reset=reset)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
    torch.testing.assert_close(loss, expected)
    assert torch.equal(right, logits.argmax(-1) == labels)
    for ours, theirs in zip(
        *(torch.autograd.grad(value, list(model.parameters())) for value in (loss, expected)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_num_heads_is_passed_to_mixers():
    model = SequenceModel(11, partial(RNNMixer, function="lstm"), d_model=16, num_blocks=2, num_heads=4)
    assert [block.mixer.num_heads for block in model.blocks] == [4, 4]


def test_blocks_without_mlp_contain_only_mixers():
    model = tiny("lstm", mlp=False)
    norm, gates, recurrent, biases = 16, 4 * 16 * 16, 4 * 16 * 8, 4 * 16
    of_block = norm + gates + recurrent + biases + norm
    assert sum(parameter.numel() for block in model.blocks for parameter in block.parameters()) == 2 * of_block
    assert model(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, 11)


def test_flops_per_token():
    """6 per parameter of matrices and norms; attention adds 12 T d per block, forward and backward."""
    lstm, attention = tiny("lstm"), tiny("attention")
    blocks = 2 * (4 * 16 * 16 + 4 * 16 * 8 + 4 * 16 + 16 + 8 * 16 * 16 + 2 * 16)
    assert lstm.flops_per_token(100) == 6 * (blocks + 16 + 11 * 16)
    matrices = 2 * (4 * 16 * 16 + 8 * 16 * 16 + 2 * 16) + 16 + 11 * 16
    assert attention.flops_per_token(100) == 6 * matrices + 2 * 12 * 100 * 16


def test_initialisation():
    model = tiny("attention", d_model=64, num_blocks=8)
    std = (2 / (5 * 64)) ** 0.5
    for block in model.blocks:
        assert block.mlp.up.weight.std().item() == pytest.approx(std, rel=0.05)
        assert block.mlp.down.weight.std().item() == pytest.approx(std / 4, rel=0.05)
        assert block.mixer.out.weight.std().item() == pytest.approx(std / 4, rel=0.05)
    assert model.embedding.weight.std().item() == pytest.approx(std, rel=0.1)
    unit = tiny(d_model=64, embedding_std=1.0)
    assert unit.embedding.weight.std().item() == pytest.approx(1.0, rel=0.1)


def test_classes_other_than_tokens():
    assert tiny(num_classes=3)(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, 3)


@pytest.mark.parametrize("token", [11, -1])
def test_token_outside_the_vocabulary_is_an_error(token):
    with pytest.raises(ValueError, match=rf"input_ids .*{token}, .*0 to 10"):
        tiny()(torch.tensor([[1, token]]))


@pytest.mark.parametrize("shape", [(3, 0), (3,)])
def test_wrong_shape_is_an_error(shape):
    with pytest.raises(ValueError, match=r"\[B, T\] .*T > 0"):
        tiny()(torch.zeros(shape, dtype=torch.int64))


def test_wrong_number_of_states_is_an_error():
    with pytest.raises(ValueError, match=r"states .*1 "):
        tiny()(torch.zeros(1, 1, dtype=torch.int64), states=[()])


def test_mixer_state_that_is_not_a_tuple_is_an_error():
    class Bare(torch.nn.Linear):
        def __init__(self, d_model, **_):
            super().__init__(d_model, d_model)

        def forward(self, x, state=None, reset=None):
            return super().forward(x), x[:, -1]

    with pytest.raises(TypeError, match=r"Bare .*Tensor"):
        SequenceModel(11, Bare, d_model=16, num_blocks=1)(torch.zeros(1, 3, dtype=torch.int64))


def test_pattern_is_repeated_over_the_blocks():
    blocks = tiny("hybrid", num_blocks=5, pattern=["lstm", "lstm", "window"]).blocks
    assert [type(block.mixer) for block in blocks] == [RNNMixer, RNNMixer, AttentionMixer, RNNMixer, RNNMixer]
    assert [block.mixer.num_heads for block in blocks] == [4, 4, 2, 4, 4]  # the LSTM has its own number


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": ["lstm", "gru"]}, r"pattern=\['lstm', 'gru'\].* 'gru'.* lstm, window"),
        ({"pattern": []}, r"pattern=\[\] .*num_blocks=2"),
        ({"pattern": ["lstm"] * 3}, r"pattern=\['lstm', 'lstm', 'lstm'\] .*num_blocks=2"),
        ({"pattern": None}, "pattern=None.* lstm, window"),
        ({"pattern": "lstm"}, "pattern=lstm.* lstm, window"),
        ({"mixer": "lstm", "pattern": ["lstm"]}, "pattern"),
    ],
)
def test_invalid_pattern_is_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        tiny(**{"mixer": "hybrid", **options})


def test_mixer_must_be_callable():
    with pytest.raises(TypeError, match="mixer='lstm'"):
        SequenceModel(11, "lstm")


@pytest.mark.parametrize("name", ["vocab_size", "d_model", "num_blocks"])
def test_sizes_must_be_positive(name):
    with pytest.raises(ValueError, match=f"{name}=0 .*positive"):
        SequenceModel(**{"vocab_size": 11, "mixer": MIXERS["lstm"], "d_model": 16, name: 0})
