"""The decoding step of a model on static buffers. On a GPU, one CUDA graph appends a token to every row."""

from collections.abc import Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from flashrnn.decoding import ModelStep, copy_each

from ..backbone import SequenceModel, States
from ..mixers.step_context import StepContext
from ..walk import is_observed, modules
from .fused_step import fused_step
from .sampler import Sampler, SamplingParams
from .side_stream import capture, on_side_stream, slower_without_graph
from .state_buffers import buffers, first_visible, has_kv_cache, load, unload
from .transfers import PendingTokens, to_device

SYNC_INTERVAL = 8  # number of steps after which the host reads the tokens
_SHORTEST_WINDOW = 256


def unsupported_reason(model: SequenceModel) -> str | None:
    """Return why a Decoder does not support the model; None if it does."""
    without = {type(block.mixer).__name__ for block in model.blocks if not hasattr(block.mixer, "step")}
    if without:
        return f"{', '.join(sorted(without))} has no method step"
    if (module := next(filter(is_observed, modules(model)), None)) is not None:
        return f"{type(module).__name__} has forward hooks, which a decoding step does not call"
    return None


def rows_for(batch: int) -> int:
    """Return the number of rows of a Decoder for a batch on a GPU, rounded up so that few graphs are captured."""
    return 1 << (batch - 1).bit_length() if batch <= 64 else -(-batch // 64) * 64


class Decoder:
    """Append token after token to `rows` rows. Each row can be loaded with a new sequence at any time.

    Args:
        model: a model for which `unsupported_reason` returns None.
        params: how tokens are chosen.
        like: states of the format that the buffers are to hold.
        rows: number of sequences decoded at the same time.
        capacity: number of tokens of the longest sequence, including its prompt and the tokens computed before the host
            notices its end. Only mixers with a key-value cache use it.
    """

    @torch.inference_mode()
    def __init__(self, model: SequenceModel, params: SamplingParams, like: States, rows: int, capacity: int) -> None:
        self.model, self.rows, self.capacity = model, rows, capacity
        self.device = like[0][0].device
        on_gpu = self.device.type == "cuda"
        self._mixers = [block.mixer for block in model.blocks]
        self._states = [buffers(m, state, rows, capacity) for m, state in zip(self._mixers, like, strict=True)]
        self._context = StepContext(rows, capacity, self.device)
        self._has_kv_cache = any(map(has_kv_cache, self._mixers))
        self._steps = 0
        self._leads: dict[int, int] = {}  # by row: its position minus the number of steps
        self._token = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self._sampler = Sampler(params, rows, model.num_classes, self.device)
        self._recent = torch.zeros(2 * SYNC_INTERVAL, rows, dtype=torch.int64, device=self.device)
        self._cursor = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._half = 0
        # Autocast caches casts of weights between operators, which a graph would not repeat.
        captured = on_gpu and not torch.is_autocast_enabled("cuda")
        self._graphs: dict[int, torch.cuda.CUDAGraph] | None = {} if captured else None

    @property
    def synchronous(self) -> bool:
        """Whether `advance` returns only after its steps are done."""
        return self.device.type == "cpu"

    @torch.inference_mode()
    def load(
        self,
        rows: Sequence[int],
        logits: Tensor,
        states: States,
        length: int,
        keys: Sequence[int] | None = None,
        seen: Sequence[Sequence[int]] | None = None,
    ) -> PendingTokens:
        """Load sequences into the given rows and choose the first new token of each, on a GPU asynchronously.

        Args:
            rows: the row of each sequence.
            logits: [B, num_classes], the logits of the last position.
            states: the states that `SequenceModel.read` returned.
            length: number of tokens that were read, including padding.
            keys: the random keys of `row_random.keys`; needed for sampling.
            seen: the tokens of each sequence to penalize; needed with a repetition penalty.

        Returns:
            The first tokens, int64 [1, B].
        """
        index = to_device(rows, torch.int64, self.device)
        sampler = self._sampler.blank(len(rows))
        sampler.begin(keys, seen)
        tokens = sampler(logits)
        pending = PendingTokens(tokens[None])  # before all other work, because the caller waits for it
        for mixer, into, state in zip(self._mixers, self._states, states, strict=True):
            load(mixer, into, index, state)
        firsts = (first_visible(mixer, state) for mixer, state in zip(self._mixers, states, strict=True))
        first = next((first for first in firsts if first is not None), torch.zeros_like(index))
        self._context.position.index_fill_(0, index, length)
        self._context.first.index_copy_(0, index, first)
        for row in rows:
            self._leads[row] = length - self._steps
        self._token.index_copy_(0, index, tokens)
        self._sampler.put(index, sampler)
        return pending

    def free(self, *rows: int) -> None:
        """Mark these rows as free; their tokens are no longer read."""
        for row in rows:
            self._leads.pop(row, None)

    @torch.inference_mode()
    def advance(self, steps: int) -> PendingTokens:
        """Append `steps` tokens, at most SYNC_INTERVAL, to all rows, on a GPU asynchronously."""
        self._half = SYNC_INTERVAL - self._half
        part = slice(self._half, self._half + steps)
        self._cursor.fill_(self._half)
        for _ in range(steps):
            self._run()
            self._steps += 1
        return PendingTokens(self._recent[part])

    def states(self, batch: int) -> States:
        """Return copies of the states of the first `batch` rows in the format of SequenceModel.forward."""
        return [unload(m, s, batch, self._context) for m, s in zip(self._mixers, self._states, strict=True)]

    def _run(self) -> None:
        window = self._window()
        if self._graphs is not None and window not in self._graphs:
            self._capture(window)
        if self._graphs is None:
            self._step(window)
        else:
            self._graphs[window].replay()

    def _window(self) -> int:
        """Return how many positions the next step reads: a power of two, so that few graphs serve any length."""
        if not self._has_kv_cache:
            return self.capacity
        position = self._steps + max(self._leads.values(), default=-self._steps)
        return min(self.capacity, max(_SHORTEST_WINDOW, 1 << position.bit_length()))

    @cached_property
    def _fused(self) -> ModelStep | None:
        """The fused step, if there is one. Built on first use: a caller who needs one token does not wait for it."""
        return fused_step(self.model, self._states)

    def _step(self, window: int) -> None:
        sampler = self._sampler
        if self._fused is None:
            self._context.begin(window)
            logits, states = self.model.step(self._token, self._states, self._context)
            self._store(states)
            if self._has_kv_cache:
                self._context.tick()
        elif sampler.params.likeliest or sampler.params.draws_from_all:
            results = {"chosen": self._token, "history": self._recent, "cursor": self._cursor}
            self._fused(self._token, **results, keys=sampler.keys, temperature=sampler.temperature)
            return
        else:
            logits = self.model.head.weight.new_empty(self.rows, self.model.num_classes)
            self._fused(self._token, logits)
        sampler.append(logits, self._token, self._recent, self._cursor)

    def _store(self, states: States) -> None:
        """Store the states that the step has not updated in place, on a GPU with one kernel for all blocks."""
        parts = [
            pair
            for into, state in zip(self._states, states, strict=True)
            for pair in zip(into, state, strict=True)
            if pair[0] is not pair[1]
        ]
        if parts:
            copy_each(*map(list, zip(*parts, strict=True)))

    def _capture(self, window: int) -> None:
        """Capture a step, after a warm-up that compiles its kernels."""
        graph = None
        with slower_without_graph("a step"):
            if not self._graphs:
                self._warm_up(window)
            graph = capture(partial(self._step, window), self._pool)
        self._graphs = self._graphs | {window: graph} if graph else None

    def _warm_up(self, window: int) -> None:
        """Run a step, then restore everything that it has changed."""
        self._pool = torch.cuda.graph_pool_handle()
        tensors = self._changing()
        before = [tensor.clone() for tensor in tensors]
        with on_side_stream(self.device) as stream:
            self._step(window)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        copy_each(tensors, before)

    def _changing(self) -> list[Tensor]:
        """Return every tensor that a step changes."""
        own = [self._token, self._cursor, self._recent, self._context.position]
        of_sampler = [part for part in (self._sampler.keys, self._sampler.seen) if part is not None]
        return [*own, *of_sampler, *(part for state in self._states for part in state)]
