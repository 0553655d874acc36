"""Generation by a `Decoder`: the same tokens as transformers' loop, and the distribution of drawn tokens."""

import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import BaseStreamer

from models.backbone import SequenceModel
from models.generation import decoder, row_random
from models.generation.continuous_batching import Prompt, StopConditions, answers
from models.generation.decoder import Decoder
from models.generation.sampler import Sampler, SamplingParams
from models.mixers import RNNMixer
from tests.models import test_hugging_face
from tests.models.test_hugging_face import MIXERS, VOCABULARY, tokens

LSTM = MIXERS["lstm"]


def build(mixer):
    """Return a model whose greedy texts do not end with repetitions of one token."""
    model = test_hugging_face.build(mixer)
    torch.manual_seed(7)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return model


@pytest.fixture(params=MIXERS)
def model(request):
    return build(MIXERS[request.param])


def by_transformers(model, ids, **options):
    """Return the text of transformers' own loop; a hook keeps `generate` from using a Decoder."""
    hook = model.model.register_forward_hook(lambda *_: None)
    try:
        return model.generate(ids, **options)
    finally:
        hook.remove()


@pytest.fixture
def decoders(monkeypatch):
    """Return a list of the created Decoders."""
    made = []
    init = Decoder.__init__
    monkeypatch.setattr(Decoder, "__init__", lambda self, *args: (made.append(self), init(self, *args))[1])
    return made


class TestGreedyTokens:
    def test_equal_transformers(self, model, decoders):
        ids = tokens(3, 5)
        options = {"max_new_tokens": 20, "do_sample": False}
        expected = by_transformers(model, ids, **options)
        assert not decoders
        assert torch.equal(model.generate(ids, **options), expected)
        assert decoders

    def test_after_padding(self, model):
        ids, mask = tokens(3, 9), torch.ones(3, 9, dtype=torch.int64)
        mask[0, :4] = mask[2, :7] = 0
        options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
        assert torch.equal(model.generate(ids, **options), by_transformers(model, ids, **options))

    @pytest.mark.parametrize("penalty", [0.7, 1.5])
    def test_with_a_penalty(self, penalty):
        model, ids = build(LSTM), tokens(3, 5)
        mask = torch.ones_like(ids)
        mask[1, :2] = 0
        options = {"max_new_tokens": 12, "do_sample": False, "repetition_penalty": penalty, "attention_mask": mask}
        assert torch.equal(model.generate(ids, **options), by_transformers(model, ids, **options))

    def test_with_a_penalty_that_ignores_part_of_the_prompt(self):
        model, ids = build(LSTM), tokens(3, 5)
        penalty = RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=3)
        options = {"max_new_tokens": 12, "do_sample": False, "logits_processor": LogitsProcessorList([penalty])}
        assert torch.equal(model.generate(ids, **options), by_transformers(model, ids, **options))

    def test_are_the_same_with_asynchronous_reads(self, model, monkeypatch):
        """As on a GPU, where the host reads tokens while the next ones are computed."""
        ids = tokens(2, 5)
        options = {"max_new_tokens": 21, "do_sample": False, "eos_token_id": [3, 4], "pad_token_id": 0}
        expected = model.generate(ids, **options)
        monkeypatch.setattr(Decoder, "synchronous", False)
        assert torch.equal(model.generate(ids, **options), expected)

    def test_are_the_likeliest_in_bfloat16(self):
        model = build(LSTM).bfloat16()
        found = model.generate(tokens(2, 5), max_new_tokens=10, do_sample=False)
        logits = model(found[:, :-1]).logits[:, 4:].float()
        chosen = logits.gather(2, found[:, 5:, None])[..., 0]
        assert (chosen >= logits.amax(-1) - 0.05 * logits.abs().amax(-1)).all()


