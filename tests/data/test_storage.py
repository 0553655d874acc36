"""Corpora and tokens at URLs, tested with the in-memory file system of fsspec."""

import json
import re

import fsspec
import numpy as np
import pytest

from data import preparation, tokenization
from data.atomic_file import replacing
from data.corpora import Corpus, Documents
from data.manifest import Manifest
from data.storage import find, path, read_ranges
from data.text import Text

TEXTS = [f"{number}: " + "the state of a network " * 3 for number in range(80)]


@pytest.fixture
def bucket():
    """Write four files of JSON lines, one of them compressed; return the URL of their folder."""
    system = fsspec.filesystem("memory")
    for number in range(4):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[20 * number : 20 * number + 20])
        name = f"/bucket/texts/{number}.jsonl" + (".gz" if number == 2 else "")
        with fsspec.open(f"memory:/{name}", "wb", compression="infer") as file:
            file.write(lines.encode())
    yield "memory://bucket"
    system.rm("/bucket", recursive=True)


@pytest.fixture
def tokenizer(tmp_path):
    tokenization.train(TEXTS, 280).save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def text_of(source, cache_dir, tokenizer, **options):
    shape = {"context_length": 16, "batch_size": 4, "val_fraction": 0.2}
    module = Text(source, tokenizer=tokenizer, cache_dir=str(cache_dir), **shape, **options)
    module.prepare_data()
    module.setup()
    return module


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.jsonl", "0.jsonl 1.jsonl 3.jsonl [1].jsonl"),
        ("[02].jsonl*", "0.jsonl 2.jsonl.gz"),
        ("?.jsonl.gz", "2.jsonl.gz"),
        ("**", "0.jsonl 1.jsonl 2.jsonl.gz 3.jsonl [1].jsonl"),
        ("[1].jsonl", "[1].jsonl"),
    ],
)
def test_pattern_matches_files(bucket, pattern, names):
    fsspec.filesystem("memory").pipe("/bucket/texts/[1].jsonl", b"")
    assert [name.rpartition("/")[2] for name in find(f"{bucket}/texts/{pattern}")] == names.split()


def test_errors_while_reading_are_raised(bucket):
    with pytest.raises(FileNotFoundError):
        read_ranges([path(f"{bucket}/texts/0.jsonl"), path(f"{bucket}/texts/none")], [0, 0], 4)


def test_documents_are_read_in_order(bucket):
    corpus = Corpus(f"{bucket}/texts/*.jsonl*")
    assert [name.rpartition("/")[2] for name in corpus.files] == ["0.jsonl", "1.jsonl", "2.jsonl.gz", "3.jsonl"]
    documents = Documents(corpus)
    assert [next(documents) for _ in range(50)] == TEXTS[:50]
    assert list(Documents(corpus, position=documents.position)) == TEXTS[50:]
    before = corpus.identity()
    with fsspec.open(f"{bucket}/texts/1.jsonl", "ab") as file:
        file.write(b"\n")
    assert Corpus(corpus.source).identity() != before


def test_tokens_at_a_url_are_read_like_local_ones(bucket, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("data.recipe.SHARD_TOKENS", 500)
    monkeypatch.setattr("data.recipe.CHUNK_CHARS", 400)
    monkeypatch.setattr("data.recipe.SECTION_BYTES", 2000)
    source = f"{bucket}/texts/*.jsonl*"
    there, here = text_of(source, f"{bucket}/corpora", tokenizer), text_of(source, tmp_path / "corpora", tokenizer)
    assert there.manifest == here.manifest
    assert there.manifest.sections > 1
    assert there.prepared() == here.prepared()
    for theirs, ours in zip(there.train_dataloader(), here.train_dataloader(), strict=True):
        assert theirs["input_ids"].equal(ours["input_ids"])
    assert there.tokenizer.get_vocab() == here.tokenizer.get_vocab()
    assert there.tokenizer_folder.is_dir()


def test_deleted_shard_is_restored_and_a_truncated_one_is_an_error(bucket, tokenizer, monkeypatch):
    monkeypatch.setattr("data.recipe.SHARD_TOKENS", 500)
    monkeypatch.setattr("data.recipe.CHUNK_CHARS", 400)
    module = text_of(f"{bucket}/texts/*.jsonl*", f"{bucket}/corpora", tokenizer)
    whole, file = module.manifest, module.train_data.paths[1]
    content = file.read_bytes()
    file.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "_write_remaining", lambda *_: pytest.fail("began anew"))
        module.prepare_data()
    assert file.read_bytes() == content
    assert Manifest.read(module.folder) == whole
    file.write_bytes(content[:-2])
    with pytest.raises(ValueError, match=rf"{file.name} .*{len(content) - 2} bytes"):
        module.prepare_data()


def test_truncated_shard_is_an_error(bucket, tokenizer):
    module = text_of(f"{bucket}/texts/*.jsonl*", f"{bucket}/corpora", tokenizer)
    (file,) = module.train_data.paths
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=f"{file.name} .*ends"):
        module.train_data[np.array([len(module.train_data) - 1])]


def test_failed_write_leaves_no_file(bucket):
    target = path(f"{bucket}/new/file")

    def write():
        with replacing(target) as file:
            file.write(b"half")
            raise OSError("broken off")

    with pytest.raises(OSError, match="broken off"):
        write()
    assert not target.exists()


@pytest.mark.parametrize("name", ["none/*.jsonl", "texts/none.jsonl"])
def test_missing_file_is_an_error(bucket, name):
    with pytest.raises(FileNotFoundError, match=f"source '{bucket}/{re.escape(name)}'"):
        _ = Corpus(f"{bucket}/{name}").files
