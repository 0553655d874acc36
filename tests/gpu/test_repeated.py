"""Repeated calls reuse the decisions of an earlier call, with the same results."""

import pytest
import torch

from flashrnn import FlashRNN, flashrnn, get_cell, repeated
from flashrnn.problem import Inputs

B, T, N, D = 4, 6, 2, 64


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr(repeated, "_CALLS", {})


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def inputs(dtype: torch.dtype = torch.bfloat16, **changes) -> dict:
    found = {"Wx": randn(B, T, 4, N, D, dtype=dtype), "R": randn(4, N, D, D, dtype=dtype) / 8}
    return found | {"b": randn(4, N, D, dtype=torch.float32)} | changes


CHANGES = {
    "nothing else": dict,
    "no bias": lambda: {"b": None},
    "states": lambda: {"states": randn(2, B, N, D, dtype=torch.float32)},
    "reset": lambda: {"reset": torch.arange(B * T, device="cuda").view(B, T) % 5 == 2},
    "time-major": lambda: {"Wx": randn(T, B, 4, N, D).transpose(0, 1)},
    "not dense": lambda: {"Wx": randn(B, T, 4, D, N).mT},
    "odd address": lambda: {"Wx": randn(B * T * 4 * N * D + 1)[1:].view(B, T, 4, N, D)},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_repeated_call_equals_the_first_one(changes):
    given = inputs(**changes())
    first = flashrnn(**given)
    for result, expected in zip(flashrnn(**given), first, strict=True):
        assert torch.equal(result, expected)


def test_wrong_call_is_still_an_error():
    given = inputs()
    for _ in range(2):
        flashrnn(**given)
    for _ in range(2):
        with pytest.raises(ValueError, match="R must be"):
            flashrnn(**given | {"R": given["R"][:, :1]})


def test_repeated_call_has_gradients():
    given = inputs()
    flashrnn(**given)
    given["Wx"].requires_grad_()
    h, _ = flashrnn(**given)
    assert h.requires_grad
    with torch.no_grad():
        assert torch.equal(flashrnn(**given)[0], h)


def test_change_of_the_tf32_setting_is_respected(monkeypatch):
    given = inputs(torch.float32)
    exact = [flashrnn(**given)[0] for _ in range(2)][1]
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    rounded = [flashrnn(**given)[0] for _ in range(2)]
    assert torch.equal(*rounded)
    assert not torch.equal(rounded[0], exact)


def test_repeated_call_skips_the_decisions(monkeypatch):
    given = inputs()
    flashrnn(**given)
    monkeypatch.setattr("flashrnn.functional._check", None)
    flashrnn(**given)
    assert repeated.key(get_cell("lstm"), "auto", Inputs(*given.values(), None, None)) in repeated._CALLS


@pytest.mark.parametrize("function", ["lstm", "gru"])
def test_steps_without_gradients_equal_the_sequence(function):
    network = FlashRNN(64, D, function=function, device="cuda", dtype=torch.bfloat16)
    x, states, steps = randn(T, B, 64), None, []
    with torch.no_grad():
        expected = network(x)
        for x_t in x:
            out, states = network.step(x_t, states)
            steps.append(out)
    torch.testing.assert_close((torch.stack(steps), states), expected, rtol=1e-2, atol=1e-2)
    for state in states if isinstance(states, tuple) else (states,):
        state[:, 0] = 0  # as at the end of an episode