class TestEndOfGeneration:
    OPTIONS = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}  # noqa: RUF012

    def test_at_the_end_of_text(self):
        model, ids = build(LSTM), tokens(4, 5)
        options = self.OPTIONS | {"eos_token_id": [5, 6, 7]}
        expected = by_transformers(model, ids, **options)
        assert expected.shape[1] < 35
        assert torch.equal(model.generate(ids, **options), expected)

    def test_at_a_stopping_criterion(self):
        class ThirdOfAKind(StoppingCriteria):
            def __call__(self, input_ids, scores, **_):
                return (input_ids[:, -1:] == input_ids).sum(1) > 2

        model, ids = build(LSTM), tokens(4, 5)
        options = self.OPTIONS | {"stopping_criteria": StoppingCriteriaList([ThirdOfAKind()])}
        expected = by_transformers(model, ids, **options)
        assert expected.shape[1] < 35
        assert torch.equal(model.generate(ids, **options), expected)

    def test_streamer_receives_every_token(self):
        class Kept(BaseStreamer):
            def __init__(self):
                self.tokens, self.ended = [], False

            def put(self, value):
                self.tokens += value.flatten().tolist()

            def end(self):
                self.ended = True

        model, streamer = build(LSTM), Kept()
        found = model.generate(tokens(1, 5), streamer=streamer, **self.OPTIONS)
        assert streamer.tokens == found[0].tolist()
        assert streamer.ended

    def test_cache_contains_all_but_the_last_token(self, model):
        ids = tokens(1, 5)
        options = self.OPTIONS | {"return_dict_in_generate": True, "eos_token_id": [5, 6, 7]}
        found, expected = model.generate(ids, **options), by_transformers(model, ids, **options)
        assert torch.equal(found.sequences, expected.sequences)
        assert found.past_key_values.length == expected.past_key_values.length == found.sequences.shape[1] - 1
        for ours, theirs in zip(found.past_key_values.states, expected.past_key_values.states, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


class TestFallbackToTransformers:
    @pytest.mark.parametrize(
        "options",
        [
            {"num_beams": 2},
            {"do_sample": True, "typical_p": 0.9},
            {"no_repeat_ngram_size": 2},
            {"output_scores": True, "return_dict_in_generate": True},
            {"use_cache": False},
        ],
        ids=lambda options: next(iter(options)),
    )
    def test_options_that_a_decoder_does_not_support(self, options, decoders):
        model = build(LSTM)
        assert model.generate(tokens(2, 5), **{"max_new_tokens": 4, "do_sample": False, **options}) is not None
        assert not decoders

    def test_mixer_without_a_step(self, decoders, monkeypatch):
        model, ids = build(LSTM), tokens(2, 5)
        expected = model.generate(ids, max_new_tokens=4, do_sample=False)
        decoders.clear()
        monkeypatch.delattr(RNNMixer, "step")
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)
        assert not decoders


DRAWS = 20_000


def drawn(params, logits, rows=DRAWS):
    """Return how often each token is drawn, in rows of different prompts."""
    sampler = Sampler(params, rows, len(logits), torch.device("cpu"))
    sampler.begin(row_random.keys(0, [[row] for row in range(rows)]), [[]] * rows)
    return sampler(logits.expand(rows, -1)).bincount(minlength=len(logits))


def expected_probabilities(params, logits):
    """Return the probabilities by transformers' logits processors."""
    config = GenerationConfig(
        do_sample=True,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p or None,
    )
    processors = build(LSTM)._get_logits_processor(config, device="cpu")
    return processors(torch.zeros(1, 1, dtype=torch.int64), logits[None].clone())[0].softmax(-1)


def assert_distributed(counts, probabilities):
    """Check Pearson's chi-squared statistic; its mean is the number of cells minus one, its variance twice that."""
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = counts.sum() * probabilities[possible]
    statistic = ((counts[possible] - expected) ** 2 / expected).sum().item()
    freedom = int(possible.sum()) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


