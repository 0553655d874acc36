"""Prompts read in pieces, tested with functions in place of CUDA graphs and streams."""

import copy
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from models import fused_blocks
from models.generation import prompt_reader
from models.generation.prompt_reader import PromptReader
from models.hugging_face import FlashRNNConfig, FlashRNNForCausalLM
from models.walk import modules


def by_definition(x, update, weight, head_weight, head_dim):
    """Compute the result of `flashrnn.decoding.add_norm` by PyTorch."""
    if head_weight is not None:
        update = F.layer_norm(update.view(*x.shape[:-1], -1, head_dim), (head_dim,)).view(x.shape) * head_weight
    x += update.view(x.shape)
    return F.layer_norm(x, x.shape[-1:], weight)


@pytest.fixture
def captured_sizes(monkeypatch):
    """Let a PromptReader run on the processor; return a list of the sizes of captured pieces."""
    sizes = []

    def capture(self, model, plain, size, padded):
        sizes.append((size, padded))
        return SimpleNamespace(replay=partial(self._read_piece, model, plain, size, padded))

    stream = SimpleNamespace(device=torch.device("cpu"), wait_stream=lambda _: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(prompt_reader, "on_side_stream", lambda _: nullcontext(stream))
    monkeypatch.setattr(prompt_reader, "_DEVICE", "cpu")
    monkeypatch.setattr(prompt_reader, "_SIZES", (8, 4, 2))
    monkeypatch.setattr(PromptReader, "_capture", capture)
    monkeypatch.setattr(fused_blocks, "add_norm", by_definition)
    monkeypatch.setattr(
        fused_blocks, "served", lambda model, found=None: fused_blocks.plain_blocks(model, found or modules(model))
    )
    return sizes


def build(function="lstm"):
    torch.manual_seed(0)
    mixer = {"name": "RNNMixer", "function": function}
    config = FlashRNNConfig(vocab_size=29, d_model=16, num_blocks=2, num_heads=2, mixer=mixer)
    return FlashRNNForCausalLM(config).double().eval()


@pytest.mark.parametrize("function", ["lstm", "gru"])
@torch.no_grad()
def test_prompts_in_pieces_equal_whole_prompts(captured_sizes, function):
    model, reader = build(function).model, PromptReader()
    for length in (21, 8, 7, 30, 2, 9):
        ids = torch.randint(29, (1, length))
        found, states = reader.read(model, ids, None, None)
        expected, of_expected = model.hidden_states(ids, None, None)
        torch.testing.assert_close(found, model.head(expected[:, -1]))
        torch.testing.assert_close(states, of_expected)
        more = torch.randint(29, (1, 12))
        found, _ = reader.read(model, more, states, None)
        expected, _ = model.hidden_states(more, of_expected, None)
        torch.testing.assert_close(found, model.head(expected[:, -1]))
        torch.testing.assert_close(states, of_expected)  # later prompts do not change them
    assert sorted(captured_sizes) == [(2, False), (4, False), (8, False), (8, True)]


@torch.no_grad()
def test_graphs_are_captured_again_for_new_weights(captured_sizes):
    model, reader, ids = build().model, PromptReader(), torch.randint(29, (1, 8))
    for _ in range(3):
        reader.read(model, ids, None, None)
    assert captured_sizes == [(8, False)]
    model.head.weight = torch.nn.Parameter(torch.randn_like(model.head.weight))
    for _ in range(3):
        found, _ = reader.read(model, ids, None, None)
        torch.testing.assert_close(found, model(ids)[:, -1])
    assert captured_sizes == [(8, False)] * 2
    assert not copy.deepcopy(reader)._graphs


@torch.no_grad()
def test_failed_capture_falls_back_with_a_warning(captured_sizes, monkeypatch):
    model, reader, ids = build().model, PromptReader(), torch.randint(29, (1, 8))

    def capture(*_):
        tried.append(1)
        raise RuntimeError("no such thing\nat all")

    tried = []
    monkeypatch.setattr(PromptReader, "_capture", capture)
    reader.read(model, ids, None, None)
    with pytest.warns(UserWarning, match=r"^reading a prompt runs without a CUDA graph, .*: no such thing$"):
        found, _ = reader.read(model, ids, None, None)
    torch.testing.assert_close(found, model(ids)[:, -1])
    reader.read(model, ids, None, None)
    assert len(tried) == 1


@torch.no_grad()
def test_out_of_memory_during_capture_is_an_error(captured_sizes, monkeypatch):
    def capture(*_):
        raise torch.OutOfMemoryError

    model, reader, ids = build().model, PromptReader(), torch.randint(29, (1, 8))
    monkeypatch.setattr(PromptReader, "_capture", capture)
    reader.read(model, ids, None, None)
    with pytest.raises(torch.OutOfMemoryError):
        reader.read(model, ids, None, None)


@torch.no_grad()
def test_unsupported_prompts_are_read_by_the_model(captured_sizes):
    model, reader = build().model, PromptReader()
    ids = torch.randint(29, (2, 8))
    assert reader.begin(model, ids) is None
    torch.testing.assert_close(reader.read(model, ids, None, None), model.read(ids))
    _, states = model.read(ids[:1])
    assert reader.begin(model, ids[:1, :1], states) is None
    ids, reset = torch.randint(29, (1, 8)), torch.zeros(1, 8, dtype=torch.bool)
    reset[0, 3] = True
    torch.testing.assert_close(reader.read(model, ids, None, reset), model.read(ids, reset=reset))


class TestGenerate:
    """`generate` starts reading the prompt early if possible, with the same text."""

    @pytest.fixture
    def model(self, captured_sizes, monkeypatch):
        model = build()
        model.generation_config.eos_token_id = None
        self.begun = []
        begin = PromptReader.begin

        def begin_and_count(reader, of, ids, states=None):
            self.begun.append(ids)
            return begin(reader, of, ids, states)

        monkeypatch.setattr(PromptReader, "begin", begin_and_count)
        monkeypatch.setattr(type(model._decoder_cache), "is_empty", False)
        return model

    def expected(self, model, ids, **options):
        hook = model.model.register_forward_hook(lambda *_: None)  # a Decoder does not support hooks
        found = model.generate(ids, do_sample=False, max_new_tokens=6, **options)
        hook.remove()
        return found

    @pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"attention_mask": None}, {"pad_token_id": 0}])
    def test_text_equals_transformers(self, model, options):
        ids = torch.randint(1, 29, (1, 11))
        for _ in range(3):
            assert torch.equal(
                model.generate(ids, do_sample=False, max_new_tokens=6, **options), self.expected(model, ids, **options)
            )
        assert model._ahead is None

    def test_prompt_is_read_once(self, model):
        ids = torch.randint(1, 29, (1, 11))
        model.generate(ids, do_sample=False, max_new_tokens=6, attention_mask=torch.ones_like(ids))
        assert len(self.begun) == 1

    def test_padding_found_by_transformers_is_respected(self, model):
        ids = torch.randint(1, 29, (1, 11))
        ids[0, :4] = 0
        found = model.generate(ids, do_sample=False, max_new_tokens=6, pad_token_id=0)
        alone = self.expected(model, ids[:, 4:], pad_token_id=0)
        assert torch.equal(found[:, 11:], alone[:, 7:])

    def test_generation_continues_from_a_cache(self, model):
        ids = torch.randint(1, 29, (1, 11))
        options = {"do_sample": False, "max_new_tokens": 6, "return_dict_in_generate": True}
        first = model.generate(ids, **options)
        longer = torch.cat((first.sequences, torch.randint(1, 29, (1, 9))), dim=1)
        found = model.generate(longer, past_key_values=first.past_key_values, **options)
        assert torch.equal(found.sequences, self.expected(model, longer))
