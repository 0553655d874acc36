"""The kernel that chooses tokens, on the processor, compared with the operators of a sampler."""

import pytest
import torch

from flashrnn import decoding
from flashrnn.cuda.decoding import choose
from models.generation import sampler
from models.generation.sampler import Sampler, SamplingParams
from tests.cuda.host_kernel import HostKernel, compile_for_host

CLASSES = 300  # not a multiple of the number of threads


@pytest.fixture
def on_host(monkeypatch):
    """Let `choose` run on the processor, with small clusters."""

    def load_choose(classes, dtype, device):
        source = choose.prelude(choose.elements_for(classes), dtype)
        library = compile_for_host("flashrnn_choose", source, "decoding/kernels/choose.cuh")
        threads, shared = 32 * choose.WARPS, choose.shared_bytes()
        return HostKernel(library, choose.parameters(dtype), choose.RANKS, threads, shared).launch

    monkeypatch.setattr(choose, "RANKS", 2)
    monkeypatch.setattr(choose, "WARPS", 2)
    monkeypatch.setattr(decoding, "load_choose", load_choose)
    monkeypatch.setattr(sampler, "unsupported_choice", lambda logits: None)


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"top_k": 7}, torch.bfloat16),
        ({"top_p": 0.9, "repetition_penalty": 1.3}, torch.bfloat16),
        ({"sample": False, "repetition_penalty": 0.5}, torch.bfloat16),
        pytest.param({"min_p": 0.1, "temperature": 0.7}, torch.float32, marks=pytest.mark.slow),
        pytest.param({"top_k": 20, "top_p": 0.8, "temperature": 1.5}, torch.float16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tokens_equal_those_of_operators(on_host, settings, dtype):
    """All logits are different; they are rows of a larger tensor."""
    rows, params = 3, SamplingParams(**{"sample": True} | settings)
    kernel, operators = (Sampler(params, rows, CLASSES, torch.device("cpu")) for _ in range(2))
    for one in (kernel, operators):
        one.begin(range(rows), [[1, 5], [], [299]])
    generator = torch.Generator().manual_seed(0)
    history, cursor = torch.zeros(4, rows, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for step in range(2):
        # float16 and bfloat16 have at least 256 numbers in [0.5, 2), and as many below zero
        order = torch.stack([torch.randperm(CLASSES, generator=generator) for _ in range(rows)])
        logits = torch.zeros(rows, CLASSES + 5, dtype=dtype)[:, :CLASSES]
        logits.copy_((order - 200) / 64 if dtype != torch.bfloat16 else distinct()[order])
        tokens = torch.empty(rows, dtype=torch.int64)
        kernel.append(logits, tokens, history, cursor)
        assert torch.equal(tokens, operators(logits))
        assert torch.equal(history[step], tokens)
        assert cursor.item() == step + 1
        if params.sample:
            assert torch.equal(kernel.keys, operators.keys)
        if params.penalizes:
            assert torch.equal(kernel.seen, operators.seen)


def distinct() -> torch.Tensor:
    """Return CLASSES different numbers of bfloat16 in ascending order, some of them negative."""
    words = torch.arange(CLASSES // 2, dtype=torch.int16)
    positive = (words + 0x3F00).view(torch.bfloat16)
    return torch.cat((-positive.flip(0), positive))


def test_top_k_treats_equal_logits_alike(on_host):
    """All classes with the logit of the k-th likeliest one may be drawn; operators would keep only some of them."""
    params, rows = SamplingParams(sample=True, top_k=2), 20
    kernel = Sampler(params, rows, CLASSES, torch.device("cpu"))
    kernel.begin(range(rows), None)
    logits = torch.zeros(rows, CLASSES, dtype=torch.bfloat16)
    logits[:, 10:14] = 1
    tokens, cursor = torch.empty(rows, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    kernel.append(logits, tokens, torch.zeros(1, rows, dtype=torch.int64), cursor)
    assert tokens.unique().tolist() == [10, 11, 12, 13]
