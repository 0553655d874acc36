"""Sampling of the next token from logits, with operators that a CUDA graph can capture."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashrnn.decoding import choose, unsupported_choice

from . import row_random
from .transfers import to_device


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen: the settings of transformers' GenerationConfig, applied in the same order.

    Args:
        sample: draw tokens at random. Otherwise the likeliest token is taken, and of the other settings only the
            repetition penalty has an effect.
        temperature: logits are divided by it.
        top_k: draw only from the `top_k` likeliest tokens; 0 means from all.
        top_p: draw only from the likeliest tokens that together have this probability.
        min_p: draw only from tokens with at least this fraction of the likeliest token's probability.
        repetition_penalty: values above 1 make tokens that have occurred before less likely.
    """

    sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def likeliest(self) -> bool:
        """Whether the token with the largest logit is always taken."""
        return not (self.sample or self.penalizes)

    @property
    def draws_from_all(self) -> bool:
        """Whether tokens are drawn from the whole vocabulary with the probabilities of the logits."""
        return self.sample and not (self.top_k or self.top_p < 1 or self.min_p or self.penalizes)

    @property
    def penalizes(self) -> bool:
        return self.repetition_penalty != 1


class Sampler:
    """Chooses the next token of every row as SamplingParams specify.

    Attributes:
        keys: int32 [rows, 1], the random keys of the rows (see `row_random`); None without sampling.
        temperature: float32 [1], the temperature of the params.
        seen: bool [rows, vocabulary], the tokens to penalize; None without a repetition penalty.
    """

    def __init__(
        self, params: SamplingParams, rows: int, vocabulary: int, device: torch.device, constants: Tensor | None = None
    ) -> None:
        self.params, self._vocabulary, self._device = params, vocabulary, device
        self.keys = torch.zeros(rows, 1, dtype=torch.int32, device=device) if params.sample else None
        least = math.log(params.min_p) if params.min_p else -math.inf
        settings = [params.temperature, params.top_p, least, params.repetition_penalty]
        self._settings = to_device(settings, torch.float32, device)
        self._counter = torch.zeros(1, dtype=torch.int32, device=device)
        self.temperature = self._settings[:1]
        self.seen = torch.zeros(rows, vocabulary, dtype=torch.bool, device=device) if params.penalizes else None
        self._constants = row_random.constants(vocabulary, device) if params.sample and constants is None else constants

    def blank(self, rows: int) -> "Sampler":
        """Return a new Sampler with the same settings for `rows` rows."""
        return Sampler(self.params, rows, self._vocabulary, self._device, self._constants)

    def begin(self, keys: Sequence[int] | None, seen: Sequence[Sequence[int]] | None) -> None:
        """Start a sequence in every row, with the keys of `row_random.keys` and the seen tokens, if they are used."""
        if self.keys is not None:
            self.keys.copy_(to_device(keys, torch.int32, self._device)[:, None])
        if self.seen is not None:
            for row, tokens in zip(self.seen, seen, strict=True):
                row.index_fill_(0, to_device(tokens, torch.int64, self._device), True)

    def put(self, rows: Tensor, other: "Sampler") -> None:
        """Copy the state of another Sampler into these rows, int64."""
        if self.keys is not None:
            self.keys.index_copy_(0, rows, other.keys)
        if self.seen is not None:
            self.seen.index_copy_(0, rows, other.seen)

    def append(self, logits: Tensor, tokens: Tensor, history: Tensor, cursor: Tensor) -> None:
        """Choose a token for each row, as `__call__` does, but in place and on a GPU in one kernel.

        Args:
            logits: [rows, vocabulary].
            tokens: int64 [rows], receives the tokens.
            history: int64 [H, rows], receives the tokens in its row `cursor`.
            cursor: int64 [1], incremented by one.
        """
        if not self.params.likeliest and unsupported_choice(logits) is None:  # argmax is faster at large batches
            fixed = {"counter": self._counter, "settings": self._settings, "top_k": self.params.top_k}
            choose(logits, tokens, **fixed, keys=self.keys, seen=self.seen, history=history, cursor=cursor)
            return
        tokens.copy_(self(logits))
        history.index_copy_(0, cursor, tokens[None])
        cursor.add_(1)

    def __call__(self, logits: Tensor) -> Tensor:
        """Return a token for each row, int64 [rows], given logits [rows, vocabulary]; update keys and seen tokens."""
        scores = logits
        if self.seen is not None:
            scores = self._penalized(scores.float())
        tokens = self._drawn(scores.float()) if self.params.sample else scores.argmax(-1)
        if self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], True)
        return tokens

    def _penalized(self, scores: Tensor) -> Tensor:
        penalty = self.params.repetition_penalty
        return torch.where(self.seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)

    def _drawn(self, scores: Tensor) -> Tensor:
        """Sample by an exponential race (Gumbel-max trick): the arrival time of a token of weight w has mean 1 / w."""
        temperature = self.params.temperature
        scores, tokens = self._candidates(scores if temperature == 1 else scores / temperature)
        entries = self._constants if tokens is None else self._constants[tokens]
        times = row_random.exponential(self.keys, entries)
        row_random.next_keys_(self.keys)
        winners = (scores - times.log_()).argmax(-1, keepdim=True)
        return (winners if tokens is None else tokens.gather(-1, winners)).squeeze(-1)

    def _candidates(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the scores of the candidates (-inf if excluded) and their tokens, or None for all tokens in order."""
        params, tokens = self.params, None
        if 0 < params.top_k < scores.shape[-1]:
            scores, tokens = scores.topk(params.top_k)
        elif params.top_p < 1:
            scores, tokens = scores.sort(dim=-1, descending=True)
        if params.top_p < 1:
            probabilities = scores.softmax(-1)
            likelier = probabilities.cumsum(-1) - probabilities
            likelier[:, 0] = 0  # always keep the likeliest token
            scores = scores.masked_fill(likelier >= params.top_p, -math.inf)
        if params.min_p > 0:
            scores = scores.masked_fill(scores < scores.amax(-1, keepdim=True) + math.log(params.min_p), -math.inf)
        return scores, tokens
