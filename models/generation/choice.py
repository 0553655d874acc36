"""The choice of the next token from logits, in operators that a CUDA graph can hold."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.generation import noise


@dataclass(frozen=True)
class Choice:
    """How a token is chosen, with the meaning and the order that transformers' GenerationConfig gives these settings.

    Args:
        sample: draw tokens; otherwise the likeliest one is taken, and all settings but the penalty are without effect.
        temperature: logits are divided by it.
        top_k: draw from this many likeliest tokens; 0: from all.
        top_p: draw from the likeliest tokens that together have this probability.
        min_p: draw from tokens that have at least this share of the likeliest one's probability.
        repetition_penalty: what is above 1 makes tokens that were there already less likely.
    """

    sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def penalizes(self) -> bool:
        return self.repetition_penalty != 1


class Chooser:
    """A Choice for a vocabulary on a device, with what it needs to know of every row.

    Attributes:
        keys: int32 [rows, 1], see `noise`; None if nothing is drawn.
        seen: bool [rows, vocabulary], which tokens are penalized; None if none is.
    """

    def __init__(
        self, choice: Choice, rows: int, vocabulary: int, device: torch.device, constants: Tensor | None = None
    ) -> None:
        self.choice, self._vocabulary, self._device = choice, vocabulary, device
        self.keys = torch.zeros(rows, 1, dtype=torch.int32, device=device) if choice.sample else None
        self.seen = torch.zeros(rows, vocabulary, dtype=torch.bool, device=device) if choice.penalizes else None
        self._constants = noise.constants(vocabulary, device) if choice.sample and constants is None else constants

    def blank(self, rows: int) -> "Chooser":
        """Return another one for as many rows of the same vocabulary."""
        return Chooser(self.choice, rows, self._vocabulary, self._device, self._constants)

    def begin(self, keys: Sequence[int] | None, seen: Sequence[Sequence[int]] | None) -> None:
        """All rows start a sequence, with keys of `noise.keys` where tokens are drawn, and tokens that were seen."""
        if self.keys is not None:
            self.keys.copy_(torch.tensor(keys, dtype=torch.int32)[:, None])
        if self.seen is not None:
            for row, tokens in zip(self.seen, seen, strict=True):
                row[torch.tensor(tokens, dtype=torch.int64, device=row.device)] = True

    def put(self, rows: Tensor, other: "Chooser") -> None:
        """Take over what another one knows as that of these rows, int64."""
        if self.keys is not None:
            self.keys.index_copy_(0, rows, other.keys)
        if self.seen is not None:
            self.seen.index_copy_(0, rows, other.seen)

    def __call__(self, logits: Tensor) -> Tensor:
        """Return a token for each row, int64 [rows], from logits [rows, vocabulary]; keys and seen tokens move on."""
        scores = logits
        if self.seen is not None:
            scores = self._penalized(scores.float())
        tokens = self._drawn(scores.float()) if self.choice.sample else scores.argmax(-1)
        if self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], True)
        return tokens

    def _penalized(self, scores: Tensor) -> Tensor:
        penalty = self.choice.repetition_penalty
        return torch.where(self.seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)

    def _drawn(self, scores: Tensor) -> Tensor:
        """The winner of a race: the time of a token of weight w is exponential with mean 1 / w."""
        scores, tokens = self._candidates(scores / self.choice.temperature)
        entries = self._constants if tokens is None else self._constants[tokens]
        times = noise.exponential(self.keys, entries)
        noise.next_keys_(self.keys)
        winners = (scores - times.log_()).argmax(-1, keepdim=True)
        return (winners if tokens is None else tokens.gather(-1, winners)).squeeze(-1)

    def _candidates(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """The scores that may be drawn, minus infinity for those that may not, and their tokens; None: all in order."""
        choice, tokens = self.choice, None
        if 0 < choice.top_k < scores.shape[-1]:
            scores, tokens = scores.topk(choice.top_k)
        elif choice.top_p < 1:
            scores, tokens = scores.sort(dim=-1, descending=True)
        if choice.top_p < 1:
            probabilities = scores.softmax(-1)
            likelier = probabilities.cumsum(-1) - probabilities
            likelier[:, 0] = 0  # there is always one to draw
            scores = scores.masked_fill(likelier >= choice.top_p, -math.inf)
        if choice.min_p > 0:
            scores = scores.masked_fill(scores < scores.amax(-1, keepdim=True) + math.log(choice.min_p), -math.inf)
        return scores, tokens
