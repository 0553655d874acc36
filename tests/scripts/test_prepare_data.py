"""The command scripts.prepare_data, including interruptions."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from backports import zstd
from hydra.utils import instantiate

from data import preparation, tokenization
from data.manifest import Manifest
from scripts.prepare_data import prepare_data
from training.configuration import composed

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
SIZES = {"SHARD_TOKENS": 5000, "CHUNK_CHARS": 3000}
SMALL = f"from data import recipe; vars(recipe).update({SIZES}); from scripts.prepare_data import main; "
SLOW = (
    "import time; from data.manifest import Manifest; write = Manifest.write; "
    "Manifest.write = lambda self, folder: (write(self, folder), time.sleep(0.3)); "
)


def config(name, *overrides):
    return composed(overrides, name)


@pytest.fixture
def overrides(tmp_path):
    """Return overrides of SlimPajama's config with two local files of its schema, and a tokenizer."""
    rng = np.random.default_rng(0)
    texts = [" ".join(map(str, rng.integers(0, 1000, 60))) for _ in range(400)]
    for k in range(2):
        rows = [
            {"text": text, "meta": {"redpajama_set_name": "RedPajamaC4"}} for text in texts[200 * k : 200 * k + 200]
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{k}.jsonl.zst").write_bytes(zstd.compress(lines.encode()))
    tokenization.train(texts[:50], 300).save_pretrained(tmp_path / "tokenizer")
    source = [f"data.source='{tmp_path}/*.jsonl.zst'", "data.val_split=null", "data.val_fraction=0.05"]
    return [
        "data=slimpajama",
        *source,
        f"data.tokenizer={tmp_path}/tokenizer",
        "data.context_length=16",
        "data.prepare_processes=2",
    ]


def files(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def running(processes):
    """Return the processes that are running, without zombies."""
    found = [Path(f"/proc/{process}/stat") for process in processes]
    return [file for file in found if file.exists() and file.read_text().rpartition(")")[2].split()[0] != "Z"]


@pytest.mark.slow
def test_killed_preparation_is_resumed_with_the_same_result(overrides, tmp_path, monkeypatch):
    command = [f"data.cache_dir={tmp_path}/killed", *overrides]
    process = subprocess.Popen([sys.executable, "-c", SLOW + SMALL + "main()", *command], env=ENVIRONMENT, cwd=tmp_path)
    try:
        while process.poll() is None and not any('"end"' in text for text in manifests(tmp_path / "killed")):
            time.sleep(0.01)
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    finally:
        process.send_signal(signal.SIGKILL)
    process.wait()
    (folder,) = (file.parent for file in tmp_path.glob("killed/*/manifest.json"))
    left = Manifest.read(folder)
    assert len(left.shards) > 0
    assert not left.complete
    assert len(workers) >= 2
    deadline = time.monotonic() + 20
    while running(workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(workers)

    for name, value in SIZES.items():
        monkeypatch.setattr(f"data.recipe.{name}", value)
    gone_on, whole = (
        prepare_data(
            config("prepare_data", *overrides, f"data.cache_dir={tmp_path}/{place}", "data.prepare_processes=0")
        )
        for place in ("killed", "whole")
    )
    assert gone_on.folder == folder
    assert files(folder) == files(whole.folder)


def manifests(folder):
    return [file.read_text() for file in folder.glob("*/manifest.json")]


@pytest.mark.slow
def test_training_uses_prepared_data_and_prepares_missing_data(overrides, tmp_path, monkeypatch):
    command = [sys.executable, "-m", "scripts.prepare_data", *overrides]
    ended = subprocess.run(command, env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "prepared: corpora/" in ended.stdout
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"corpora", "tokenizer"}

    monkeypatch.chdir(tmp_path)
    ahead = instantiate(config("train", *overrides).data)
    written = files(ahead.folder)
    anew = instantiate(config("train", *overrides, "data.cache_dir=anew", "data.prepare_processes=0").data)
    anew.prepare_data()
    assert files(anew.folder) == written
    monkeypatch.setattr(preparation, "_begin", lambda *arguments: pytest.fail("prepared again"))
    monkeypatch.setattr(preparation, "_write_remaining", lambda *arguments: pytest.fail("prepared again"))
    ahead.prepare_data()


def test_existing_files_are_verified(overrides, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = config("prepare_data", *overrides, "data.prepare_processes=0")
    file = prepare_data(asked).folder / "train-00000.bin"
    file.write_bytes(file.read_bytes()[::-1])
    with pytest.raises(ValueError, match=r"train-00000\.bin .*sha256 .*delete"):
        prepare_data(asked)
    file.unlink()
    prepare_data(asked)


@pytest.mark.parametrize("name", ["python", "slimpajama", "text_tiny"])
def test_data_equal_their_config(name):
    """The command's own experiment only changes the batch size per device."""
    prepared, own = (config(command, f"data={name}").data for command in ("prepare_data", "train"))
    assert dict(prepared) == dict(own) | {"batch_size": prepared.batch_size}


def test_data_generated_during_training_needs_no_preparation():
    with pytest.raises(ValueError, match="StateTracking"):
        prepare_data(config("prepare_data", "data=parity", "experiment=parity"))


def test_missing_network_is_an_immediate_error_with_advice(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", fail)
    message = r"'DKYoon/SlimPajama-6B'.*HF_HUB_OFFLINE=1.*data\.source"
    with pytest.raises(ConnectionError, match=message):
        prepare_data(config("prepare_data", f"data.cache_dir={tmp_path}"))


def test_parts_of_a_corpus_report_the_rest(overrides, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("data.recipe.SECTION_BYTES", 20_000)  # all files are larger
    for part in ("0/2", "1/2", "1/2"):
        data = prepare_data(config("prepare_data", *overrides, f"data.cache_dir={tmp_path}/c", f"part={part}"))
    shown = capsys.readouterr().out
    assert len(re.findall(r"part 0/2 .*\b1 ", shown)) == 1
    assert shown.count(f"prepared: {data.folder}") == 2
    assert Manifest.read(data.folder).sections == 2


@pytest.mark.parametrize("part", ["2/2", "1", "-1/2", "a/b"])
def test_invalid_part_is_an_error(part, overrides):
    with pytest.raises(ValueError, match=f"part={part}.*I/N"):
        prepare_data(config("prepare_data", *overrides, f"part='{part}'"))
