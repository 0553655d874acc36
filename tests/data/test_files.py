import bz2
import gzip
import json
import lzma
import os

import pytest
from backports import zstd

from data.files import READ, kind, read_rows

TEXTS = [f"document {i}: " + "some text " * i for i in range(50)]
LINES = "".join(json.dumps({"text": text, "meta": {"redpajama_set_name": "web"}}) + "\n" for text in TEXTS).encode()
COMPRESS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd.compress}


def texts(*files):
    return [row["text"] for row in read_rows([str(file) for file in files], [0] * len(files), "text")]


@pytest.mark.parametrize("suffix", COMPRESS)
class TestCompressed:
    def test_compressed_file_is_read(self, tmp_path, suffix):
        file = tmp_path / f"a.jsonl.{suffix}"
        file.write_bytes(COMPRESS[suffix](LINES))
        assert kind(str(file)) == "JSON lines"
        assert texts(file) == TEXTS

    def test_all_frames_of_a_file_are_read(self, tmp_path, suffix):
        file = tmp_path / f"a.jsonl.{suffix}"
        file.write_bytes(COMPRESS[suffix](LINES) + COMPRESS[suffix](LINES))
        assert texts(file) == TEXTS + TEXTS

    @pytest.mark.parametrize("damage", [lambda content: content[:-20], lambda content: b"no such thing" * 9])
    def test_error_names_the_damaged_file(self, tmp_path, suffix, damage):
        file = tmp_path / f"a.jsonl.{suffix}"
        file.write_bytes(damage(COMPRESS[suffix](os.urandom(4000).hex().encode())))
        with pytest.raises(ValueError, match=rf"a\.jsonl\.{suffix} .*damaged"):
            texts(file)


def test_text_in_another_encoding_is_an_error(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes("café".encode("latin1"))
    with pytest.raises(ValueError, match=r"a\.txt is not in UTF-8 .*iconv"):
        texts(file)


def test_rows_contain_the_number_of_bytes_read(tmp_path):
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file in files:
        file.write_bytes(LINES)
    read = [row[READ] for row in read_rows([str(file) for file in files], [0, len(LINES)], "text")]
    assert read == sorted(read)
    assert read[len(TEXTS)] > len(LINES)
    assert read[-1] == 2 * len(LINES)


@pytest.mark.parametrize("name", ["a.csv", "a.tsv.gz"])
def test_tables_are_not_read_as_text(name):
    with pytest.raises(ValueError, match=f"{name} .*parquet or JSON"):
        kind(name)
