"""Reading the prompt of one sequence on a GPU in pieces, with a CUDA graph for every piece size that is used again.

A piece takes about 90 kernels, and some hosts need longer to launch them than the GPU to run them. A graph needs one
launch. It runs on a second stream, so that meanwhile the host can prepare the next work and wait for other copies. To
keep the number of sizes small, the first piece is padded on the left, and states are reset where the prompt begins.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from flashrnn.decoding import copy_each

from .. import fused_blocks
from ..backbone import SequenceModel, States
from ..walk import modules
from .captured import captured
from .side_stream import capture, on_side_stream, slower_without_graph

_DEVICE = "cuda"
_SIZES = (1024, 512, 256, 128)  # tokens per captured piece; each is a multiple of the smaller ones


class ReadingPrompt:
    """A prompt that the GPU is reading on a second stream."""

    def __init__(self, stream: torch.cuda.Stream, logits: Tensor, states: States) -> None:
        self._stream, self._logits, self._states = stream, logits, states

    def result(self) -> tuple[Tensor, States]:
        """Return the result of `SequenceModel.read`, and let the current stream wait for it."""
        current = self.finish()
        for tensor in (self._logits, *(part for state in self._states for part in state)):
            tensor.record_stream(current)
        return self._logits, self._states

    def finish(self) -> torch.cuda.Stream:
        """Let the current stream wait until the prompt has been read, and return it."""
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_stream(self._stream)
        return current


class PromptReader:
    """Reads prompts and caches the graphs of the model used last. A copy starts without graphs."""

    def __init__(self) -> None:
        self._captured: tuple = ()  # what the graphs depend on, see `captured`
        self._forget()

    def _forget(self) -> None:
        # By size and whether there is padding; None for a piece that was read once, or that cannot be captured.
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph | None] = {}
        self._pool = None
        self._failed = False
        # The static tensors that graphs read and write, created after the first piece.
        self._ids = self._reset = self._last = self._states = self._zeros = None

    def __deepcopy__(self, memo: dict) -> "PromptReader":
        return PromptReader()

    def __reduce__(self) -> tuple:
        return PromptReader, ()

    def read(
        self, model: SequenceModel, input_ids: Tensor, states: States | None, reset: Tensor | None
    ) -> tuple[Tensor, States]:
        """Return the result of `SequenceModel.read`."""
        reading = None if reset is not None else self.begin(model, input_ids, states)
        return model.read(input_ids, states, reset) if reading is None else reading.result()

    def begin(self, model: SequenceModel, input_ids: Tensor, states: States | None = None) -> ReadingPrompt | None:
        """Start reading the tokens of one sequence on a GPU.

        Return None if this is not supported: on other devices, for larger batches, for blocks that `fused_blocks` does
        not serve, and for few more tokens of a sequence that has states.

        Args:
            model: a model on the device of the tokens.
            input_ids: int64 [1, T].
            states: as in `SequenceModel.read`.
        """
        B, T = input_ids.shape
        if input_ids.device.type != _DEVICE or B > 1 or torch.cuda.is_current_stream_capturing():
            return None
        if states is not None and min(_SIZES) > T:
            return None
        all_modules = modules(model)
        if (plain := fused_blocks.served(model, all_modules)) is None:
            return None
        if (now := captured(all_modules)) != self._captured:
            self._captured = now
            self._forget()
        # Tensors that outlive the call must not be inference tensors.
        with on_side_stream(input_ids.device) as stream, torch.inference_mode(False), torch.no_grad():
            return ReadingPrompt(stream, *self._read(model, plain, input_ids, states))

    def _read(
        self, model: SequenceModel, plain: list[fused_blocks.PlainBlock], ids: Tensor, states: States | None
    ) -> tuple[Tensor, States]:
        # Given states cannot be reset, so there is no padding then: the last piece has the remaining tokens.
        padding = -ids.shape[1] % min(_SIZES) if states is None else 0
        end = -padding
        for size in _sizes(ids.shape[1] + padding):
            part, padded, end = ids[:, max(end, 0) : end + size], end < 0, end + size
            if (graph := self._graph(model, plain, size, padded)) is not None:
                self._load(states, part, size)
                graph.replay()
                x, states = self._last, self._states
                continue
            x, states = self._read_eagerly(model, plain, part, size, states)
        if states is self._states:  # the next prompt overwrites these
            states = [tuple(map(torch.empty_like, state)) for state in states]
            copy_each(_parts(states), _parts(self._states))
        return fused_blocks.logits(x, model.head), states

    def _read_eagerly(
        self, model: SequenceModel, plain: list[fused_blocks.PlainBlock], part: Tensor, size: int, states: States | None
    ) -> tuple[Tensor, States]:
        """Read one piece without a graph; return the last hidden state and the states.

        The next piece of this size can then be captured.
        """
        padding, reset = size - part.shape[1], None
        if padding:
            part = F.pad(part, (padding, 0))
            reset = torch.zeros_like(part, dtype=torch.bool)
            reset[:, padding] = True
        x, states = model.fused_hidden_states(plain, part, states, reset)
        x = x[:, -1].clone()  # frees the other positions before the next piece is read
        if size in _SIZES:
            self._graphs.setdefault((size, padding > 0))
        if self._states is None:
            self._ids = part.new_zeros(1, _SIZES[0])
            self._reset = torch.zeros_like(self._ids, dtype=torch.bool)
            self._last, self._states, self._zeros = torch.zeros_like(x), _zeros_like(states), _zeros_like(states)
        return x, states

    def _load(self, states: States | None, part: Tensor, size: int) -> None:
        """Copy states and tokens into the static tensors that the next graph reads."""
        padding = size - part.shape[1]
        self._ids[:, padding:size].copy_(part)
        if padding:
            self._reset.zero_()
            self._reset[:, padding] = True
        if states is None:
            copy_each(_parts(self._states), _parts(self._zeros))
        elif states is not self._states:
            copy_each(_parts(self._states), _parts(states))

    def _graph(
        self, model: SequenceModel, plain: list[fused_blocks.PlainBlock], size: int, padded: bool
    ) -> torch.cuda.CUDAGraph | None:
        """Return the graph of a piece, capturing it on the second use; None if there is none."""
        key = size, padded
        if self._graphs.get(key) is not None or key not in self._graphs or self._failed:
            return self._graphs.get(key)
        with slower_without_graph("reading a prompt"):
            self._graphs[key] = self._capture(model, plain, size, padded)
        self._failed = self._graphs[key] is None
        return self._graphs[key]

    def _capture(
        self, model: SequenceModel, plain: list[fused_blocks.PlainBlock], size: int, padded: bool
    ) -> torch.cuda.CUDAGraph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.current_stream(self._ids.device)
        return capture(partial(self._read_piece, model, plain, size, padded), self._pool, stream)

    def _read_piece(self, model: SequenceModel, plain: list[fused_blocks.PlainBlock], size: int, padded: bool) -> None:
        reset = self._reset[:, :size] if padded else None  # the recurrence takes 7 % longer with a mask
        x, states = model.fused_hidden_states(plain, self._ids[:, :size], self._states, reset)
        self._last.copy_(x[:, -1])
        copy_each(_parts(self._states), _parts(states))


def _sizes(length: int) -> Iterator[int]:
    """Yield the sizes of the pieces of a prompt, the largest first."""
    for size in _SIZES:
        while length >= size:
            yield size
            length -= size
    if length:
        yield length


def _parts(states: States) -> list[Tensor]:
    return [part for state in states for part in state]


def _zeros_like(states: States) -> States:
    return [tuple(map(torch.zeros_like, state)) for state in states]
