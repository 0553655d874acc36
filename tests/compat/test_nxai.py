"""Calls of FlashRNN 1.0.8: values compared with plain time loops, layouts, dtypes, errors."""

from itertools import combinations

import pytest
import torch
from torch.nn.functional import logsigmoid

from flashrnn import UnsupportedProblem, flashrnn
from flashrnn.compat import nxai
from tests.compat.problem import AXES, OTHERS, permuted, random_call, results
from tests.tolerances import assert_close

FUNCTIONS = ("lstm", "slstm", "gru", "elman")


def lstm(x, r, b, h, c):
    i, f, z, o = (x + r + b).unbind(1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(z)
    return torch.sigmoid(o) * torch.tanh(c), c


def slstm(x, r, b, h, c, n, m):
    i, f, z, o = (x + r + b).unbind(1)
    before = m + logsigmoid(f)
    m = i if (n == 0).all() else torch.maximum(i, before)
    i, f = torch.exp(i - m), torch.exp(before - m)
    c, n = f * c + i * torch.tanh(z), (f * n + i).clamp(min=1)
    return torch.sigmoid(o) * c / n, c, n, m


def gru(x, r, b, h):
    (g, r, z), (x_r, x_z, x_n) = (r + b[:3]).unbind(1), x.unbind(1)
    r, z = torch.sigmoid(x_r + r), torch.sigmoid(x_z + z)
    return (z * h + (1 - z) * torch.tanh(x_n + b[3] + r * g),)


def elman(x, r, b, h):
    return (torch.tanh((x + r + b).squeeze(1)),)


STEPS = {"lstm": lstm, "slstm": slstm, "gru": gru, "elman": elman}


def time_loop(Wx, R, b, states, function):
    state, count = states, nxai.FlashRNNConfig(function=function).num_states
    state = Wx.new_zeros(count, len(Wx), *Wx.shape[3:]).unbind() if states is None else states.squeeze(2).unbind()
    steps = []
    for x in Wx.unbind(1):
        state = STEPS[function](x, torch.einsum("gndp,bnp->bgnd", R, state[0]), b, *state)
        steps.append(torch.stack(state))
    return torch.stack(steps, dim=2), steps[-1].unsqueeze(2)


@pytest.mark.parametrize(("T", "initial"), [(1, False), (7, True)], ids=["from zero", "from states"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_states_and_gradients_equal_a_plain_loop(function, T, initial):
    call = random_call(function, torch.float64, T, initial)
    expected = results(time_loop, call, function=function)
    assert_close(results(nxai.flashrnn, call, function=function), expected, torch.float64)


@pytest.mark.parametrize("layouts", OTHERS, ids=lambda layouts: "-".join(layouts.values()))
@pytest.mark.parametrize("function", FUNCTIONS)
def test_layouts(function, layouts):
    call = random_call(function, torch.float64)
    config = nxai.FlashRNNConfig(function=function, dtype="float64", **layouts)
    outputs = nxai.flashrnn(*call.permuted(layouts), config=config)
    for out, expected in zip(outputs, nxai.flashrnn(*call, function=function), strict=True):
        torch.testing.assert_close(permuted(out, layouts["output_shape"], AXES["output_shape"]), expected)


def test_continuing_from_the_last_states_equals_the_whole_sequence():
    Wx, R, b, states = random_call("slstm", torch.float64)
    every, last = nxai.flashrnn(Wx, R, b, states, function="slstm")
    begun, state = nxai.flashrnn(Wx[:, :3], R, b, states, function="slstm")
    rest, end = nxai.flashrnn(Wx[:, 3:], R, b, state, function="slstm")
    torch.testing.assert_close(torch.cat([begun, rest], dim=2), every)
    torch.testing.assert_close(end, last)


@pytest.mark.parametrize("given", list(combinations(("hidden_dim", "num_heads", "head_dim"), 2)), ids=" ".join)
def test_third_size_follows_from_two(given):
    sizes = {"hidden_dim": 48, "num_heads": 3, "head_dim": 16}
    config = nxai.FlashRNNConfig(**{name: sizes[name] for name in given})
    assert {name: getattr(config, name) for name in sizes} == sizes
    assert config.input_dim == 4 * 48


@pytest.mark.parametrize("value", [0.5, [0.5, -1.0]], ids=["one for all", "one for each state"])
def test_initial_val_sets_the_initial_states(value):
    Wx, R, b, states = random_call("lstm", torch.float64)
    states = torch.tensor(value).expand(2)[:, None, None, None, None].expand_as(states).double()
    config = nxai.FlashRNNConfig(dtype="float64", initial_val=value)
    torch.testing.assert_close(nxai.flashrnn(Wx, R, b, config=config), nxai.flashrnn(Wx, R, b, states))


def test_outputs_have_the_dtype_of_the_inputs():
    call = random_call("lstm", torch.bfloat16)
    assert [x.dtype for x in nxai.flashrnn(*call)] == [torch.bfloat16] * 2
    single = [x.float() for x in call]
    assert [x.dtype for x in nxai.flashrnn(*single)] == [torch.float32] * 2
    assert [x.dtype for x in nxai.flashrnn(*single, dtype="bfloat16")] == [torch.float32] * 2
    torch.testing.assert_close(
        nxai.flashrnn(*single, dtype="bfloat16")[0], nxai.flashrnn(*call)[0].float(), atol=2e-2, rtol=0
    )


def test_configuration_sets_the_dtypes():
    call = random_call("lstm", torch.float32)
    assert nxai.flashrnn(*call, config=nxai.FlashRNNConfig())[0].dtype == torch.bfloat16
    assert nxai.flashrnn(*call, config=nxai.FlashRNNConfig(dtype_s="float32"))[0].dtype == torch.float32
    alone = nxai.flashrnn(*call, config=nxai.FlashRNNConfig(backend="vanilla"))  # dtypes of the tensors
    torch.testing.assert_close(alone, nxai.flashrnn(*call, backend="vanilla"), rtol=0, atol=0)


def test_half_type_states_are_rounded_results_of_flashrnn():
    Wx, R, b, states = random_call("lstm", torch.float16)
    every, last = nxai.flashrnn(Wx, R, b, states)
    h, end, (_, c) = flashrnn(Wx, R, b, states.squeeze(2), return_states=True)
    torch.testing.assert_close(every, torch.stack([h, c.half()]), rtol=0, atol=0)
    torch.testing.assert_close(last.squeeze(2), end.half(), rtol=0, atol=0)


@pytest.mark.parametrize("function", ["lstm", "slstm"])
def test_vanilla_fwbw_is_our_vanilla(function):
    call = random_call(function, torch.float32)
    outputs = (nxai.flashrnn(*call, function=function, backend=name) for name in ("vanilla_fwbw", "vanilla"))
    torch.testing.assert_close(*outputs, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["cuda_fused", "cuda", "triton_fused"])
def test_names_of_kernels_are_those_of_our_backends(backend):
    with pytest.raises(UnsupportedProblem, match=f"'{backend}': "):
        nxai.flashrnn(*random_call("lstm", torch.float32), backend=backend)


@pytest.mark.parametrize(
    "field",
    [
        {"gradient_recurrent_cut": True},
        {"gradient_recurrent_clipval": 0.0},
        {"forward_clipval": 1.0},
        {"constants": {"FLASHRNN_STABILIZATION_EPSILON": 1e-6}},
    ],
    ids=lambda field: next(iter(field)),
)
def test_unsupported_options_that_change_results_are_an_error(field):
    with pytest.raises(NotImplementedError, match=rf"{next(iter(field))}="):
        nxai.FlashRNNConfig(**field)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"input_shape": "BTGND"}, "input_shape .*BTGHD.*'BTGND'"),
        ({"output_shape": "SBHD"}, "output_shape .*SBTHD.*'SBHD'"),
        ({"dtype": "float8"}, "bfloat16, float16, float32, float64.*'float8'"),
        ({"function": "mlstm"}, "'mlstm'"),
    ],
)
def test_invalid_configuration_is_an_error(field, message):
    with pytest.raises(ValueError, match=message):
        nxai.FlashRNNConfig(**field)


def test_tensors_in_another_layout_are_an_error():
    Wx, R, b, states = random_call("lstm", torch.float32)
    with pytest.raises(ValueError, match=r"Wx .*BTGHD, got \[3, 7, 40\]"):
        nxai.flashrnn(Wx.flatten(2), R, b)
    with pytest.raises(ValueError, match=r"states .*got 7"):
        nxai.flashrnn(Wx, R, b, states.expand(-1, -1, 7, -1, -1))
