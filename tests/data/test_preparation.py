"""Preparation of a corpus: results, interruptions, sections, and damaged files."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name

import datasets
import numpy as np
import pytest
from backports import zstd

from data import hub, preparation, tokenization
from data.atomic_file import replacing
from data.corpora import Corpus, Documents, held_out
from data.manifest import TRAIN, VALIDATION, Manifest
from data.packing import PackedBlocks
from data.preparation import prepare, prepare_part
from data.recipe import Recipe

ROOT = Path(__file__).parents[2]
SETS = ("RedPajamaCommonCrawl", "RedPajamaGithub")


def rows(count=120):
    """Return rows of SlimPajama's schema."""
    rng = np.random.default_rng(0)
    return [
        {"text": f"{i}: " + " ".join(map(str, rng.integers(0, 50, 40))), "meta": {"redpajama_set_name": SETS[i % 2]}}
        for i in range(count)
    ]


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch):
    monkeypatch.setattr("data.recipe.SHARD_TOKENS", 1000)
    monkeypatch.setattr("data.recipe.CHUNK_CHARS", 500)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Return a folder with the same documents as four files of jsonl.zst and of parquet."""
    folder = tmp_path_factory.mktemp("sources")
    for k in range(4):
        part = rows()[30 * k : 30 * (k + 1)]
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{k}.jsonl.zst").write_bytes(zstd.compress(lines.encode()))
        datasets.Dataset.from_list(part).to_parquet(folder / f"{k}.parquet")
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenization.train([row["text"] for row in rows(20)], 300).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def recipe(sources, tokenizer):
    return recipe_of(f"{sources}/*.jsonl.zst", tokenizer)


def recipe_of(source, tokenizer, **options):
    defaults = {"val_corpus": None, "val_fraction": 0.1, "max_bytes": None, "val_tokens": None}
    return Recipe(Corpus(source), tokenizer=tokenizer, **(defaults | options))


@pytest.fixture
def whole(recipe, tmp_path):
    """Return a folder that was prepared without interruption."""
    return prepare(recipe, tmp_path / "whole", 0)


def files(folder):
    """Return the contents of all files by name."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_shards_contain_every_document_once_in_order(whole, tokenizer):
    found = Manifest.read(whole)
    assert found.complete
    assert len(found.shards) == 5
    decode = tokenization.load(tokenizer).decode
    for split in (TRAIN, VALIDATION):
        texts = [row["text"] for row in rows() if held_out(row["text"], 0.1) == (split == VALIDATION)]
        tokens = np.concatenate([np.fromfile(path, found.dtype) for path in found.paths(whole, split)])
        assert decode(tokens) == "".join(text + "<|endoftext|>" for text in texts)
        total = {"tokens": len(tokens), "documents": len(texts), "shards": len(found.paths(whole, split))}
        assert found.totals[split] == total


def test_prepared_tokens_can_be_used_without_write_permission(recipe, whole, tmp_path, monkeypatch):
    def refuse(name):
        raise PermissionError(name)

    monkeypatch.setattr("data.storage.lock", refuse)
    assert prepare(recipe, tmp_path / "whole", 0) == whole


def test_blocks_are_read_from_all_shards(whole):
    blocks = PackedBlocks(whole, TRAIN, 64)
    expected = []
    for path in blocks.paths:
        tokens = np.fromfile(path, np.uint16)
        expected += [tokens[start : start + 65] for start in range(0, len(tokens) - 64, 64)]
    assert len(blocks) == len(expected)
    order = np.random.default_rng(0).permutation(len(blocks))
    batch = blocks[order]
    np.testing.assert_array_equal(batch["input_ids"], np.stack(expected)[order, :-1])
    np.testing.assert_array_equal(batch["labels"], np.stack(expected)[order, 1:])


def test_manifest_contains_source_tokenizer_versions_and_hashes(whole, recipe):
    content = json.loads((whole / "manifest.json").read_text())
    assert content["identity"]["source"] == recipe.corpus.source
    assert content["tokenizer"]["name"] == recipe.tokenizer
    assert content["tokenizer"]["sha256"] == tokenization.folder_hash(whole / "tokenizer")
    assert set(content["versions"]) == {"python", "datasets", "tokenizers", "transformers", "numpy"}
    for number, shard in enumerate(content["shards"]):
        for split, file in shard["files"].items():
            data = (whole / f"{split}-{number:05d}.bin").read_bytes()
            assert (len(data), hashlib.sha256(data).hexdigest()) == (2 * file["tokens"], file["sha256"])


