import json

import numpy as np
import pytest
import torch

from data.long_documents import WINDOW, LongDocuments
from data.tasks import IGNORE
from data.text import Text


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Return a function that builds data with documents of 1 to 13 times 60 words, a quarter of them held out."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("documents")
    for number in range(52):
        words = rng.choice(["the", "state", "of", "a", "network"], 60 * (1 + number % 13))
        (folder / f"{number}.jsonl").write_text(json.dumps({"text": " ".join(words)}))

    def build(**options):
        module = Text(f"{folder}/*.jsonl", tokenizer="bpe:300", context_length=8, cache_dir=str(folder), **options)
        module.prepare_data()
        module.setup()
        return module

    return lambda **options: build(**{"val_fraction": 0.3, "batch_size": 3, "eval_length": 2 * WINDOW, **options})


def test_windows_of_a_document_are_in_consecutive_batches(text):
    """All rows of a batch have the same position. The first input is the end of text before the document."""
    module = text()
    expected = documents(module)
    assert len(expected) > 3
    batches = list(module.test_dataloader())
    assert [batch["position"] for batch in batches] == [0, WINDOW] * -(-len(expected) // 3)
    assert [batch["begins"] for batch in batches] == [True, False] * -(-len(expected) // 3)
    found = []
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        ids = torch.cat((first["input_ids"], second["input_ids"]), dim=1)
        labels = torch.cat((first["labels"], second["labels"]), dim=1)
        assert (ids[:, 0] == module.manifest.tokenizer["end_of_text"]).all()
        assert torch.equal(ids[:, 1:], labels[:, :-1].where(labels[:, :-1] != IGNORE, ids[:, 1:]))
        found += [row.tolist() for row in labels if (row != IGNORE).all()]
    assert sorted(found) == sorted(expected)


def documents(module):
    tokens = np.concatenate([np.fromfile(path, np.uint16) for path in module.val_data.paths])
    ends = np.flatnonzero(tokens == module.manifest.tokenizer["end_of_text"])
    parts = np.split(tokens, ends + 1)
    return [part[: 2 * WINDOW].tolist() for part in parts if len(part) > 2 * WINDOW]


def test_eval_context_restarts_the_context_within_documents(text):
    module = text(eval_length=3 * WINDOW, eval_context=2 * WINDOW, eval_documents=1, batch_size=1)
    assert [batch["begins"] for batch in module.test_dataloader()] == [True, False, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_length": 100 * WINDOW}, r"data\.eval_length=12800: .* tokens"),
        ({"eval_length": 100}, r"data\.eval_length=100 .*multiple of 128"),
        ({"eval_context": 64}, r"data\.eval_context=64 .*multiple of 128"),
        ({"eval_documents": 0}, "eval_documents=0 .*1"),
    ],
)
def test_wrong_lengths_are_an_error(text, options, message):
    with pytest.raises(ValueError, match=message):
        text(**options)


def test_files_are_read_in_chunks(text, monkeypatch):
    module = text()
    args = module.folder, "validation", 2 * WINDOW, 64
    whole = LongDocuments(*args)
    monkeypatch.setattr("data.long_documents._READ_AT_ONCE", 1000)
    assert LongDocuments(*args)._starts == whole._starts
