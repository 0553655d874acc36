import os
import signal
from dataclasses import dataclass

import numpy as np
import pytest
import tokenizers
import transformers

from data.encoding import Encoder, encode_in_order, token_dtype


@dataclass
class Chunk:
    texts: list


class Kills(Encoder):
    """An encoder that kills its process, as the operating system does when memory runs out."""

    def __init__(self):
        pass

    def __call__(self, texts):
        os.kill(os.getpid(), signal.SIGKILL)


def tokenizer_of(vocabulary):
    """Return a tokenizer that maps words to ids."""
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="end", unk_token="?")


@pytest.fixture(scope="module")
def encoder():
    return Encoder(tokenizer_of({"?": 0, "end": 1, **{str(i): i for i in range(2, 100)}}))


def test_documents_end_with_end_of_text(encoder):
    tokens, lengths = encoder(["2 3", "", "4"])
    assert tokens.tolist() == [2, 3, 1, 1, 4, 1]
    assert lengths.tolist() == [3, 1, 2]
    assert tokens.dtype == np.uint16


def test_ids_above_16_bits():
    assert [token_dtype(size) for size in (50_257, 65_536, 65_537)] == [np.uint16, np.uint16, np.uint32]
    tokens, _ = Encoder(tokenizer_of({"?": 0, "end": 1, "far": 65_536}))(["far"])
    assert tokens.tolist() == [65_536, 1]


def test_token_beyond_the_vocabulary_is_an_error(encoder, monkeypatch):
    monkeypatch.setattr(encoder, "ids", lambda texts: [[2, 300]])
    with pytest.raises(ValueError, match=r"token 300.* 99"):
        encoder(["2 300"])


def test_processes_return_all_chunks_in_order(encoder):
    chunks = [Chunk([f"{i % 100} {number}" for number in range(2, 5)]) for i in range(40)]
    alone, together = (list(encode_in_order(iter(chunks), encoder, processes)) for processes in (0, 2))
    assert [chunk for chunk, _ in together] == chunks
    for (_, expected), (_, found) in zip(alone, together, strict=True):
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_array_equal(found.lengths, expected.lengths)


def test_killed_process_is_an_error():
    with pytest.raises(ChildProcessError, match=r"killed.*prepare_processes"):
        list(encode_in_order([Chunk(["2"])], Kills(), 1))
