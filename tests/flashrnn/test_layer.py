import copy
import io
import pickle

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

from flashrnn import Cell, FlashRNN, Recurrence, dispatch, flashrnn, get_cell
from flashrnn.reference import Reference
from tests.problems import BUILT_IN, CELLS, PEEPHOLE_LSTM, cell_name, random_inputs, random_reset

DOUBLE = {"dtype": torch.float64}


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def as_tuple(states) -> tuple[torch.Tensor, ...]:
    return (states,) if isinstance(states, torch.Tensor) else states


def assert_equal(out, ref) -> None:
    torch.testing.assert_close(out, ref, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cell", CELLS, ids=cell_name)
def test_layer_equals_a_linear_and_the_function(cell):
    rnn = FlashRNN(5, 6, num_heads=2, function=cell, batch_first=True, **DOUBLE)
    x, S = randn(3, 4, 5), len(cell.states)
    states = 1 + randn(S, 1, 3, 6).abs()
    out, last = rnn(x, tuple(states))
    Wx = (x @ rnn.input_l0.weight.T).reshape(3, 4, -1, 2, 3)
    h, end = flashrnn(Wx, rnn.recurrent_l0.R, rnn.recurrent_l0.b, states.reshape(S, 3, 2, 3), cell)
    assert_equal(out, h.flatten(-2))
    assert_equal(torch.stack(as_tuple(last)), end.reshape(S, 1, 3, 6))
    assert isinstance(last, torch.Tensor) == (S == 1)


def test_recurrence_equals_the_function():
    module = Recurrence(6, num_heads=2, function="slstm", bias_init="standard", **DOUBLE)
    Wx, _, _, states = random_inputs(get_cell("slstm"), 3, 4, 2, 3)
    reset = random_reset(3, 4)
    found = module(Wx, states, reset, return_states=True)
    expected = flashrnn(Wx, module.R, module.b, states, "slstm", reset=reset, return_states=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("cell", CELLS, ids=cell_name)
@pytest.mark.parametrize("num_layers", [1, 2])
def test_steps_equal_the_whole_sequence(cell, num_layers):
    rnn = FlashRNN(5, 6, num_heads=3, function=cell, num_layers=num_layers, **DOUBLE)
    x, states = randn(7, 3, 5), None
    out, last = rnn(x)
    for t in range(7):
        step, states = rnn.step(x[t], states)
        assert_equal(step, out[t])
    for state, end in zip(as_tuple(states), as_tuple(last), strict=True):
        assert_equal(state, end)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sequence_continues_exactly_from_last_states_of_half_types(dtype):
    module = Recurrence(6, function="slstm", dtype=dtype)
    Wx = randn(2, 8, 4, 1, 6, dtype=dtype)
    h, last = module(Wx)
    first, between = module(Wx[:, :3])
    second, end = module(Wx[:, 3:], between)
    assert h.dtype == dtype
    assert last.dtype == torch.float32
    assert torch.equal(torch.cat([first, second], dim=1), h)
    assert torch.equal(end, last)


@pytest.mark.parametrize("function", ["lstm", "gru"])
@pytest.mark.parametrize("shape", [(5, 2, 3), (5, 3)])
def test_last_states_can_be_detached_in_place_and_saved_separately(function, shape):
    _, states = FlashRNN(3, 4, function=function)(torch.randn(shape))
    for state in states if isinstance(states, tuple) else (states,):
        state.detach_()
        assert state.untyped_storage().nbytes() == 4 * state.numel()


def test_bias_false_has_no_bias_parameters():
    rnn = FlashRNN(5, 6, bias=False, **DOUBLE)
    assert set(rnn.state_dict()) == {"input_l0.weight", "recurrent_l0.R"}
    assert rnn.recurrent_l0.b is None
    with torch.no_grad():
        zero = FlashRNN(5, 6, **DOUBLE)
        zero.load_state_dict(rnn.state_dict(), strict=False)
        zero.recurrent_l0.b.zero_()
    assert_equal(rnn(randn(4, 2, 5))[0], zero(randn(4, 2, 5))[0])


@pytest.mark.parametrize("assign", [False, True])
def test_layer_created_on_the_meta_device_can_load_weights(assign):
    rnn = FlashRNN(5, 6, bias=False)
    with torch.device("meta"):
        other = FlashRNN(5, 6, bias=False)
    if not assign:
        other.to_empty(device="cpu")
    other.load_state_dict(rnn.state_dict(), assign=assign)
    x = randn(4, 2, 5, dtype=torch.float32)
    assert torch.equal(other(x)[0], rnn(x)[0])


def test_dropout_with_a_single_layer_causes_a_warning():
    with pytest.warns(UserWarning, match=r"dropout=0\.5"):
        FlashRNN(5, 6, dropout=0.5)


def test_dropout_is_applied_between_layers_in_training_only():
    rnn = FlashRNN(5, 6, num_layers=2, dropout=1.0, **DOUBLE)
    x = randn(4, 2, 5)
    trained, evaluated = rnn(x)[0], rnn.eval()(x)[0]
    last = rnn.recurrent_l1
    alone, _ = flashrnn(torch.zeros(2, 4, 4, 1, 6, **DOUBLE), last.R, last.b)
    assert_equal(trained, alone.flatten(-2).transpose(0, 1))
    assert not torch.allclose(trained, evaluated)


@pytest.mark.parametrize("function", ["gru", "slstm"])
@pytest.mark.parametrize("bidirectional", [False, True], ids=["", "bidirectional"])
def test_reset_equals_documents_one_by_one(function, bidirectional):
    rnn = FlashRNN(5, 6, function=function, num_layers=2, bidirectional=bidirectional, batch_first=True, **DOUBLE)
    x, S = randn(1, 9, 5), len(rnn.cell.states)
    reset = torch.zeros(1, 9, dtype=torch.bool)
    reset[0, [4, 5, 8]] = True
    states = 1 + randn(S, 4 if bidirectional else 2, 1, 6).abs()
    forward, backward = states.clone(), states.clone()  # initial states of the first and of the last document
    backward[:, ::2] = 0
    if bidirectional:
        forward[:, 1::2] = 0
    else:
        backward[:] = 0
    documents = [(0, 4, forward), (4, 5, 0 * states), (5, 8, 0 * states), (8, 9, backward)]
    alone = torch.cat([rnn(x[:, a:b], s.unbind() if S > 1 else s[0])[0] for a, b, s in documents], dim=1)
    states = states.unbind() if S > 1 else states[0]
    assert_equal(rnn(x, states, reset)[0], alone)
    time_first = copy.deepcopy(rnn)
    time_first.batch_first = False
    assert_equal(time_first(x.transpose(0, 1), states, reset)[0], alone.transpose(0, 1))


@pytest.mark.parametrize("bidirectional", [False, True], ids=["", "bidirectional"])
def test_reset_mask_of_packed_sequences_is_cut_to_their_lengths(bidirectional):
    rnn = FlashRNN(5, 6, bidirectional=bidirectional, batch_first=True, **DOUBLE)
    sequences, states = [randn(3, 5), randn(6, 5)], (randn(1 + bidirectional, 2, 6), randn(1 + bidirectional, 2, 6))
    reset = torch.tensor([[False, True, False, True, True, True], [False, False, False, False, True, False]])
    packed, last = rnn(pack_sequence(sequences, enforce_sorted=False), states, reset)
    out, _ = pad_packed_sequence(packed, batch_first=True)
    for b, x in enumerate(sequences):
        alone, end = rnn(x[None], tuple(s[:, b : b + 1] for s in states), reset[b : b + 1, : len(x)])
        assert_equal(out[b : b + 1, : len(x)], alone)
        assert_equal(last[1][:, b : b + 1], end[1])


@pytest.mark.parametrize("bidirectional", [False, True], ids=["", "bidirectional"])
def test_gradients_of_packed_sequences_are_finite_if_states_grow(bidirectional):
    growing = Cell("growing", lambda g, h: h * h + g, states=("h",))
    rnn = FlashRNN(5, 6, function=growing, bidirectional=bidirectional, **DOUBLE)
    sequences = [2 + randn(1, 5).abs(), 0.01 * randn(60, 5)]
    with torch.no_grad():
        for linear, recurrent in zip(
            *([m for m in rnn.modules() if type(m) is kind] for kind in (torch.nn.Linear, Recurrence)), strict=True
        ):
            linear.weight.abs_().add_(0.1)
            recurrent.R.mul_(0.01)
            recurrent.b.zero_()
    out, last = rnn(pack_sequence(sequences, enforce_sorted=False))
    (out.data.sum() + last.sum()).backward()
    assert all(p.grad.isfinite().all() for p in rnn.parameters())


def test_hooks_run_for_packed_sequences():
    """Hooks of weight_norm, spectral_norm and pruning compute R before each call of its module."""
    torch.manual_seed(0)
    rnn = FlashRNN(4, 6, num_heads=2, batch_first=True)
    torch.nn.utils.weight_norm(rnn.recurrent_l0, "R")
    with torch.no_grad():
        rnn.recurrent_l0.R_g.mul_(2)
    x = torch.randn(2, 5, 4)
    packed, _ = rnn(pack_padded_sequence(x, [5, 5], batch_first=True))
    assert torch.equal(pad_packed_sequence(packed, batch_first=True)[0], rnn(x)[0])


def test_packed_sequences_of_equal_length_keep_their_order():
    lengths = [3, 5, 3, 5, 3, 1, 3] * 4
    x = pack_padded_sequence(randn(5, 28, 5), lengths, enforce_sorted=False)
    out, _ = FlashRNN(5, 6, **DOUBLE)(x)
    theirs, _ = torch.nn.LSTM(5, 6, **DOUBLE)(x)
    assert torch.equal(out.sorted_indices, theirs.sorted_indices)
    assert torch.equal(out.unsorted_indices, theirs.unsorted_indices)


@pytest.mark.parametrize("is_sorted", [False, True], ids=["unsorted", "sorted"])
def test_packed_output_has_the_order_of_the_input(is_sorted):
    lengths = [5, 4, 2] if is_sorted else [2, 5, 4]
    x = pack_padded_sequence(randn(5, 3, 4), lengths, enforce_sorted=is_sorted)
    out, _ = FlashRNN(4, 6, **DOUBLE)(x)
    assert isinstance(out, PackedSequence)
    assert torch.equal(out.batch_sizes, x.batch_sizes)
    if is_sorted:
        assert out.sorted_indices is out.unsorted_indices is None
    else:
        assert torch.equal(out.sorted_indices, x.sorted_indices)
        assert torch.equal(out.unsorted_indices, x.unsorted_indices)


@pytest.mark.parametrize("cell", CELLS, ids=cell_name)
def test_copies_and_pickles_equal_the_layer(cell):
    rnn = FlashRNN(5, 6, num_heads=2, function=cell)
    x = randn(4, 2, 5, dtype=torch.float32)
    saved = io.BytesIO()
    torch.save(rnn, saved)
    saved.seek(0)
    for other in (copy.deepcopy(rnn), pickle.loads(pickle.dumps(rnn)), torch.load(saved, weights_only=False)):
        assert torch.equal(other(x)[0], rnn(x)[0])


def test_state_dict_does_not_depend_on_the_backend(monkeypatch):
    class Other(Reference):
        name = "other"

    monkeypatch.setattr(dispatch, "BACKENDS", (Other(), Reference()))
    options = {"num_layers": 2, "bidirectional": True, "function": "gru"}
    state_dicts = [FlashRNN(5, 6, backend=backend, **options).state_dict() for backend in ("auto", "other", "vanilla")]
    suffixes = ("l0", "l0_reverse", "l1", "l1_reverse")
    names = [f"{name}_{suffix}" for suffix in suffixes for name in ("input", "recurrent")]
    keys = [f"{n}.{p}" for n in names for p in (("weight",) if n.startswith("input") else ("R", "b"))]
    assert [list(state_dict) for state_dict in state_dicts] == [keys] * 3
    assert list(state_dicts[0]["recurrent_l0.R"].shape) == [3, 1, 6, 6]
    assert list(state_dicts[0]["recurrent_l0.b"].shape) == [4, 1, 6]


@pytest.mark.parametrize("cell", BUILT_IN, ids=cell_name)
def test_meta_device(cell):
    with torch.device("meta"):
        rnn = FlashRNN(5, 6, num_layers=2, function=cell, bidirectional=True, bias_init="zeros")
        out, states = rnn(torch.empty(7, 3, 5))
    assert {p.device.type for p in rnn.parameters()} == {"meta"}
    assert out.shape == (7, 3, 12)
    assert [list(s.shape) for s in as_tuple(states)] == [[4, 3, 6]] * len(cell.states)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 4}, "hidden_size=6 .*num_heads=4"),
        ({"num_heads": 0}, "num_heads .*1, got 0"),
        ({"input_size": 0}, "input_size .*1, got 0"),
        ({"hidden_size": -6}, "hidden_size .*1, got -6"),
        ({"num_layers": 0}, "num_layers .*1, got 0"),
        ({"hidden_size": 6.0}, r"hidden_size .*integer, got 6\.0"),
        ({"num_heads": 2.0}, r"num_heads .*integer, got 2\.0"),
        ({"dropout": 1.5}, r"dropout .*1\.5"),
        ({"function": "lstn"}, "'lstn'.* elman, elman_relu, gru"),
        ({"backend": "cudnn"}, "'cudnn'.* auto, "),
    ],
)
def test_wrong_options_are_an_error(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        FlashRNN(**{"input_size": 5, "hidden_size": 6} | options)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        ([[0.0] * 5], TypeError, "^input .*PackedSequence, got list"),
        (torch.zeros(4, 2, 6), ValueError, r"^input .*2-D or 3-D .*5 .*\[4, 2, 6\]"),
        (torch.zeros(1, 4, 2, 5), ValueError, r"^input .*2-D or 3-D .*5 .*\[1, 4, 2, 5\]"),
        (torch.zeros(0, 2, 5), ValueError, r"^input .*at least one time step.*\[0, 2, 5\]"),
        (torch.zeros(4, 2, 5).long(), TypeError, r"^input .*floating-point.*torch\.int64"),
        (torch.zeros(4, 2, 5).to("meta"), ValueError, "^input .*meta.* cpu"),
        (
            torch.zeros(4, 2, 5).double(),
            TypeError,
            r"^input .*torch\.float64.*input\.to\(torch\.float32\)",
        ),
        (pack_sequence([torch.zeros(3, 6)]), ValueError, r"^input .*2-D .*5 .*\[3, 6\]"),
    ],
)
def test_wrong_input_is_an_error(x, error, message):
    with pytest.raises(error, match=message):
        FlashRNN(5, 6)(x)


