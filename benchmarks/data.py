"""Speed of tokenising a corpus, compared with the tokenizer alone, and of reading its blocks for training."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
from pandas import DataFrame

from data.encoding import Encoded, Encoder, encode_in_order

if TYPE_CHECKING:
    from data.text import Text

ROUNDS = 3
FILES = 8
BATCH_SIZE, CONTEXT_LENGTH = 64, 1024


def rows() -> Iterator[dict]:
    """Tokens per second of processor time, which depends little on the load by other programs. The corpus is the
    sources of the Python standard library in the format of SlimPajama (jsonl.zst). The tokenizer is a byte-level BPE
    with the splitting and vocabulary size of GPT-2, trained on the corpus. Tokenising: reading, encoding and collecting
    as in prepare_data, in all its processes, and encode_batch of the tokenizers package in the same processes and on
    the same documents, alternating chunk by chunk. processes 0 means one process with threads. Reading: shuffled
    batches of 64 x 1024 from the DataLoader of training, with files in the page cache, from the second batch of an
    epoch on. With workers only wall time is given, which depends on the load of the machine."""
    from data import tokenization
    from data.corpora import Corpus, Documents
    from data.text import Text

    with TemporaryDirectory() as name:
        folder, texts = Path(name), list(Documents(Corpus("stdlib")))
        tokenization.train(texts, 50_257).save_pretrained(folder / "tokenizer")
        _write(folder, texts)
        options = {"tokenizer": f"{folder}/tokenizer", "cache_dir": f"{folder}/prepared"}
        options |= {
            "batch_size": BATCH_SIZE,
            "context_length": CONTEXT_LENGTH,
            "prepare_processes": 2,
            "val_fraction": 0.05,
        }
        datamodule = Text(f"{folder}/*.jsonl.zst", **options)
        datamodule.prepare_data()
        datamodule.setup()
        for processes in (0, 2):
            yield _tokenising(datamodule, processes, folder / f"seconds_{processes}")
        for workers in (0, 2):
            yield _reading(datamodule, workers)


def _write(folder: Path, texts: list[str]) -> None:
    """Write FILES files of SlimPajama's schema."""
    from backports import zstd

    for k in range(FILES):
        with zstd.open(folder / f"{k}.jsonl.zst", "wt", encoding="utf-8") as file:
            for text in texts[k::FILES]:
                file.write(json.dumps({"text": text, "meta": {"redpajama_set_name": "RedPajamaGithub"}}) + "\n")


class _TimedEncoder(Encoder):
    """An encoder that also runs encode_batch on the same texts, and appends the seconds of both to a file."""

    def __init__(self, tokenizer, seconds: Path):
        super().__init__(tokenizer)
        self._bare, self._seconds = tokenizer.backend_tokenizer, seconds

    def __call__(self, texts: list[str]) -> Encoded:
        start = time.process_time()
        self._bare.encode_batch(texts, add_special_tokens=False)
        between = time.process_time()
        encoded = super().__call__(texts)
        end = time.process_time()
        with self._seconds.open("a") as file:
            file.write(f"{between - start} {end - between}\n")
        return encoded


def _tokenising(datamodule: "Text", processes: int, seconds: Path) -> dict:
    rounds = []
    for number in range(ROUNDS):
        file = seconds.with_suffix(f".{number}")
        start = time.process_time()
        chunks = encode_in_order(
            datamodule.recipe.whole().chunks(None), _TimedEncoder(datamodule.tokenizer, file), processes
        )
        tokens = sum(len(encoded.tokens) for _, encoded in chunks)
        here = time.process_time() - start
        bare, own = np.loadtxt(file, ndmin=2).sum(axis=0)
        ours = here + own if processes else here - bare
        rounds.append({"ours": tokens / ours, "encode_batch": tokens / bare, "over_bare": ours / bare})
    median = DataFrame(rounds).median()
    rates = {name: round(median[name]) for name in ("ours", "encode_batch")}
    over = round(median["over_bare"], 3)
    return {"what": "tokenising", "processes": processes, "tokens_per_processor_second": rates, "time_over_bare": over}


def _reading(datamodule: "Text", workers: int) -> dict:
    datamodule.num_workers = workers
    rounds = []
    for _ in range(ROUNDS):
        batches = iter(datamodule.train_dataloader())
        next(batches)
        wall, processor = time.perf_counter(), time.process_time()
        tokens = sum(batch["input_ids"].numel() for batch in batches)
        spent = {"second": time.perf_counter() - wall, "processor_second": time.process_time() - processor}
        rounds.append({f"tokens_per_{unit}": tokens / taken for unit, taken in spent.items()})
    rates = DataFrame(rounds).median().round().astype(int).to_dict()
    if workers:  # their processor time is not counted in this process
        del rates["tokens_per_processor_second"]
    return {"what": "reading", "num_workers": workers} | rates
