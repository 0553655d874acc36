import gzip
import itertools
import json
import re
import sysconfig

import datasets
import huggingface_hub
import numpy as np
import pytest

from data import corpora
from data.corpora import Corpus, Documents, held_out
from data.files import DOCUMENT_CHARS

TEXTS = [f"document {i}: " + "some text " * i for i in range(20)]


def write_rows(path, rows):
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return str(path)


def read(source, **arguments):
    return list(Documents(Corpus(str(source), **arguments)))


@pytest.fixture
def no_network(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    def fail(*args, **kwargs):
        raise OSError("Name or service not known")

    for name in ("dataset_info", "model_info"):
        monkeypatch.setattr(huggingface_hub.HfApi, name, fail)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json.gz"])
def test_json_lines(tmp_path, name):
    rows = [{"text": text, "meta": {"set": "web"}} for text in TEXTS]
    assert read(write_rows(tmp_path / name, rows)) == TEXTS


def test_parquet_with_another_column(tmp_path):
    datasets.Dataset.from_dict({"id": list(range(20)), "content": TEXTS}).to_parquet(tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", column="content") == TEXTS


def test_datasets_saved_to_a_folder(tmp_path):
    saved = datasets.Dataset.from_dict({"id": list(range(20)), "content": TEXTS})
    datasets.DatasetDict({"train": saved, "test": saved.select([1])}).save_to_disk(tmp_path)
    assert read(tmp_path / "train" / "*.arrow", column="content") == TEXTS
    with pytest.raises(ValueError, match=r"'text'.*`column`.*id, content"):
        read(tmp_path / "test" / "*.arrow")
    with pytest.raises(ValueError, match=r"is a folder.*/\*\*/\*\.arrow'"):
        read(tmp_path)


def test_text_files_are_sorted_and_long_ones_are_split(tmp_path):
    long = "line of text\n" * 5000
    for name, text in (("b.txt", "second"), ("a.txt", "first"), ("c/d.txt", long), ("empty.txt", " \n")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    first, second, *pieces = read(tmp_path / "**" / "*.txt")
    assert (first, second) == ("first", "second")
    assert "".join(pieces) == long
    assert len(pieces) == -(-len(long) // DOCUMENT_CHARS)
    assert all(piece.endswith("text\n") for piece in pieces)


def test_standard_library_excludes_its_tests():
    files = Corpus("stdlib").files
    root = sysconfig.get_path("stdlib")
    assert f"{root}/argparse.py" in files
    assert not any(re.search(r"/(tests?|site-packages)/", name.removeprefix(root)) for name in files)


def test_joined_documents_contain_neighbouring_files(tmp_path, monkeypatch):
    for number in range(7):
        (tmp_path / f"{number}.py").write_text(f"text = {number}\n" * 20)  # 180 bytes
    monkeypatch.setitem(corpora.PYTHON_FOLDERS, "joined", ("purelib",))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(corpora, "JOINED_BYTES", 400)
    found = list(Documents(Corpus("joined")))
    assert [re.findall(r"# (\d)\.py\n", text) for text in found] == [["0", "1", "2"], ["3", "4"], ["5", "6"]]
    assert found[1] == "".join(f"# {number}.py\n" + f"text = {number}\n" * 20 + "\n" for number in (3, 4))
    documents = Documents(Corpus("joined"))
    next(documents)
    assert list(Documents(Corpus("joined"), position=documents.position)) == found[1:]


def test_max_bytes_includes_the_document_that_reaches_it(tmp_path):
    corpus = Corpus(write_rows(tmp_path / "a.jsonl", [{"text": "ä" * 10}] * 5))  # 20 bytes each
    assert [len(list(Documents(corpus, max_bytes=max_bytes))) for max_bytes in (1, 20, 21, 1000)] == [1, 1, 2, 5]


def test_readers_read_different_documents(tmp_path):
    corpus = Corpus(write_rows(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS]))
    parts = [Documents(corpus, reader=reader, readers=3) for reader in range(3)]
    assert sorted(itertools.chain(*parts)) == sorted(TEXTS)


def test_larger_fractions_hold_out_a_superset():
    texts = [str(i) for i in range(10_000)]
    small, large = ({text for text in texts if held_out(text, fraction)} for fraction in (0.01, 0.1))
    np.testing.assert_allclose([len(small), len(large)], [100, 1000], rtol=0.25)
    assert small < large


def test_text_without_line_ends_is_split(tmp_path):
    text = "word " * 20_000
    (tmp_path / "a.txt").write_text(text)
    pieces = read(tmp_path / "a.txt")
    assert "".join(pieces) == text
    assert len(pieces) > 2


def test_rows_without_text_are_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": null}\n{"text": "x"}\n{"text": ""}\n')
    assert read(tmp_path / "a.jsonl") == ["x"]


def test_file_name_that_looks_like_a_pattern(tmp_path):
    folder = tmp_path / "[v1]"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "x"}\n')
    assert read(folder / "a.jsonl") == ["x"]


def test_lone_surrogates_are_replaced(tmp_path):
    (tmp_path / "a.jsonl").write_text(r'{"text": "half \ud83d of an emoji"}')
    assert read(tmp_path / "a.jsonl") == ["half ? of an emoji"]


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("a.txt", b"\xff\xfe\xff", ValueError, r"a\.txt .*utf-8"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', ValueError, r"a\.jsonl, line 2 .*JSON"),
        ("a.jsonl", b'["x"]\n', ValueError, r'a\.jsonl, line 1 .*\["x"\]'),
        ("a.jsonl", b'{"content": "x"}\n', ValueError, "'text'.*`column`.*content"),
        ("a.jsonl", b'{"text": 3}\n', ValueError, "row 1: 'text' .*3"),
        ("a.parquet", b"nonsense", ValueError, r"a\.parquet .*not a parquet file"),
        ("b.txt", b"x", FileNotFoundError, r"source '.*a\.txt'"),
    ],
)
def test_unreadable_files_are_an_error(tmp_path, name, content, error, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=message):
        read(tmp_path / name.replace("b.txt", "a.txt"))


def test_missing_parquet_column_is_an_error(tmp_path):
    datasets.Dataset.from_dict({"content": TEXTS}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"'text'.*`column`.*content"):
        read(tmp_path / "a.parquet")


def test_folder_or_mixed_kinds_of_files_are_an_error(tmp_path):
    with pytest.raises(ValueError, match=rf"{tmp_path}.*'.*/\*\*/\*\.txt'"):
        read(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    write_rows(tmp_path / "a.jsonl", [{"text": "x"}])
    with pytest.raises(ValueError, match="JSON lines and text"):
        read(tmp_path / "a.*")


def test_missing_network_is_an_immediate_error_with_advice(no_network, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: pytest.fail("would try for half a minute"))
    with pytest.raises(ConnectionError, match=r"'owner/name'.*HF_HUB_OFFLINE=1.*data\.source"):
        read("owner/name")


def test_dataset_that_is_not_downloaded_is_an_error_offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="'owner/name'"):
        read("owner/name")