@pytest.mark.parametrize("x", [torch.zeros(2, 0, 5), torch.zeros(0, 5)])
def test_sequence_without_steps_is_an_error(x):
    with pytest.raises(ValueError, match=r"^input .*at least one time step"):
        FlashRNN(5, 6, batch_first=True, bidirectional=True)(x)


def test_keyword_arguments_equal_nn_lstm():
    rnn, x, states = FlashRNN(5, 6), torch.randn(4, 2, 5), (torch.randn(1, 2, 6), torch.randn(1, 2, 6))
    out, _ = rnn(x, states)
    assert torch.equal(rnn(input=x, hx=states)[0], out)
    torch.testing.assert_close(rnn.step(input=x[0], hx=states)[0], out[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_autocast_accepts_input_of_another_dtype(dtype):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = FlashRNN(5, 6)(torch.zeros(4, 2, 5, dtype=dtype))
        with pytest.raises(TypeError, match=r"input is torch\.float64"):
            FlashRNN(5, 6)(torch.zeros(4, 2, 5).double())
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("states", "got"),
    [
        (torch.zeros(1, 2, 6), r"\[\[1, 2, 6\]\]"),
        ((torch.zeros(1, 2, 6),) * 3, r"\[\[1, 2, 6\], \[1, 2, 6\], \[1, 2, 6\]\]"),
        ((torch.zeros(1, 3, 6), torch.zeros(1, 3, 6)), r"\[\[1, 3, 6\], \[1, 3, 6\]\]"),
        ((torch.zeros(2, 2, 6), torch.zeros(2, 2, 6)), r"\[\[2, 2, 6\], \[2, 2, 6\]\]"),
        ((torch.zeros(1, 2, 6), None), r"\[\[1, 2, 6\], None\]"),
    ],
    ids=["one", "three", "batch", "layers", "None"],
)
def test_wrong_states_are_an_error(states, got):
    message = r"\('h', 'c'\) .*\[1, 2, 6\], got " + got
    with pytest.raises(ValueError, match=message):
        FlashRNN(5, 6)(torch.zeros(4, 2, 5), states)
    with pytest.raises(ValueError, match=message):
        FlashRNN(5, 6).step(torch.zeros(2, 5), states)


@pytest.mark.parametrize("states", [5, (None, None), torch.zeros(1, 2, 6)], ids=["number", "None", "one, batched"])
def test_wrong_states_without_a_batch_are_an_error(states):
    with pytest.raises(ValueError, match=r"\('h', 'c'\) of shape \[1, 6\]"):
        FlashRNN(5, 6)(torch.zeros(4, 5), states)


def test_states_can_be_changed_in_place():
    rnn = FlashRNN(5, 6, **DOUBLE)
    _, states = rnn(randn(4, 2, 5))
    for state in states:
        state[:, 1] = 0
    out, _ = rnn(randn(4, 2, 5), states)
    out.sum().backward()
    assert rnn.recurrent_l0.R.grad.isfinite().all()


@pytest.mark.parametrize("bidirectional", [False, True], ids=["", "bidirectional"])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_wrong_reset_is_an_error(bidirectional, packed):
    rnn = FlashRNN(5, 6, bidirectional=bidirectional)
    x = pack_sequence([torch.zeros(4, 5)] * 2) if packed else torch.zeros(4, 2, 5)
    with pytest.raises(ValueError, match=r"reset .*\[2, 4\], got \[4, 2\]"):
        rnn(x, reset=torch.zeros(4, 2, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"reset .*torch\.int64"):
        rnn(x, reset=torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"reset .*list"):
        rnn(x, reset=[[True] * 4] * 2)


def test_wrong_input_of_a_step_is_an_error():
    with pytest.raises(ValueError, match=r"input .*\[2, 1, 5\]"):
        FlashRNN(5, 6).step(torch.zeros(2, 1, 5))
    with pytest.raises(ValueError, match="bidirectional"):
        FlashRNN(5, 6, bidirectional=True).step(torch.zeros(2, 5))


def test_representation_contains_the_options():
    text = repr(FlashRNN(5, 6, num_heads=2, function=PEEPHOLE_LSTM, bidirectional=True, batch_first=True))
    assert "5, 6, num_layers=1, batch_first=True, dropout=0.0, bidirectional=True" in text
    assert "6, num_heads=2, function='peephole_lstm', backend='auto'" in text


def test_cells_of_the_same_name_are_independent():
    """A notebook may define a cell twice with the same name."""
    first, second = (Cell("mine", step, ("h",)) for step in (lambda g, h: torch.tanh(g), lambda g, h: g - h))
    torch.manual_seed(0)
    a, b = FlashRNN(5, 6, function=first), FlashRNN(5, 6, function=second)
    b.load_state_dict(a.state_dict())
    x = randn(4, 2, 5, dtype=torch.float32)
    a(x)[0].sum().backward()
    b(x)[0].sum().backward()
    assert not torch.allclose(a(x)[0], b(x)[0])
    assert not torch.allclose(a.recurrent_l0.b.grad, b.recurrent_l0.b.grad)
