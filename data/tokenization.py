"""Text to token ids: a tokenizer of the hub, of a local folder, or a byte-level BPE trained on the corpus itself."""

import copy
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import huggingface_hub
import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from data.corpora import check_hub, fingerprint

# The threads that encode do not survive a fork: a forked rank has to encode without them or would wait forever. Left to
# itself, the library does the same, but prints a warning for every DataLoader worker.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
os.register_at_fork(after_in_child=lambda: os.environ.update(TOKENIZERS_PARALLELISM="false"))

TRAINED = re.compile(r"bpe:(\d+)")  # "bpe:2048": trained on the corpus, 2048 tokens
SMALLEST_BPE = 257  # all bytes and the end of text
END_OF_TEXT = "<|endoftext|>"

Encode = Callable[[list[str]], list[list[int]]]


def identity(name: str) -> dict[str, str]:
    """What tells this tokenizer from others without loading it."""
    if Path(name).is_dir():
        files = sorted(str(path.resolve()) for path in Path(name).iterdir() if path.is_file())
        return {"tokenizer": name, "tokenizer_files": fingerprint(files)}
    return {"tokenizer": name}


def trained_size(name: str) -> int | None:
    """2048 for "bpe:2048"; None for a tokenizer that exists already."""
    match = TRAINED.fullmatch(name)
    if not match:
        return None
    size = int(match[1])
    if size < SMALLEST_BPE:
        raise ValueError(f"tokenizer {name!r}: a byte-level BPE has at least {SMALLEST_BPE} tokens")
    return size


def train(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `size` tokens (fewer if the texts have too few pairs to merge)."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TEXT)


def load(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a local folder, or of this name on the hub."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError) as error:
        if Path(name).is_dir():
            raise ValueError(f"tokenizer {name!r} is not a folder that save_pretrained() wrote: {error}") from error
        check_hub("tokenizer", name)
        if huggingface_hub.constants.HF_HUB_OFFLINE:
            raise FileNotFoundError(
                f"tokenizer {name!r} is not in the local cache, and HF_HUB_OFFLINE is set; "
                "give a local folder, or bpe:2048 to train one"
            ) from error
        tokenizer = AutoTokenizer.from_pretrained(name)
    return _checked(tokenizer, name)


def _checked(tokenizer: PreTrainedTokenizerBase, name: str) -> PreTrainedTokenizerBase:
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer {name!r} has no end-of-text token: set its eos_token")
    # A folder with parts missing loads without an error as a tokenizer that knows its special tokens alone.
    if not set(encoder(tokenizer)(["some text"])[0]) - {tokenizer.unk_token_id, tokenizer.eos_token_id}:
        raise ValueError(f"tokenizer {name!r} does not know any word: are its vocabulary files missing?")
    return tokenizer


def vocab_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id (ids may have gaps)."""
    return max(tokenizer.get_vocab().values()) + 1


def encoder(tokenizer: PreTrainedTokenizerBase) -> Encode:
    """Documents to token ids, without special tokens; a document that spells one out means its letters."""
    if not tokenizer.is_fast:
        return lambda texts: tokenizer(
            texts, add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
        )["input_ids"]
    backend = copy.deepcopy(tokenizer.backend_tokenizer)  # directly: twice as fast as through transformers
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return lambda texts: [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
