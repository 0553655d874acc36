"""Encoding of documents as token ids, in order, in this process or in several.

Worker processes import only this file and what unpickling a tokenizer needs, so that they start fast.
"""

import copy
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The tokenizer's threads do not survive a fork, and a forked rank that used them would wait forever. The library
# switches them off after a fork too, but prints a warning for every DataLoader worker.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: os.environ.update(TOKENIZERS_PARALLELISM="false"))

AHEAD = 4  # queued chunks per process, enough to keep all of them busy


class HasTexts(Protocol):
    texts: list[str]


Chunk = TypeVar("Chunk", bound=HasTexts)


class Encoded(NamedTuple):
    tokens: np.ndarray  # [sum of lengths], uint16 or uint32: all documents, each followed by the end-of-text token
    lengths: np.ndarray  # [documents], int64


def token_dtype(vocab_size: int) -> np.dtype:
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def vocab_size(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the largest token id plus one; ids may have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


class Encoder:
    """Encodes documents as token ids, each document followed by the end-of-text token. It can be pickled.

    No other special tokens are added, and the name of a special token within a document is encoded as ordinary text.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self.end_of_text: int = tokenizer.eos_token_id
        self.vocab_size = vocab_size(tokenizer)
        self._tokenizer = tokenizer
        if tokenizer.is_fast:  # calling its Rust core directly is twice as fast as through transformers
            self._tokenizer = copy.deepcopy(tokenizer.backend_tokenizer)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self._tokenizer.encode_special_tokens = True
        self._is_fast = tokenizer.is_fast

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each document, without the end-of-text token."""
        if self._is_fast:
            # not encode_batch_fast, which omits offsets but took 0.9 to 1.6 times as long, depending on the process
            return [encoding.ids for encoding in self._tokenizer.encode_batch(texts, add_special_tokens=False)]
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        return self._tokenizer(list(texts), split_special_tokens=True, **options)["input_ids"]

    def __call__(self, texts: Sequence[str]) -> Encoded:
        flat: list[int] = []
        lengths = []
        for ids in self.ids(texts):
            flat += ids
            flat.append(self.end_of_text)
            lengths.append(len(ids) + 1)
        tokens = np.array(flat, np.int64)
        largest = int(tokens.max(initial=0))
        if largest >= self.vocab_size:
            raise ValueError(f"the tokenizer gave token {largest}, but its vocabulary ends at {self.vocab_size - 1}")
        return Encoded(tokens.astype(token_dtype(self.vocab_size)), np.array(lengths, np.int64))


def encode_in_order(chunks: Iterable[Chunk], encoder: Encoder, processes: int) -> Iterator[tuple[Chunk, Encoded]]:
    """Yield every chunk with the tokens of its texts, in order.

    Args:
        chunks: chunks of texts.
        encoder: the encoder, which is copied to the processes.
        processes: number of processes; 0 means this process, with threads.
    """
    if processes == 0:
        for chunk in chunks:
            yield chunk, encoder(chunk.texts)
        return
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _start_worker, (encoder,))
    waiting: deque[tuple[Chunk, Future[Encoded]]] = deque()
    try:
        for chunk in chunks:
            waiting.append((chunk, pool.submit(_encode, chunk.texts)))
            if len(waiting) > AHEAD * processes:
                chunk, encoded = waiting.popleft()
                yield chunk, encoded.result()
        for chunk, encoded in waiting:
            yield chunk, encoded.result()
    except BrokenProcessPool as error:
        raise ChildProcessError(
            f"one of the {processes} tokenising processes ended. Without a message above it was killed, most often for "
            "want of memory: use fewer (data.prepare_processes). Finished shards are kept; the same command continues"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(encoder: Encoder) -> None:
    global _encode_here
    _encode_here = encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # use one thread per process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the main process ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent_process().join()
    os._exit(1)


def _encode(texts: list[str]) -> Encoded:
    return _encode_here(texts)