def test_result_is_independent_of_format_and_number_of_processes(sources, tokenizer, whole, tmp_path):
    parquet = prepare(recipe_of(f"{sources}/*.parquet", tokenizer), tmp_path / "parquet", 2)
    assert [shard.files for shard in Manifest.read(parquet).shards] == [
        shard.files for shard in Manifest.read(whole).shards
    ]


def test_separate_validation_files(sources, tokenizer, tmp_path):
    validation = Corpus(f"{sources}/3.parquet")
    recipe = recipe_of(f"{sources}/[0-2].parquet", tokenizer, val_corpus=validation)
    totals = Manifest.read(prepare(recipe, tmp_path, 0)).totals
    assert (totals[TRAIN]["documents"], totals[VALIDATION]["documents"]) == (90, 30)


@pytest.mark.parametrize("held", [True, False])
def test_streaming_reads_only_the_needed_validation_text(sources, tokenizer, tmp_path, held, monkeypatch):
    monkeypatch.setattr("data.recipe.CHUNK_CHARS", 100)
    source = f"{sources}/[0-2].parquet"
    recipe = recipe_of(source, tokenizer, val_tokens=200, val_corpus=None if held else Corpus(f"{sources}/3.parquet"))
    totals = Manifest.read(prepare(recipe, tmp_path, 2)).totals
    assert 200 <= totals[VALIDATION]["tokens"] < 350
    assert totals[TRAIN]["tokens"] == 0


# --- interruptions ---


