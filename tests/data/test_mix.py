"""Mixtures of texts, stored and streamed: fractions of the sources, and exact resuming."""

import json
from collections import Counter

import numpy as np
import pytest

from data import tokenization
from data.mix import Mix
from data.mixing import PERIOD, Schedule
from data.streaming import InTurn


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Write two sources whose lines contain their name: 300 lines of `a` in two files, 60 lines of `b`."""
    folder = tmp_path_factory.mktemp("texts")
    for name, count in (("a0", 150), ("a1", 150), ("b0", 60)):
        rows = [json.dumps({"text": f"{name[0]} {number} is {number**3} {name}"}) for number in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    every = [f"{letter} {number} is {number**3}" for letter in "ab" for number in range(300)]
    tokenization.train(every, 300).save_pretrained(folder / "tokenizer")
    return folder


@pytest.fixture
def make(texts, tmp_path_factory):
    cache = tmp_path_factory.getbasetemp() / "cache_of_mixes"

    def build(**options):
        sources = {
            name: {"source": f"{texts}/{name}*.jsonl", "weight": weight} for name, weight in (("a", 3), ("b", 1))
        }
        shape = {"context_length": 8, "batch_size": 4, "val_fraction": 0.1, "max_val_blocks": 6}
        shared = {"tokenizer": str(texts / "tokenizer"), "cache_dir": str(cache)}
        module = Mix(**{"sources": sources, **shape, **shared, **options})
        module.prepare_data()
        module.setup()
        return module

    return build


STREAMED = {"streaming": True, "shuffle_blocks": 6}


def test_schedule_has_exact_fractions_and_random_access():
    schedule = Schedule([3, 1, 0.01], [0])
    sources, numbers = schedule(np.arange(3 * PERIOD))
    for period in np.split(sources, 3):
        counts = np.bincount(period)
        assert np.abs(counts - np.array([3, 1, 0.01]) / 4.01 * PERIOD).max() < 1
    for source in range(3):
        assert numbers[sources == source].tolist() == list(range((sources == source).sum()))
    some = np.array([2 * PERIOD + 5, 3, PERIOD - 1])
    again = Schedule([3, 1, 0.01], [0])(some)
    assert [part.tolist() for part in again] == [sources[some].tolist(), numbers[some].tolist()]
    assert (Schedule([3, 1, 0.01], [1])(np.arange(PERIOD))[0] != sources[:PERIOD]).any()


@pytest.mark.parametrize("weights", [[1, 0], [1, -1], [1, 1e-6]])
def test_invalid_weights_are_an_error(weights):
    with pytest.raises(ValueError, match="weights="):
        Schedule(weights, [0])


def test_small_source_is_repeated_in_another_order(make):
    module = make()
    a, b = (text.train_data for text in module.texts.values())
    mixed = module.train_dataloader().dataset
    per_source = dict.fromkeys(("a", "b"), ())
    sources, _ = mixed.schedule(np.arange(4 * len(b) + 100))
    for source, name, blocks in ((0, "a", a), (1, "b", b)):
        rows = mixed[np.flatnonzero(sources == source)]["input_ids"].tolist()
        epoch = sorted(rows[: len(blocks)])
        assert epoch == sorted(blocks[range(len(blocks))]["input_ids"].tolist()[: len(rows)]) or len(rows) < len(blocks)
        per_source[name] = rows
    assert len(per_source["b"]) > len(b)
    assert per_source["b"][: len(b)] != per_source["b"][len(b) : 2 * len(b)]


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, STREAMED, pytest.param({**STREAMED, "num_workers": 2}, marks=pytest.mark.slow)]
)
def test_resumed_training_sees_the_same_batches(make, fit, tmp_path, options):
    uninterrupted = fit(make(**options), max_steps=9)
    assert len({json.dumps(batch) for batch in uninterrupted}) == 9
    resumed = fit(make(**options), max_steps=9, ckpt_path=tmp_path / "step=5.ckpt")  # begins with the other worker
    assert resumed == uninterrupted[5:]


def test_streams_have_their_fractions_and_workers_read_different_documents(make):
    module = make(**STREAMED)
    streams = [iter(module.stream(reader, 2, None)) for reader in (0, 1)]
    read = [["".join(module.tokenizer.batch_decode(next(s)["input_ids"])) for _ in range(15)] for s in streams]
    documents = [{part.rpartition(" ")[2] for part in "".join(texts).split("<|endoftext|>")} for texts in read]
    assert documents[0] != documents[1]
    letters = Counter(letter for texts in read for batch in texts for letter in batch if letter in "ab")
    assert 0.1 < letters["b"] / letters["a"] < 0.6


def test_stream_cannot_be_resumed_with_other_workers_or_weights(make):
    module = make(**STREAMED)
    module.train_dataloader()
    state = module.state_dict()
    with pytest.raises(ValueError, match=r"workers: 1 .*3"):
        make(**STREAMED, num_workers=3).load_state_dict(state)
    other = make(**STREAMED)
    other.weights = [1.0, 1.0]
    with pytest.raises(ValueError, match="weights"):
        other.load_state_dict(state)


def test_workers_take_turns():
    streams = InTurn([[{"x": 0}], [{"x": 1}]], first=1)
    assert list(streams) == [{"x": 1, "stream": 1}]


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({}, "sources"),
        ({"a": {"source": "stdlib"}}, r"sources\.a=.*weight"),
        ({"a": {"source": "stdlib", "weight": "many"}}, r"sources\.a=.*weight"),
        ({"a": {"weight": 1}}, r"sources\.a=.*source"),
        ({"a": "stdlib"}, r"sources\.a=stdlib.*weight"),
    ],
)
def test_incomplete_sources_are_an_error(sources, message):
    with pytest.raises(ValueError, match=message):
        Mix(sources)


def test_tokenizer_is_trained_on_the_first_source_and_shared(make, tmp_path):
    module = make(tokenizer="bpe:280", cache_dir=str(tmp_path))
    vocabularies = [text.tokenizer.get_vocab() for text in module.texts.values()]
    assert vocabularies[0] == vocabularies[1]
    assert len(vocabularies[0]) == 280
    assert set(module.prepared()) == {"a, train", "a, validation", "b, train", "b, validation"}
