"""Continuous batching: generate after many prompts; a row whose text has ended takes the next prompt at once."""

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
        max_new_tokens: its length.
        tokens: any of these tokens.
        stop: called with all new tokens of a text and how many of them it has seen before, returns after how many of
            them the text ends, or None.
    """

    max_new_tokens: int
    tokens: frozenset[int] = frozenset()
    stop: Callable[[list[int], int], int | None] | None = None


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Args:
        tokens: its tokens, without padding.
        key: of `row_random.keys`; read if tokens are sampled.
        seen: tokens that are penalized; read if there is a repetition penalty.
    """

    tokens: Sequence[int]
    key: int = 0
    seen: Sequence[int] = ()


@dataclass
class Answer:
    """The new tokens after the prompt at `index`, the one that ended the text included, and why the text ended."""

    index: int
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None  # END_OF_TEXT, STOP_STRING or LENGTH; None: it goes on

    def extend(self, tokens: list[int], ends: StopConditions) -> None:
        """Add tokens, up to the end."""
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
    """Yield the answer to each prompt when it has ended.

    Args:
        model: one for which `unsupported_reason` returns None.
        prompts: they are started in this order.
        params: how tokens are chosen.
        ends: when texts end.
        slots: how many texts are generated at a time.
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
        self.pending: deque[tuple[PendingTokens, dict[int, Answer]]] = deque()  # texts by their columns
        self.decoder: Decoder | None = None
        self.pads = all(getattr(block.mixer, "trains_with_resets", True) for block in model.blocks)

    def run(self) -> Iterator[Answer]:
        while self.waiting or self.running:
            # Reading a prompt takes as long as many steps, for one prompt as for a few.
            if self.waiting and (not self.running or len(self.free) >= max(1, self.slots // 8)):
                self._admit()
            synchronous = self.decoder.synchronous
            self.pending.append((self.decoder.advance(1 if synchronous else SYNC_INTERVAL), dict(self.running)))
            ahead = 0 if synchronous else 1  # tokens that are computed while the host looks at those before
            while len(self.pending) > ahead:
                yield from self._collect()

    def _admit(self) -> None:
        """Put waiting prompts into free rows."""
        number = min(len(self.free), len(self.waiting))
        admitted = [(self.free.pop(), *self.waiting.popleft()) for _ in range(number)]
        if self.pads:
            self._read(admitted)
            return
        admitted.sort(key=lambda one: len(one[2].tokens))
        for _, alike in groupby(admitted, key=lambda one: len(one[2].tokens)):
            self._read(list(alike))

    def _read(self, admitted: list[tuple[int, int, Prompt]]) -> None:
        """Read prompts together, padded on the left, and load them into their rows."""
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
        """Append the oldest pending tokens to their texts, and free the rows of the texts that end."""
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
