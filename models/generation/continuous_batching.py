"""Continuous batching: when the text of one row ends, the row is loaded with the next prompt at once."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch.nn import functional as F

from ..backbone import SequenceModel
from .decoder import SYNC_INTERVAL, Decoder
from .sampler import SamplingParams
from .transfers import PendingTokens

END_OF_TEXT, STOP_STRING, LENGTH = "end_of_text", "stop_string", "length"


@dataclass(frozen=True)
class StopConditions:
    """Conditions that end a text.

    Args:
        max_new_tokens: the text has this many tokens.
        tokens: the text ends with one of these tokens.
        stop: `stop(tokens, seen)` is called with all new tokens and the number of those that it has seen before. It
            returns the number of tokens after which the text ends, or None.
    """

    max_new_tokens: int
    tokens: frozenset[int] = frozenset()
    stop: Callable[[list[int], int], int | None] | None = None


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Args:
        tokens: token ids without padding.
        key: the random key of the text, see `row_random.keys`; needed for sampling.
        seen: tokens to penalize; needed with a repetition penalty.
    """

    tokens: Sequence[int]
    key: int = 0
    seen: Sequence[int] = ()


@dataclass
class Answer:
    """The new tokens after the prompt at `index`, including the token that ended the text, and why the text ended."""

    index: int
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None  # END_OF_TEXT, STOP_STRING or LENGTH; None: the text has not ended

    def extend(self, tokens: list[int], ends: StopConditions) -> None:
        """Append tokens up to the end of the text, and set the reason if the text ends."""
        before = len(self.tokens)
        self.tokens += tokens[: ends.max_new_tokens - before]
        if len(self.tokens) == ends.max_new_tokens:
            self.reason = LENGTH
        end = next((n for n, t in enumerate(self.tokens[before:], before + 1) if t in ends.tokens), None)
        if end is not None:
            self.tokens, self.reason = self.tokens[:end], END_OF_TEXT
        if ends.stop is not None and (end := ends.stop(self.tokens, before)) is not None:
            self.tokens, self.reason = self.tokens[:end], STOP_STRING


def answers(
    model: SequenceModel, prompts: Sequence[Prompt], params: SamplingParams, ends: StopConditions, slots: int
) -> Iterator[Answer]:
    """Yield the answer to each prompt as soon as it is complete.

    Args:
        model: a model that a Decoder supports (`unsupported_reason` returns None).
        prompts: prompts in the order in which they are started.
        params: how tokens are chosen.
        ends: when texts end.
        slots: number of texts generated at the same time.
    """
    if prompts:
        yield from _Scheduler(model, prompts, params, ends, min(slots, len(prompts))).run()


class _Scheduler:
    def __init__(
        self, model: SequenceModel, prompts: Sequence[Prompt], params: SamplingParams, ends: StopConditions, slots: int
    ) -> None:
        self.model, self.params, self.ends, self.slots = model, params, ends, slots
        self.device = model.embedding.weight.device
        self.capacity = max(len(prompt.tokens) for prompt in prompts) + ends.max_new_tokens
        self.waiting = deque(enumerate(prompts))
        self.free = list(range(slots))
        self.running: dict[int, Answer] = {}  # by row
        self.pending: deque[tuple[PendingTokens, dict[int, Answer]]] = deque()  # with the text of each column
        self.decoder: Decoder | None = None
        self.pads = all(getattr(block.mixer, "trains_with_resets", True) for block in model.blocks)

    def run(self) -> Iterator[Answer]:
        while self.waiting or self.running:
            # Reading prompts takes as long as many decoding steps, and a few prompts take as long as one.
            if self.waiting and (not self.running or len(self.free) >= max(1, self.slots // 8)):
                self._admit()
            synchronous = self.decoder.synchronous
            self.pending.append((self.decoder.advance(1 if synchronous else SYNC_INTERVAL), dict(self.running)))
            ahead = 0 if synchronous else 1  # the GPU computes the next tokens while the host reads earlier ones
            while len(self.pending) > ahead:
                yield from self._collect()

    def _admit(self) -> None:
        """Load waiting prompts into free rows."""
        number = min(len(self.free), len(self.waiting))
        admitted = [(self.free.pop(), *self.waiting.popleft()) for _ in range(number)]
        if self.pads:
            self._read(admitted)
            return
        admitted.sort(key=lambda one: len(one[2].tokens))
        for _, alike in groupby(admitted, key=lambda one: len(one[2].tokens)):
            self._read(list(alike))

    def _read(self, admitted: list[tuple[int, int, Prompt]]) -> None:
        """Read prompts as one batch, padded on the left, and load them into their rows."""
        rows, indices, prompts = zip(*admitted, strict=True)
        length = max(len(prompt.tokens) for prompt in prompts)
        padding = torch.tensor([length - len(prompt.tokens) for prompt in prompts])
        ids = torch.tensor([[0] * (length - len(prompt.tokens)) + list(prompt.tokens) for prompt in prompts])
        reset = F.one_hot(padding, length).bool().to(self.device) if padding.any() else None
        logits, states = self.model.read(ids.to(self.device), reset=reset)
        if self.decoder is None:
            self.decoder = Decoder(self.model, self.params, states, self.slots, self.capacity)
        keys = [prompt.key for prompt in prompts] if self.params.sample else None
        seen = [prompt.seen for prompt in prompts] if self.params.penalizes else None
        first = self.decoder.load(rows, logits, states, length, keys, seen)
        texts = [Answer(index) for index in indices]
        self.running.update(zip(rows, texts, strict=True))
        self.pending.append((first, dict(enumerate(texts))))

    def _collect(self) -> Iterator[Answer]:
        """Append the oldest pending tokens to their texts; yield the texts that end, and free their rows."""
        tokens, texts = self.pending.popleft()
        columns = tokens.read().T.tolist()
        for column, text in texts.items():
            if text.reason is None:
                text.extend(columns[column], self.ends)
                if text.reason is not None:
                    row = next(row for row, other in self.running.items() if other is text)
                    del self.running[row]
                    self.decoder.free(row)
                    self.free.append(row)
                    yield text
