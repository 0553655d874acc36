"""Batches of blocks that are tokenised while a corpus is read, without storing it."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from data.corpora import Corpus, Documents, held_out
from data.encoding import Encoder, token_dtype
from data.module import ResumableDataModule, TimedLoader, outlive_signals
from data.packing import blocks_to_batch

DOCUMENTS_AT_ONCE = 64  # number of documents that are encoded together


class StreamedBlocks:
    """Endless batches from the documents of one reader, which starts again at the end of the corpus.

    Blocks are shuffled within consecutive windows of `shuffle_blocks` blocks, rounded up to whole batches. Files and
    documents are not shuffled. Each of several readers has its own documents: whole files, if their number is a
    multiple of the number of readers; otherwise every reader reads everything and keeps its share.

    The "position" of each batch is what a resumed run needs to continue after it: the position in the corpus where its
    window starts, the tokens read before but not used, and the number of batches used of the window, which is read
    again.
    """

    def __init__(
        self,
        corpus: Corpus,
        encoder: Encoder,
        batch_size: int,
        context_length: int,
        *,
        shuffle_blocks: int = 0,
        skip_fraction: float = 0.0,
        reset_at_documents: bool = False,
        seed: int = 0,
        reader: int = 0,
        readers: int = 1,
        position: dict | None = None,
    ):
        self.corpus = corpus
        self.encoder = encoder
        self.batch_size = batch_size
        self.context_length = context_length
        self.window_batches = max(1, -(-shuffle_blocks // batch_size))
        self.shuffle = shuffle_blocks > 0
        self.skip_fraction = skip_fraction  # fraction of the documents that are held out for validation
        self.reset_at = encoder.end_of_text if reset_at_documents else None
        self.seed = seed
        self.reader = reader
        self.readers = readers
        self.position = position

    def __iter__(self) -> Iterator[dict]:
        window, taken, place = 0, 0, None
        tokens = np.empty(0, token_dtype(self.encoder.vocab_size))
        if self.position is not None:
            window, taken, place = (self.position[key] for key in ("window", "taken", "documents"))
            tokens = self.position["tokens"].numpy().astype(tokens.dtype)
        source = self._read(place)
        window_tokens = self.window_batches * self.batch_size * self.context_length
        while True:
            position = {"window": window, "documents": place, "tokens": torch.from_numpy(tokens.astype(np.int32))}
            while len(tokens) <= window_tokens:
                new, place = next(source)
                tokens = np.concatenate([tokens, new])
            for batches, blocks in enumerate(self._batches(tokens, window), 1):
                if batches > taken:
                    batch = blocks_to_batch(blocks, self.reset_at)
                    yield batch | {"position": position | {"taken": batches}}
            window, taken, tokens = window + 1, 0, tokens[window_tokens:]

    def _read(self, place: dict[str, Any] | None) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
        """Yield tokens without end, starting at a position in the corpus, each time with the position after them."""
        while True:
            found = place is not None
            documents = Documents(self.corpus, reader=self.reader, readers=self.readers, position=place)
            while read := list(islice(documents, DOCUMENTS_AT_ONCE)):
                texts = [text for text in read if not held_out(text, self.skip_fraction)]
                found |= bool(texts)
                yield self.encoder(texts).tokens, documents.position
            if not found:
                raise ValueError(
                    f"source {self.corpus.source!r} has no text for reader {self.reader} of {self.readers}"
                )
            place = None

    def _batches(self, tokens: np.ndarray, window: int) -> Iterator[np.ndarray]:
        """Yield the batches of a window, each of tokens [batch_size, context_length + 1]."""
        order = np.arange(self.window_batches * self.batch_size)
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.reader, window]).permutation(order)
        for blocks in order.reshape(self.window_batches, self.batch_size):
            yield tokens[blocks[:, None] * self.context_length + np.arange(self.context_length + 1)]


class InTurn(IterableDataset):
    """Batches of several streams in turn, starting with stream `first`; each worker of a loader reads one stream.

    The key "stream" of each batch is the number of its stream.
    """

    def __init__(self, streams: Sequence[Iterable[dict]], first: int):
        self.streams = streams
        self.first = first

    def __iter__(self) -> Iterator[dict]:
        worker = get_worker_info()
        number = (self.first + (worker.id if worker else 0)) % len(self.streams)
        for batch in self.streams[number]:
            yield batch | {"stream": number}


class StreamingDataModule(ResumableDataModule):
    """A DataModule that may stream its training data, with every worker of every rank reading its own documents.

    The position of a rank consists of the positions of its workers and the number of the next worker. A resumed run
    needs the same numbers of ranks and workers.
    """

    streaming: bool

    def stream(self, reader: int, readers: int, position: dict | None) -> Iterable[dict]:
        """Return the batches of one of several readers, each with its position. Subclasses implement this."""
        raise NotImplementedError

    def stream_identity(self) -> dict[str, int | str]:
        """Return what a position in the stream depends on."""
        raise NotImplementedError

    @property
    def _workers(self) -> int:
        return max(1, self.num_workers)  # without workers, the main process reads the only stream

    def streaming_loader(self) -> DataLoader:
        workers = self._workers
        if not self._position:
            self._position = self._position_before = {"places": [None] * workers, "next": 0}
        readers = self.world_size * workers
        streams = [
            self.stream(self.rank * workers + number, readers, place)
            for number, place in enumerate(self._position["places"])
        ]
        return TimedLoader(
            InTurn(streams, self._position["next"]),
            batch_size=None,
            num_workers=self.num_workers,
            multiprocessing_context="spawn" if self.num_workers else None,  # the tokenizer's threads die in a fork
            persistent_workers=self.num_workers > 0,
            worker_init_fn=outlive_signals,
            pin_memory=torch.cuda.is_available(),
        )

    def _next_position(self, batch: dict) -> Any:
        if not self.streaming:
            return super()._next_position(batch)
        number, places = batch.pop("stream"), list(self._position["places"])
        places[number] = batch.pop("position")
        return {"places": places, "next": (number + 1) % len(places)}

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if not self.streaming:
            return state
        positions = [state["position"]]
        if self.world_size > 1:
            positions = [None] * self.world_size
            torch.distributed.all_gather_object(positions, state["position"])
        return state | {"position": positions, "stream": self.stream_identity() | {"workers": self._workers}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        position = state_dict["position"]
        if isinstance(position, list) != self.streaming:
            raise ValueError(f"streaming={self.streaming} now, but not in the run that wrote the checkpoint")
        if self.streaming:
            if len(position) != self.world_size:
                raise ValueError(
                    f"the checkpoint is of a run on {len(position)} ranks, this one has {self.world_size}; "
                    "with streaming=true they must be the same number"
                )
            before, now = state_dict["stream"], self.stream_identity() | {"workers": self._workers}
            keys = [key for key in now if before.get(key) != now[key]]
            if keys:
                differences = [f"{key}: {before.get(key)} in the checkpoint, {now[key]} now" for key in keys]
                raise ValueError(f"with streaming=true a run resumes only in the same stream; {'; '.join(differences)}")
            position = position[self.rank]
        super().load_state_dict({"position": position})
