"""The kernel that chooses tokens, compared with the operators of a sampler."""

import pytest
import torch

from flashrnn.decoding import unsupported_choice
from models.generation.sampler import Sampler, SamplingParams


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 50},
        {"top_p": 0.9, "temperature": 0.7},
        {"top_k": 200, "top_p": 0.8, "min_p": 0.01, "temperature": 1.5},
        {"min_p": 0.05, "repetition_penalty": 1.2},
        {"sample": False, "repetition_penalty": 1.2},
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize("classes", [1000, 50257, 130_000])
def test_tokens_equal_those_of_operators(settings, classes):
    rows, device, params = 40, torch.device("cuda"), SamplingParams(**{"sample": True} | settings)
    kernel, operators = (Sampler(params, rows, classes, device) for _ in range(2))
    for one in (kernel, operators):
        one.begin(range(rows), [[row, 2 * row + 1] for row in range(rows)])
    generator = torch.Generator(device).manual_seed(0)
    history = torch.zeros(4, rows, dtype=torch.int64, device=device)
    cursor, tokens = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros_like(history[0])
    for step in range(4):
        logits = 3 * torch.randn(rows, classes, device=device, generator=generator)
        assert unsupported_choice(logits) is None
        kernel.append(logits, tokens, history, cursor)
        assert torch.equal(tokens, operators(logits))
        assert torch.equal(history[step], tokens)
    assert cursor.item() == 4


def test_drawn_classes_have_the_probabilities_of_the_logits():
    """Many logits in bfloat16 are equal. Checks the chi-squared statistic of 20,000 draws."""
    rows, classes, params = 20_000, 300, SamplingParams(sample=True, temperature=0.8)
    sampler = Sampler(params, rows, classes, torch.device("cuda"))
    sampler.begin(range(rows), None)
    logits = torch.randn(classes, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
    tokens, cursor = (
        torch.zeros(rows, dtype=torch.int64, device="cuda"),
        torch.zeros(1, dtype=torch.int64, device="cuda"),
    )
    sampler.append(logits.expand(rows, -1), tokens, tokens[None].clone(), cursor)
    expected = rows * (logits.double() / 0.8).softmax(0)
    found = tokens.bincount(minlength=classes)
    assert ((found - expected) ** 2 / expected).sum() < classes + 4 * (2 * classes) ** 0.5
