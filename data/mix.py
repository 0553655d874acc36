"""Language modelling on a weighted mix of several texts."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from data.mixing import Joined, MixedBlocks, MixedStream, Schedule
from data.streaming import StreamingDataModule
from data.text import Text


class Mix(StreamingDataModule):
    """Blocks of several `data.text.Text` in a random order, with a fraction of the samples proportional to its weight.

    A source that ends starts again, in a new order. All sources share the tokenizer of the first one; `bpe:...` trains
    it on that source. Validation covers all sources, and an evaluation also reports the perplexity on each.

    Args:
        sources: by name, a positive `weight` and the source's own arguments of `Text`: `source`, `column`, `subset`,
            `split`, `val_split`, `revision`, `max_bytes`.
        batch_size: blocks per device.
        num_workers: number of processes that load batches.
        seed: seed of all random orders.
        shared: the other arguments of `Text`, which all sources share.
    """

    may_change = Text.may_change
    metrics = Text.metrics

    def __init__(
        self,
        sources: Mapping[str, Mapping[str, Any]],
        *,
        batch_size: int = 8,
        num_workers: int = 0,
        seed: int = 0,
        **shared: Any,
    ):
        super().__init__(batch_size, num_workers, seed)
        if not sources:
            raise ValueError("sources is empty: add some, as in data.sources.web.source=... data.sources.web.weight=3")
        self.texts: dict[str, Text] = {}
        weights = []
        for name, own in sources.items():
            weights.append(_weight(name, own))
            options = {**shared, **own, "batch_size": batch_size, "num_workers": num_workers, "seed": seed}
            del options["weight"]
            self.texts[name] = Text(**options)
        self.weights = weights
        Schedule(weights, [seed])  # raises ValueError for impossible weights
        self._first, *self._others = self.texts.values()
        if self._first.stateful or self._first.eval_length:
            raise ValueError("stateful=true and eval_length are for one text: blocks of a mix do not follow each other")
        self.streaming = self._first.streaming
        self.folder = self._first.cache_dir  # contains a folder for each source
        self.tokenizer: PreTrainedTokenizerBase | None = None  # set by setup(), like the sizes

    def take_tokenizer(self, saved: Path) -> None:
        for text in self.texts.values():
            text.take_tokenizer(saved)

    def _share_tokenizer(self) -> None:
        for text in self._others:
            text.take_tokenizer(self._first.tokenizer_folder)

    def prepare_data(self) -> None:
        self._first.prepare_data()
        self._share_tokenizer()
        for text in self._others:
            text.prepare_data()

    def prepare_part(self, part: int, parts: int) -> int:
        left = self._first.prepare_part(part, parts)
        self._share_tokenizer()
        return left + sum(text.prepare_part(part, parts) for text in self._others)

    def setup(self, stage: str | None = None) -> None:
        self._first.setup(stage)
        self._share_tokenizer()  # again, because prepare_data is called by one process only
        for text in self._others:
            text.setup(stage)
        self.tokenizer = self._first.tokenizer
        self.vocab_size = self.num_classes = self._first.vocab_size

    def train_dataloader(self) -> DataLoader:
        if self.streaming:
            return self.streaming_loader()
        blocks = [text.train_data for text in self.texts.values()]
        return self.training_loader(MixedBlocks(blocks, Schedule(self.weights, [self.seed]), self.seed), None)

    def stream(self, reader: int, readers: int, position: dict | None) -> MixedStream:
        places = position["places"] if position else [None] * len(self.texts)
        streams = [
            text.stream(reader, readers, place, batch_size=1)
            for text, place in zip(self.texts.values(), places, strict=True)
        ]
        return MixedStream(streams, Schedule(self.weights, [self.seed, reader]), self.batch_size, position)

    def stream_identity(self) -> dict[str, Any]:
        return {name: text.stream_identity() for name, text in self.texts.items()} | {"weights": self.weights}

    def val_dataloader(self) -> DataLoader:
        joined = Joined([text.val_data for text in self.texts.values()])
        return self.evaluation_loader(joined, len(joined))

    @cached_property
    def bytes_per_label(self) -> float:
        """The average number of bytes of text per validation label, over all sources."""
        blocks = [len(text.val_data) for text in self.texts.values()]
        sizes = [text.bytes_per_label for text in self.texts.values()]
        return sum(number * size for number, size in zip(blocks, sizes, strict=True)) / sum(blocks)

    def samples(self, number: int, length: int) -> torch.Tensor:
        return self._first.samples(number, length)

    def evaluate(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
        """Return perplexity and bits per byte on all validation blocks, and on those of each source."""
        whole = _scores(trainer.validate(module, datamodule=self, verbose=False)[0])
        trainer.logger = None  # whose val/loss is that of all sources
        of_each = {
            name: _scores(trainer.validate(module, datamodule=text, verbose=False)[0])
            for name, text in self.texts.items()
        }
        return whole | {"sources": of_each}

    def prepared(self) -> dict[str, dict[str, int]]:
        self.prepare_data()
        return {f"{name}, {split}": total for name, t in self.texts.items() for split, total in t.prepared().items()}


def _weight(name: str, own: Mapping[str, Any]) -> float:
    if not isinstance(own, Mapping) or not isinstance(own.get("weight"), int | float) or "source" not in own:
        raise ValueError(
            f"sources.{name}={own}: expected a source and its weight, as in {{source: web.jsonl, weight: 1}}"
        )
    return float(own["weight"])


def _scores(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: metrics[f"val/{name}"] for name in Text.metrics}
