"""Tokenisation of a corpus into shards. After an interruption, it continues after the last complete shard.

A large corpus is divided into sections that are prepared independently, by one process after one another or by several
machines that share a folder, with the same result.
"""

import contextlib
import errno
import logging
import platform
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from multiprocessing import current_process
from pathlib import Path

from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from data import hub, storage, tokenization
from data.encoding import Encoder, token_dtype, vocab_size
from data.manifest import TOKENIZER, VALIDATION, Manifest, Shard, section_folder
from data.recipe import Recipe, Section
from data.shards import OtherTokens, encoded_chunks, write_shard

log = logging.getLogger(__name__)


def prepare(recipe: Recipe, cache_dir: Path, processes: int) -> Path:
    """Prepare the tokens of a recipe, or finish their preparation; return their folder.

    The result does not depend on the number of processes or machines, nor on interruptions.
    """
    prepare_part(recipe, cache_dir, processes, 0, 1)
    return recipe.folder(cache_dir)


def prepare_part(recipe: Recipe, cache_dir: Path, processes: int, part: int, parts: int) -> int:
    """Do the work of one of several machines; return the number of sections that no machine has finished yet.

    Args:
        recipe: what to prepare, in `recipe.folder(cache_dir)`.
        cache_dir: folder that all machines share.
        processes: number of processes that tokenise; 0 means this process, with threads.
        part: number of this machine; it prepares the sections part, part + parts, part + 2 parts, and so on.
        parts: number of machines that share the work.
    """
    _check_script()
    folder = recipe.folder(cache_dir)
    if _is_whole(folder):  # before taking the lock, because the folder may belong to another user
        return 0
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _naming_a_full_disk():
        with storage.lock(storage.path(f"{folder}.lock")):  # one process builds, the others wait
            manifest = Manifest.read_if_there(folder) or _begin(recipe, folder)
            recipe = recipe.at_revision(manifest.revision)
            if manifest.sections == 1:
                if part == 0:
                    _prepare_section(recipe.whole(), folder, manifest, processes, load_tokenizer(manifest, folder))
                return int(not _is_whole(folder))
        sections = recipe.sections()
        if len(sections) != manifest.sections:
            raise ValueError(
                f"source {recipe.corpus.source!r} has {len(sections)} sections, but had {manifest.sections} when "
                f"{folder} was begun: delete that folder to prepare it again"
            )
        tokenizer = load_tokenizer(manifest, folder)
        for number in range(part, len(sections), parts):
            own = section_folder(folder, number)
            own.mkdir(parents=True, exist_ok=True)
            with storage.lock(storage.path(f"{own}.lock")):
                _prepare_section(sections[number], own, replace(manifest, sections=1), processes, tokenizer)
        with storage.lock(storage.path(f"{folder}.lock")):
            return _join(folder, manifest)


