"""Tokenizers from the hub or from a local folder, and byte-level BPE tokenizers trained on the corpus itself."""

import hashlib
import json
import re
import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from data import hub

TRAINED = re.compile(r"bpe:(\d+)")  # "bpe:2048" is a tokenizer of 2048 tokens trained on the corpus
BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")  # SentencePiece's token for a single byte
SMALLEST_BPE = 257  # all bytes, and the end-of-text token
END_OF_TEXT = "<|endoftext|>"


def identity(name: str) -> dict[str, str]:
    """Return what distinguishes this tokenizer from others: its name or, for a folder, a hash of its content."""
    return {"tokenizer": content_hash(load(name)) if Path(name).is_dir() else name}


def same(name: str, saved: Path) -> bool:
    """Return whether the tokenizer of this name exists and gives the same tokens as a saved one."""
    if trained_size(name) is not None:
        return False
    try:
        named = load(name)
    except (OSError, ValueError):
        return False
    return content_hash(named) == content_hash(load(str(saved)))


def content_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the sha256 of everything in a tokenizer that tokens depend on."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.sha256(f"{type(tokenizer).__name__} {tokenizer.eos_token_id} {rules}".encode()).hexdigest()


def trained_size(name: str) -> int | None:
    """Return 2048 for "bpe:2048"; None for a tokenizer that exists already."""
    match = TRAINED.fullmatch(name)
    if not match:
        if name == "bpe" or name.startswith("bpe:"):
            raise ValueError(f"tokenizer {name!r}: bpe: needs a number of tokens, such as bpe:2048")
        return None
    size = int(match[1])
    if size < SMALLEST_BPE:
        raise ValueError(f"tokenizer {name!r}: a byte-level BPE has at least {SMALLEST_BPE} tokens")
    return size


def train(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of at most `size` tokens (fewer if the texts have too few pairs to merge)."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    if (found := bpe.get_vocab_size()) < size:
        warnings.warn(f"tokenizer bpe:{size} has {found} tokens: the texts have no more pairs to merge", stacklevel=2)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TEXT)


def load(name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a local folder or with this name on the hub. Remote code is never run."""
    load_known = partial(AutoTokenizer.from_pretrained, name, trust_remote_code=False)
    try:
        tokenizer = load_known(local_files_only=True)
    except (OSError, ValueError) as error:
        if Path(name).is_dir():
            raise ValueError(f"tokenizer {name!r} is not a folder that save_pretrained() wrote: {error}") from error
        hub.check("tokenizer", name)
        if hub.offline():
            raise FileNotFoundError(
                f"tokenizer {name!r} is not in the local cache, and HF_HUB_OFFLINE is set; {hub.INSTEAD['tokenizer']}"
            ) from error
        tokenizer = load_known()
    return _checked(tokenizer, name)


def _checked(tokenizer: PreTrainedTokenizerBase, name: str) -> PreTrainedTokenizerBase:
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer {name!r} has no end-of-text token: set its eos_token")
    # A folder with missing files may load without an error as a tokenizer that only knows its special tokens.
    if not set(tokenizer("some text", add_special_tokens=False)["input_ids"]) - {
        tokenizer.unk_token_id,
        tokenizer.eos_token_id,
    }:
        raise ValueError(f"tokenizer {name!r} does not know any word: are its vocabulary files missing?")
    return tokenizer


def folder_hash(folder: Path) -> str:
    """Return the sha256 of the names and contents of a saved tokenizer's files."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Return the number of bytes of text that each token stands for, int64 [largest id + 1]; 0 for special tokens.

    This is exact for byte-level vocabularies, and for SentencePiece except for characters that its normaliser changes.
    """
    vocabulary = tokenizer.get_vocab()
    special = set(tokenizer.all_special_ids)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    byte_level = backend is not None and "ByteLevel" in json.dumps(json.loads(backend.to_str())["decoder"])
    sizes = np.zeros(max(vocabulary.values()) + 1, np.int64)
    for token, number in vocabulary.items():
        if number not in special:
            sizes[number] = len(token) if byte_level else _bytes_of_piece(token)
    return sizes


def _bytes_of_piece(piece: str) -> int:
    return 1 if BYTE_PIECE.fullmatch(piece) else len(piece.replace("▁", " ").encode())