def killed(monkeypatch, name, call, run):
    """Call `run` in a process that is killed at the `call`-th call of data.`name`."""
    calls, function = [], resolve_name(f"data.{name}")

    def kill(*arguments, **more):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **more)

    process = os.fork()
    if process == 0:
        try:
            monkeypatch.setattr(f"data.{name}", kill)
            run()
        finally:
            os._exit(0)
    _, status = os.waitpid(process, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize(
    ("name", "call", "kept"),
    [
        ("preparation.token_dtype", 1, None),  # the tokenizer is saved, but no manifest
        ("recipe.held_out", 1, 0),  # before anything is read
        ("recipe.held_out", 70, 2),  # in the middle of a shard
        ("shards.Shard", 4, 3),  # its files have their names, but are not in the manifest
        ("preparation.replace", 1, 5),  # all files are written, but the manifest is not marked as complete
    ],
)
def test_killed_preparation_is_resumed_with_the_same_result(recipe, whole, tmp_path, monkeypatch, name, call, kept):
    folder = recipe.folder(tmp_path / "killed")
    killed(monkeypatch, name, call, lambda: prepare(recipe, tmp_path / "killed", 0))
    if kept is None:
        assert not (folder / "manifest.json").exists()
    else:
        assert len(Manifest.read(folder).shards) == kept
        before = {path: path.stat().st_mtime_ns for path in folder.glob("*.bin") if int(path.stem[-5:]) < kept}
    prepare(recipe, tmp_path / "killed", 0)
    assert files(folder) == files(whole)
    if kept:
        assert before == {path: path.stat().st_mtime_ns for path in before}


def test_preparation_is_resumed_at_the_same_revision(tokenizer, tmp_path, monkeypatch):
    asked, commits = [], ["first"] * 3 + ["second"] * 2

    def load_dataset(name, subset, *, split, revision, streaming):
        asked.append(revision)
        if len(asked) == 2:  # the first call reads the size
            raise ConnectionError("broken off")
        return datasets.Dataset.from_list(rows()).to_iterable_dataset()

    monkeypatch.setattr(hub, "check", lambda *arguments: commits.pop(0))
    monkeypatch.setattr(hub, "offline", lambda: False)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    recipe = recipe_of("owner/name", tokenizer)
    with pytest.raises(FileNotFoundError, match="broken off"):
        prepare(recipe, tmp_path, 0)
    folder = prepare(recipe, tmp_path, 0)
    assert set(asked) == {"first"}
    assert Manifest.read(folder).revision == "first"


# --- sections for several machines ---


@pytest.fixture
def _small_sections(monkeypatch):
    monkeypatch.setattr("data.recipe.SECTION_BYTES", 1500)  # the four files have 1.5 KB each


def tokens_of(folder):
    manifest = Manifest.read(folder)
    return {
        split: [np.fromfile(path, manifest.dtype) for path in manifest.paths(folder, split)]
        for split in (TRAIN, VALIDATION)
    }


@pytest.mark.usefixtures("_small_sections")
@pytest.mark.parametrize("validation", [False, True])
def test_several_machines_make_the_same_result_as_one(sources, tokenizer, tmp_path, validation, monkeypatch):
    own = {"val_corpus": Corpus(f"{sources}/0.parquet")} if validation else {}
    recipe = recipe_of(f"{sources}/*.jsonl.zst", tokenizer, **own)
    one = prepare(recipe, tmp_path / "one", 0)
    sections = Manifest.read(one).sections
    assert sections == 4 + validation
    shared = tmp_path / "shared"
    killed(monkeypatch, "shards.Shard", 2, lambda: prepare_part(recipe, shared, 0, 1, 3))
    left = [prepare_part(recipe, shared, 0, part, 3) for part in (2, 1, 1, 0)]
    assert left[-1] == 0
    assert left[0] == sections - 1
    assert files(recipe.folder(shared)) == files(one)
    whole = Manifest.read(one)
    whole.verify(one)
    assert whole.totals[TRAIN]["documents"] + whole.totals[VALIDATION]["documents"] == 120 + 30 * validation


@pytest.mark.usefixtures("_small_sections")
def test_sections_together_equal_an_undivided_corpus(recipe, tmp_path, monkeypatch):
    folder = prepare(recipe, tmp_path / "sections", 0)
    monkeypatch.setattr("data.recipe.SECTION_BYTES", 10**9)
    whole = prepare(recipe, tmp_path / "whole", 0)
    for split, shards in tokens_of(folder).items():
        assert np.array_equal(np.concatenate(shards), np.concatenate(tokens_of(whole)[split]))
    blocks = PackedBlocks(folder, TRAIN, 10)
    assert len(blocks) == sum((len(shard) - 1) // 10 for shard in tokens_of(folder)[TRAIN])
    assert blocks[[len(blocks) - 1]]["input_ids"].shape == (1, 10)


@pytest.mark.usefixtures("_small_sections")
def test_deleted_file_of_a_section_is_restored(recipe, tmp_path):
    folder = prepare(recipe, tmp_path, 0)
    before = files(folder)
    (folder / "section-00002" / "train-00000.bin").unlink()
    prepare(recipe, tmp_path, 0)
    assert files(folder) == before


@pytest.mark.usefixtures("_small_sections")
def test_limited_corpus_is_one_section(sources, tokenizer, tmp_path):
    recipe = recipe_of(f"{sources}/*.jsonl.zst", tokenizer, max_bytes=5000)
    assert prepare_part(recipe, tmp_path, 0, 1, 2) == 1  # the section belongs to the first machine
    assert prepare_part(recipe, tmp_path, 0, 0, 2) == 0


def test_hub_dataset_is_divided_by_files(monkeypatch):
    dataset = datasets.Dataset.from_list(rows()).to_iterable_dataset(num_shards=6)
    monkeypatch.setattr(hub, "open_dataset", lambda *arguments: dataset)
    monkeypatch.setattr("data.corpora.HUB_FILES", 2)
    found = Corpus("owner/name").sections(1)
    assert [corpus.section for corpus in found] == [(0, 3), (1, 3), (2, 3)]
    assert [text for corpus in found for text in Documents(corpus)] == [row["text"] for row in rows()]


@pytest.mark.parametrize("source", ["*.jsonl.zst", "*.parquet", "hub"])
def test_documents_can_be_read_from_a_position(sources, source, monkeypatch):
    if source == "hub":
        dataset = datasets.Dataset.from_list(rows())
        monkeypatch.setattr(hub, "open_dataset", lambda *arguments: dataset.to_iterable_dataset(num_shards=3))
    corpus = Corpus("owner/name" if source == "hub" else f"{sources}/{source}")
    texts = [row["text"] for row in rows()]
    for taken in (0, 1, 45, 120):
        documents = Documents(corpus)
        assert [next(documents) for _ in range(taken)] == texts[:taken]
        position = json.loads(json.dumps(documents.position))
        assert list(Documents(corpus, position=position)) == texts[taken:]


# --- damaged files ---


@pytest.fixture
def shard(whole):
    return whole / "train-00002.bin"


def test_truncated_file_is_an_error(recipe, whole, shard):
    os.truncate(shard, 100)
    with pytest.raises(ValueError, match=r"train-00002\.bin .*100 bytes .*delete"):
        prepare(recipe, whole.parent, 0)


def test_only_the_deleted_file_is_restored(recipe, whole, shard, monkeypatch):
    before = files(whole)
    shard.unlink()
    monkeypatch.setattr(preparation, "_write_remaining", lambda *arguments: pytest.fail("made more than was missing"))
    prepare(recipe, whole.parent, 0)
    assert files(whole) == before


def test_changed_file_is_detected_by_its_hash(whole, shard):
    content = bytearray(shard.read_bytes())
    content[10] ^= 1
    shard.write_bytes(content)
    found = Manifest.read(whole)
    assert found.missing(whole) == []
    with pytest.raises(ValueError, match=r"train-00002\.bin .*sha256 .*delete"):
        found.verify(whole)


def test_file_truncated_during_use_is_an_error(whole, shard):
    blocks = PackedBlocks(whole, TRAIN, 64)
    os.truncate(shard, 100)
    with pytest.raises(ValueError, match=r"train-00002\.bin .*ends .*delete"):
        blocks[range(len(blocks))]


def test_file_with_invalid_tokens_is_an_error(whole, shard):
    shard.write_bytes(b"\xff" * shard.stat().st_size)
    blocks = PackedBlocks(whole, TRAIN, 64)
    with pytest.raises(ValueError, match=r"train-00002\.bin .*token 65535.* 299"):
        blocks[range(len(blocks))]


def test_deleted_file_cannot_be_restored_from_a_changed_source(recipe, whole, shard, monkeypatch):
    shard.unlink()
    others = {file: file.read_bytes() for file in whole.glob("*.bin")}
    monkeypatch.setattr("data.recipe.held_out", lambda text, fraction: held_out(text + " changed", fraction))
    with pytest.raises(ValueError, match=f"{whole}.*delete"):
        prepare(recipe, whole.parent, 0)
    assert {file: file.read_bytes() for file in whole.glob("*.bin")} == others


def test_damaged_manifest_is_an_error(recipe, whole):
    (whole / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"manifest\.json .*delete"):
        prepare(recipe, whole.parent, 0)


def test_another_tokenizer_in_the_folder_is_an_error(recipe, whole, tmp_path):
    shutil.rmtree(whole / "tokenizer")
    tokenization.train(["other text"], 300).save_pretrained(whole / "tokenizer")
    (whole / "train-00002.bin").unlink()
    with pytest.raises(ValueError, match=r"tokenizer .*delete"):
        prepare(recipe, whole.parent, 0)


def test_error_of_a_full_disk_names_the_file_and_keeps_the_others(recipe, whole, tmp_path, monkeypatch):
    @contextmanager
    def full(name):
        with replacing(name) as file, open("/dev/full", "wb", buffering=0) as disk:
            yield disk if name.name == "train-00002.bin" else file

    with monkeypatch.context() as patch:
        patch.setattr("data.shards.replacing", full)
        with pytest.raises(OSError, match=r"train-00002\.bin"):
            prepare(recipe, tmp_path / "full", 0)
    folder = recipe.folder(tmp_path / "full")
    assert not list(folder.glob("*.partial"))
    prepare(recipe, tmp_path / "full", 0)
    assert files(folder) == files(whole)


def test_source_without_text_is_an_error(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(ValueError, match=r"a\.txt'"):
        prepare(recipe_of(f"{tmp_path}/a.txt", tokenizer), tmp_path, 0)


@pytest.mark.slow
def test_script_without_main_guard_is_an_error(sources, tokenizer, tmp_path):
    """Its processes would run the script again and wait for its lock, while it waits for them."""
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\n"
        "from data.corpora import Corpus\n"
        "from data.preparation import prepare\n"
        "from data.recipe import Recipe\n"
        f"recipe = Recipe(Corpus('{sources}/*.jsonl.zst'), None, '{tokenizer}', 0.1, None, None)\n"
        f"prepare(recipe, Path('{tmp_path}'), 1)\n"
    )
    command, environment = [sys.executable, str(script)], os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert re.search("RuntimeError: .*`if __name__", ended.stderr)
    assert "ChildProcessError: " in ended.stderr
