"""The manifest.json in a folder of prepared tokens: their origin, the files, and whether they are complete.

The folder contains the tokenizer and the shards train-00000.bin, validation-00000.bin, train-00001.bin, and so on. Each
shard is a flat array of tokens: documents one after the other, each followed by the end-of-text token. Shard k of both
splits comes from the same part of the corpus; a split without documents there has no file.

A large corpus is divided into sections of whole files, which several machines can prepare at the same time. Each has
its own folder with shards and manifest, section-00000/ and so on; when all are complete, the manifest of the corpus
lists all shards.
"""

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from data import storage
from data.atomic_file import replacing

TRAIN, VALIDATION = "train", "validation"
TOKENIZER = "tokenizer"  # name of the tokenizer's folder
REMEDY = "delete this file: the next start, or `python -m scripts.prepare_data`, makes it again and keeps the others"
VERIFIED_AT_ONCE = 4  # number of files


@dataclass(frozen=True)
class ShardFile:
    """A file of one split."""

    tokens: int
    documents: int
    sha256: str


@dataclass(frozen=True)
class Shard:
    files: dict[str, ShardFile]  # by split
    end: dict[str, Any]  # position in the corpus where the next shard begins
    section: int | None = None  # in a manifest of several sections, the section of the shard
    number: int | None = None  # and the number of the shard in the section


@dataclass(frozen=True)
class Manifest:
    identity: dict[str, Any]  # the source, tokenizer and options that the tokens are made from
    hash: str  # hash of the identity, also part of the folder's name
    revision: str | None  # commit of a hub dataset
    tokenizer: dict[str, Any]  # name, sha256 of its files, vocab_size, end_of_text (token id)
    dtype: str
    versions: dict[str, str]
    complete: bool = False  # whether all shards have been written
    sections: int = 1
    shards: list[Shard] = field(default_factory=list)

    @property
    def totals(self) -> dict[str, dict[str, int]]:
        """Tokens, documents and shards of each split."""
        totals = {}
        for split in (TRAIN, VALIDATION):
            files = [shard.files[split] for shard in self.shards if split in shard.files]
            tokens, documents = sum(file.tokens for file in files), sum(file.documents for file in files)
            totals[split] = {"tokens": tokens, "documents": documents, "shards": len(files)}
        return totals

    @property
    def tokens(self) -> int:
        """The tokens of both splits."""
        return sum(split["tokens"] for split in self.totals.values())

    def paths(self, folder: Path, split: str) -> list[Path]:
        """Return the files of a split."""
        return [self._path(folder, split, number) for number, shard in enumerate(self.shards) if split in shard.files]

    def _path(self, folder: Path, split: str, number: int) -> Path:
        shard = self.shards[number]
        if shard.section is None:
            return path(folder, split, number)
        return path(section_folder(folder, shard.section), split, shard.number)

    def with_shard(self, shard: Shard) -> "Manifest":
        return replace(self, shards=[*self.shards, shard])

    def write(self, folder: Path) -> None:
        """Write the file atomically."""
        content = asdict(self)
        shards = ",\n".join(f"  {json.dumps(shard)}" for shard in content.pop("shards"))  # one line each
        head = json.dumps(content | {"totals": self.totals}, indent=1).removesuffix("\n}")
        with replacing(folder / "manifest.json") as file:
            file.write(f'{head},\n "shards": [\n{shards}\n ]\n}}\n'.encode())

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read the manifest of a folder; raise FileNotFoundError if there is none, or ValueError if it is damaged."""
        file = folder / "manifest.json"
        try:
            fields = json.loads(file.read_text())
            del fields["totals"]
            for shard in fields["shards"]:
                shard["files"] = {split: ShardFile(**found) for split, found in shard["files"].items()}
            fields["shards"] = [Shard(**shard) for shard in fields["shards"]]
            return cls(**fields)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is damaged ({error}): delete {folder} to prepare it again") from error

    @classmethod
    def read_if_there(cls, folder: Path) -> "Manifest | None":
        """Read the manifest of a folder; return None if there is none."""
        try:
            return cls.read(folder)
        except FileNotFoundError:
            return None

    def missing(self, folder: Path) -> list[int]:
        """Return the numbers of the shards that lack a file; raise ValueError for a file of the wrong size."""
        missing, found = [], storage.sizes(folder)
        for number, split, file in self._files():
            name, expected = self._path(folder, split, number), file.tokens * np.dtype(self.dtype).itemsize
            actual = found.get(str(name)[len(str(folder)) :].lstrip("/"))
            if actual is None:
                missing.append(number)
            elif actual != expected:
                raise ValueError(f"{name} is damaged: it has {actual} bytes instead of {expected}; {REMEDY}")
        return list(dict.fromkeys(missing))

    def verify(self, folder: Path) -> None:
        """Check the sha256 of every file, with a progress bar; raise ValueError for a file that has changed."""
        files = list(self._files())

        def read(number: int, split: str) -> tuple[Path, str]:
            name = self._path(folder, split, number)
            with name.open("rb") as content:
                return name, hashlib.file_digest(content, "sha256").hexdigest()

        with ThreadPoolExecutor(VERIFIED_AT_ONCE) as pool:
            found = pool.map(lambda file: read(*file[:2]), files)
            shown = tqdm(found, "checking", len(files), unit="file", disable=None)
            for (name, digest), (*_, file) in zip(shown, files, strict=True):
                if digest != file.sha256:
                    raise ValueError(f"{name} is damaged: its sha256 is not that in manifest.json; {REMEDY}")

    def _files(self) -> Iterator[tuple[int, str, ShardFile]]:
        for number, shard in enumerate(self.shards):
            for split, file in shard.files.items():
                yield number, split, file


def section_folder(folder: Path, section: int) -> Path:
    return folder / f"section-{section:05d}"


def path(folder: Path, split: str, number: int) -> Path:
    return folder / f"{split}-{number:05d}.bin"
