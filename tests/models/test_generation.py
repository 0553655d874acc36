"""Generation on fixed buffers: the tokens are those of transformers' loop, draws have the right distribution."""

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
    """A model whose greedy texts do not end in the repetition of one token."""
    model = test_hugging_face.build(mixer)
    torch.manual_seed(7)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return model


@pytest.fixture(params=MIXERS)
def model(request):
    return build(MIXERS[request.param])


def by_transformers(model, ids, **options):
    """What its loop gives, which serves what a Decoder does not."""
    hook = model.model.register_forward_hook(lambda *_: None)
    try:
        return model.generate(ids, **options)
    finally:
        hook.remove()


@pytest.fixture
def decoders(monkeypatch):
    """Those that have been made."""
    made = []
    init = Decoder.__init__
    monkeypatch.setattr(Decoder, "__init__", lambda self, *args: (made.append(self), init(self, *args))[1])
    return made


class TestGreedyTokens:
    def test_are_those_of_transformers(self, model, decoders):
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

    def test_are_the_same_when_the_host_looks_now_and_then(self, model, monkeypatch):
        """As on a GPU, where it looks at tokens when the next are under way."""
        ids = tokens(2, 5)
        options = {"max_new_tokens": 21, "do_sample": False, "eos_token_id": [3, 4], "pad_token_id": 0}
        expected = model.generate(ids, **options)
        monkeypatch.setattr(Decoder, "synchronous", False)
        assert torch.equal(model.generate(ids, **options), expected)

    def test_of_bfloat16_are_likeliest(self):
        model = build(LSTM).bfloat16()
        found = model.generate(tokens(2, 5), max_new_tokens=10, do_sample=False)
        logits = model(found[:, :-1]).logits[:, 4:].float()
        chosen = logits.gather(2, found[:, 5:, None])[..., 0]
        assert (chosen >= logits.amax(-1) - 0.05 * logits.abs().amax(-1)).all()


class TestEnds:
    OPTIONS = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}  # noqa: RUF012

    def test_at_the_end_of_text(self):
        model, ids = build(LSTM), tokens(4, 5)
        options = self.OPTIONS | {"eos_token_id": [5, 6, 7]}
        expected = by_transformers(model, ids, **options)
        assert expected.shape[1] < 35
        assert torch.equal(model.generate(ids, **options), expected)

    def test_where_a_criterion_says_so(self):
        class ThirdOfAKind(StoppingCriteria):
            def __call__(self, input_ids, scores, **_):
                return (input_ids[:, -1:] == input_ids).sum(1) > 2

        model, ids = build(LSTM), tokens(4, 5)
        options = self.OPTIONS | {"stopping_criteria": StoppingCriteriaList([ThirdOfAKind()])}
        expected = by_transformers(model, ids, **options)
        assert expected.shape[1] < 35
        assert torch.equal(model.generate(ids, **options), expected)

    def test_a_streamer_sees_every_token(self):
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

    def test_the_cache_has_read_all_but_the_last_token(self, model):
        ids = tokens(1, 5)
        options = self.OPTIONS | {"return_dict_in_generate": True, "eos_token_id": [5, 6, 7]}
        found, expected = model.generate(ids, **options), by_transformers(model, ids, **options)
        assert torch.equal(found.sequences, expected.sequences)
        assert found.past_key_values.length == expected.past_key_values.length == found.sequences.shape[1] - 1
        for ours, theirs in zip(found.past_key_values.states, expected.past_key_values.states, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


class TestWhatTransformersDoes:
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
    def test_what_a_decoder_does_not(self, options, decoders):
        model = build(LSTM)
        assert model.generate(tokens(2, 5), **{"max_new_tokens": 4, "do_sample": False, **options}) is not None
        assert not decoders

    def test_a_mixer_without_a_step(self, decoders, monkeypatch):
        model, ids = build(LSTM), tokens(2, 5)
        expected = model.generate(ids, max_new_tokens=4, do_sample=False)
        decoders.clear()
        monkeypatch.delattr(RNNMixer, "step")
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)
        assert not decoders


DRAWS = 20_000


def drawn(params, logits, rows=DRAWS):
    """How often each token is drawn, by rows of different prompts."""
    sampler = Sampler(params, rows, len(logits), torch.device("cpu"))
    sampler.begin(row_random.keys(0, [[row] for row in range(rows)]), [[]] * rows)
    return sampler(logits.expand(rows, -1)).bincount(minlength=len(logits))


def expected_probabilities(params, logits):
    """By transformers' processors, which apply one after the other."""
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
    """Pearson's chi-squared: its mean is the number of cells minus one, its variance twice that."""
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = counts.sum() * probabilities[possible]
    statistic = ((counts[possible] - expected) ** 2 / expected).sum().item()
    freedom = int(possible.sum()) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