class TestSampling:
    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"temperature": 0.5},
            {"top_k": 7},
            {"top_p": 0.8},
            {"min_p": 0.1},
            {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
        ],
        ids=lambda settings: " ".join(settings) or "plain",
    )
    def test_tokens_have_the_distribution_of_transformers(self, settings):
        params = SamplingParams(sample=True, **settings)
        logits = torch.randn(40, generator=torch.Generator().manual_seed(3))
        assert_distributed(drawn(params, logits), expected_probabilities(params, logits))

    def test_consecutive_draws_are_independent(self):
        """Checks the distribution of pairs of consecutive draws."""
        logits, params = torch.randn(6, generator=torch.Generator().manual_seed(4)), SamplingParams(sample=True)
        sampler = Sampler(params, 1, 6, torch.device("cpu"))
        sampler.begin(row_random.keys(0, [[1, 2]]), None)
        draws = torch.cat([sampler(logits[None]) for _ in range(8000)])
        pairs = (draws[0::2] * 6 + draws[1::2]).bincount(minlength=36)
        probabilities = logits.softmax(-1)
        assert_distributed(pairs, torch.outer(probabilities, probabilities).flatten())

    def test_all_tokens_of_a_large_vocabulary_are_drawn(self):
        counts = drawn(SamplingParams(sample=True), torch.zeros(50_257), rows=400)
        assert counts.max() <= 2
        assert_distributed(counts.view(-1, 29).sum(1), torch.full((1733,), 1 / 1733))

    def test_text_of_a_prompt_does_not_depend_on_the_batch(self):
        model, ids = build(LSTM), tokens(3, 6)
        mask = torch.ones_like(ids)
        mask[1, :2] = 0
        options = {"max_new_tokens": 15, "do_sample": True, "top_k": 0}
        torch.manual_seed(7)
        together = model.generate(ids, attention_mask=mask, **options)
        torch.manual_seed(7)
        alone = model.generate(ids[1:2, 2:], **options)
        assert torch.equal(together[1, 6:], alone[0, 4:])

    def test_repeated_prompt_gets_different_texts(self):
        model, ids = build(LSTM), tokens(1, 6)
        torch.manual_seed(7)
        first, second = model.generate(ids, max_new_tokens=15, do_sample=True, num_return_sequences=2)
        assert not torch.equal(first, second)

    def test_seeds_give_different_keys(self):
        assert row_random.keys(0, [[1]]) != row_random.keys(1, [[1]])

    def test_draws_do_not_depend_on_the_default_dtype(self):
        keys, entries = torch.tensor([[7]], dtype=torch.int32), row_random.constants(1000, torch.device("cpu"))
        numbers = row_random.exponential(keys, entries)
        torch.set_default_dtype(torch.bfloat16)
        try:
            assert torch.equal(row_random.exponential(keys, entries), numbers)
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("mixer", ["transformer", "hybrid"])
def test_row_can_be_replaced_during_generation(mixer):
    """Other rows are not affected, and the new sequence gets the same tokens as alone."""
    model = build(MIXERS[mixer]).model
    first, second = tokens(2, 7), tokens(1, 4)
    logits, states = model.read(first)
    alone = Decoder(model, SamplingParams(), states, 2, 64)
    begun = alone.load([0, 1], logits, states, 7)
    expected = torch.cat((begun.read(), *(alone.advance(1).read() for _ in range(12))))

    shared = Decoder(model, SamplingParams(), states, 2, 64)
    shared.load([0, 1], logits, states, 7)
    shared.advance(5)
    logits, states = model.read(second)
    replaced = shared.load([1], logits, states, 4).read()[0]
    following = torch.cat([shared.advance(7).read()])
    assert torch.equal(following[:, 0], expected[6:, 0])
    text = torch.cat((second[0], replaced, following[:, 1]))
    for length in range(4, len(text)):
        assert model(text[None, :length])[0, -1].argmax() == text[length]


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("mixer", ["slstm", "transformer", "mamba", "hybrid"])
def test_prompts_in_slots_get_the_same_texts_as_alone(mixer, synchronous, monkeypatch):
    """For any number of slots, also with asynchronous reads as on a GPU."""
    model = build(MIXERS[mixer])
    prompts = [tokens(1, length)[0].tolist() for length in (5, 2, 9, 1, 7, 7)]
    ends = StopConditions(20, frozenset({3, 11}))
    params = SamplingParams(sample=True, top_k=12, repetition_penalty=1.2)
    asked = [Prompt(p, key, p) for p, key in zip(prompts, row_random.keys(5, prompts), strict=True)]
    monkeypatch.setattr(Decoder, "synchronous", synchronous)
    found = {answer.index: answer for answer in answers(model.model, asked, params, ends, 2)}
    monkeypatch.setattr("models.generation.row_random.new_seed", lambda: 5)
    options = {"do_sample": True, "top_k": 12, "repetition_penalty": 1.2, "eos_token_id": [3, 11], "pad_token_id": 0}
    for index, prompt in enumerate(prompts[:5]):  # the last prompt occurs twice
        alone = model.generate(torch.tensor([prompt]), max_new_tokens=20, **options)[0, len(prompt) :].tolist()
        assert found[index].tokens == alone
        assert found[index].reason == ("end_of_text" if alone[-1] in (3, 11) else "length")
    assert len(found) == 6


def test_attention_reads_only_the_used_part_of_the_cache(monkeypatch):
    """The window grows with the text."""
    monkeypatch.setattr(decoder, "_SHORTEST_WINDOW", 4)
    model = build(MIXERS["transformer"])
    ids = tokens(1, 3)
    found = model.generate(ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(found, by_transformers(model, ids, max_new_tokens=20, do_sample=False))


@pytest.mark.parametrize("T", [1, 100, 300])
def test_prompt_is_read_in_pieces(T, monkeypatch):
    monkeypatch.setattr("models.backbone._chunk_size", lambda batch: 128)
    model = SequenceModel(VOCABULARY, partial(RNNMixer, function="slstm", conv_width=4), d_model=16, num_blocks=2)
    ids, reset = tokens(2, T), F.one_hot(torch.tensor([T // 2, 0]), T).bool()
    logits, states = model.read(ids, reset=reset)
    expected, last = model(ids, reset=reset, return_states=True)
    torch.testing.assert_close(logits, expected[:, -1].detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states, [tuple(p.detach() for p in state) for state in last], rtol=1e-4, atol=1e-5)