def load_tokenizer(manifest: Manifest, folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a prepared folder."""
    place = storage.local_folder(folder / TOKENIZER)
    if tokenization.folder_hash(place) != manifest.tokenizer["sha256"]:
        raise ValueError(f"{place} is not what the tokens were made with: delete {folder} to prepare it again")
    return tokenization.load(str(place))


def _check_script() -> None:
    """Raise RuntimeError in a child process that runs the script of its parent again, and would wait for its lock."""
    if getattr(current_process(), "_inheriting", False):  # multiprocessing checks this too, but only after the lock
        raise RuntimeError(
            'tokenising starts processes that import this script: put what it runs under `if __name__ == "__main__":`, '
            "or set prepare_processes=0"
        )


@contextlib.contextmanager
def _naming_a_full_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        message = "no space left; finished shards are kept, and the same command continues when there is some"
        raise OSError(errno.ENOSPC, message, error.filename) from error


def _is_whole(folder: Path) -> bool:
    manifest = Manifest.read_if_there(folder)
    return manifest is not None and manifest.complete and not manifest.missing(folder)


def _begin(recipe: Recipe, folder: Path) -> Manifest:
    """Write the tokenizer and a manifest without shards."""
    on_hub = recipe.corpus.files is None
    revision = hub.check("dataset", recipe.corpus.source, recipe.corpus.revision) if on_hub else None
    tokenizer = recipe.at_revision(revision).make_tokenizer()
    with tempfile.TemporaryDirectory() as local:
        tokenizer.save_pretrained(local)
        storage.upload(Path(local), folder / TOKENIZER)
        digest = tokenization.folder_hash(Path(local))
    about = {
        "name": recipe.tokenizer,
        "sha256": digest,
        "vocab_size": vocab_size(tokenizer),
        "end_of_text": tokenizer.eos_token_id,
    }
    versions = {name: version(name) for name in ("datasets", "tokenizers", "transformers", "numpy")}
    versions["python"] = platform.python_version()
    dtype = token_dtype(about["vocab_size"]).name
    sections = len(recipe.at_revision(revision).sections())
    manifest = Manifest(recipe.identity(), recipe.hash(), revision, about, dtype, versions, sections=sections)
    manifest.write(folder)
    return manifest


def _join(folder: Path, manifest: Manifest) -> int:
    """Write the manifest of all sections if all are complete; return how many are not."""
    places = [section_folder(folder, number) for number in range(manifest.sections)]
    if left := sum(not _is_whole(place) for place in places):
        return left
    shards = [
        Shard(shard.files, {}, section, number)
        for section, place in enumerate(places)
        for number, shard in enumerate(Manifest.read(place).shards)
    ]
    if not shards:
        raise ValueError(f"source {manifest.identity['source']!r} has no text")
    replace(manifest, complete=True, shards=shards).write(folder)
    return 0


def _prepare_section(
    section: Section, folder: Path, begun: Manifest, processes: int, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write the remaining shards of a section, and those whose files were deleted."""
    manifest = Manifest.read_if_there(folder) or begun
    missing = manifest.missing(folder)
    if not missing and manifest.complete:
        return
    encoder = Encoder(tokenizer)
    for number in missing:
        _write_again(section, folder, manifest, number, encoder, processes)
    if not manifest.complete:
        _write_remaining(section, folder, manifest, encoder, processes)


def _write_remaining(section: Section, folder: Path, manifest: Manifest, encoder: Encoder, processes: int) -> None:
    start = manifest.shards[-1].end if manifest.shards else None
    tokens, validation = manifest.tokens, manifest.totals[VALIDATION]["tokens"]
    size = manifest.identity["shard_tokens"]
    with (
        encoded_chunks(section, start, validation, encoder, processes) as chunks,
        _progress(f"tokenising {section.name}", tokens) as progress,
    ):
        since = time.perf_counter()
        while shard := write_shard(folder, len(manifest.shards), chunks, size, progress):
            manifest = manifest.with_shard(shard)
            manifest.write(folder)
            if progress.disable:  # without a terminal, print a line per shard for the log file
                speed = (manifest.tokens - tokens) / (time.perf_counter() - since)
                log.info("%s: %.4g tokens, %.3g/s", folder.name, manifest.tokens, speed)
    replace(manifest, complete=True).write(folder)


def _write_again(
    section: Section, folder: Path, manifest: Manifest, number: int, encoder: Encoder, processes: int
) -> None:
    """Write a shard whose files were deleted."""
    start = manifest.shards[number - 1].end if number else None
    validation = replace(manifest, shards=manifest.shards[:number]).totals[VALIDATION]["tokens"]
    size, expected = manifest.identity["shard_tokens"], manifest.shards[number].files
    try:
        with (
            encoded_chunks(section, start, validation, encoder, processes) as chunks,
            _progress(f"making shard {number} again", 0) as progress,
        ):
            write_shard(folder, number, chunks, size, progress, expected)
    except OtherTokens:
        raise ValueError(
            f"source {section.name!r} does not give what it gave when {folder} was made: delete that folder "
            "to prepare it again"
        ) from None


def _progress(what: str, tokens: int) -> tqdm:
    return tqdm(desc=what, unit=" tokens", unit_scale=True, initial=tokens, mininterval=0.5, disable=None)