class TestDraws:
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
    def test_have_the_distribution_of_transformers(self, settings):
        params = SamplingParams(sample=True, **settings)
        logits = torch.randn(40, generator=torch.Generator().manual_seed(3))
        assert_distributed(drawn(params, logits), expected_probabilities(params, logits))

    def test_of_one_row_over_time_are_independent(self):
        """Also of each other: pairs of draws that follow each other."""
        logits, params = torch.randn(6, generator=torch.Generator().manual_seed(4)), SamplingParams(sample=True)
        sampler = Sampler(params, 1, 6, torch.device("cpu"))
        sampler.begin(row_random.keys(0, [[1, 2]]), None)
        draws = torch.cat([sampler(logits[None]) for _ in range(8000)])
        pairs = (draws[0::2] * 6 + draws[1::2]).bincount(minlength=36)
        probabilities = logits.softmax(-1)
        assert_distributed(pairs, torch.outer(probabilities, probabilities).flatten())

    def test_of_a_large_vocabulary_reach_all_of_it(self):
        counts = drawn(SamplingParams(sample=True), torch.zeros(50_257), rows=400)
        assert counts.max() <= 2
        assert_distributed(counts.view(-1, 29).sum(1), torch.full((1733,), 1 / 1733))

    def test_a_seed_gives_a_prompt_its_text_in_any_batch(self):
        model, ids = build(LSTM), tokens(3, 6)
        mask = torch.ones_like(ids)
        mask[1, :2] = 0
        options = {"max_new_tokens": 15, "do_sample": True, "top_k": 0}
        torch.manual_seed(7)
        together = model.generate(ids, attention_mask=mask, **options)
        torch.manual_seed(7)
        alone = model.generate(ids[1:2, 2:], **options)
        assert torch.equal(together[1, 6:], alone[0, 4:])

    def test_the_same_prompt_twice_gives_two_texts(self):
        model, ids = build(LSTM), tokens(1, 6)
        torch.manual_seed(7)
        first, second = model.generate(ids, max_new_tokens=15, do_sample=True, num_return_sequences=2)
        assert not torch.equal(first, second)

    def test_another_seed_gives_another_text(self):
        assert row_random.keys(0, [[1]]) != row_random.keys(1, [[1]])

    def test_do_not_depend_on_the_default_dtype(self):
        keys, entries = torch.tensor([[7]], dtype=torch.int32), row_random.constants(1000, torch.device("cpu"))
        numbers = row_random.exponential(keys, entries)
        torch.set_default_dtype(torch.bfloat16)
        try:
            assert torch.equal(row_random.exponential(keys, entries), numbers)
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("mixer", ["transformer", "hybrid"])
def test_a_row_takes_another_sequence_in_the_midst_of_others(mixer):
    """The others do not notice, whatever the lengths, and it gets the tokens that it would get alone."""
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
def test_every_prompt_gets_the_text_that_it_gets_alone(mixer, synchronous, monkeypatch):
    """Whatever the slots, and also when the host looks now and then, as on a GPU."""
    model = build(MIXERS[mixer])
    prompts = [tokens(1, length)[0].tolist() for length in (5, 2, 9, 1, 7, 7)]
    ends = StopConditions(20, frozenset({3, 11}))
    params = SamplingParams(sample=True, top_k=12, repetition_penalty=1.2)
    asked = [Prompt(p, key, p) for p, key in zip(prompts, row_random.keys(5, prompts), strict=True)]
    monkeypatch.setattr(Decoder, "synchronous", synchronous)
    found = {answer.index: answer for answer in answers(model.model, asked, params, ends, 2)}
    monkeypatch.setattr("models.generation.row_random.new_seed", lambda: 5)
    options = {"do_sample": True, "top_k": 12, "repetition_penalty": 1.2, "eos_token_id": [3, 11], "pad_token_id": 0}
    for index, prompt in enumerate(prompts[:5]):  # the last one is there twice
        alone = model.generate(torch.tensor([prompt]), max_new_tokens=20, **options)[0, len(prompt) :].tolist()
        assert found[index].tokens == alone
        assert found[index].reason == ("end_of_text" if alone[-1] in (3, 11) else "length")
    assert len(found) == 6


def test_a_window_grows_with_the_text(monkeypatch):
    """Attention looks at as much of its cache as is in use."""
    monkeypatch.setattr(decoder, "_SHORTEST_WINDOW", 4)
    model = build(MIXERS["transformer"])
    ids = tokens(1, 3)
    found = model.generate(ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(found, by_transformers(model, ids, max_new_tokens=20, do_sample=False))


@pytest.mark.parametrize("T", [1, 100, 300])
def test_a_prompt_is_read_in_pieces(T, monkeypatch):
    monkeypatch.setattr("models.backbone._chunk_size", lambda batch: 128)
    model = SequenceModel(VOCABULARY, partial(RNNMixer, function="slstm", conv_width=4), d_model=16, num_blocks=2)
    ids, reset = tokens(2, T), F.one_hot(torch.tensor([T // 2, 0]), T).bool()
    logits, states = model.read(ids, reset=reset)
    expected, last = model(ids, reset=reset, return_states=True)
    torch.testing.assert_close(logits, expected[:, -1].detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states, [tuple(p.detach() for p in state) for state in last], rtol=1e-4, atol=1e-5)
