"""Causal self-attention with rotary position embedding and a key-value cache."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .step_context import StepContext, rotary_frequencies

# Without cuDNN, which makes a new plan for every length of the cache: 50 ms per token instead of 12 on an H100.
_BACKENDS_FOR_CACHE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@torch.library.custom_op("models::rotary_angles", mutates_args=())
def rotary_angles(positions: Tensor, D: int, base: float) -> Tensor:
    """Return the cosines and sines of the rotary embedding at int64 positions [...], float32 [2, ..., D/2].

    This is a custom operator because torch.compile would otherwise fuse the sines into the product and recompute them
    for every element; all layers of a compiled model share one call. It is not a buffer because a buffer would be lost
    when a model is built on the meta device.
    """
    angles = positions.to(torch.float32)[..., None] * rotary_frequencies(D, base, positions.device)
    return torch.stack((angles.cos(), angles.sin()))


@rotary_angles.register_fake
def _(positions: Tensor, D: int, base: float) -> Tensor:
    return torch.empty(2, *positions.shape, D // 2, dtype=torch.float32, device=positions.device)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Return x [B, N, T, D] rotated by `angles` (cosines and sines, such as [2, T, D/2]), computed in float32."""
    cos, sin = angles
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class AttentionMixer(nn.Module):
    """Multi-head causal self-attention over all tokens or a sliding window of them, with 4 d² parameters.

    The state is (keys [B, N, L, D], values [B, N, L, D], position [B]): the keys and values of the last L tokens (with
    a window, at most window - 1) and the position of the next token. After resets it also contains start [B], the first
    position of the current document, because a token attends only to tokens of its own document.

    Args:
        d_model: width of input and output.
        num_heads: number of heads; d_model / num_heads must be even, because the rotary embedding rotates pairs.
        rope_base: base of the rotary frequencies. None means no rotary embedding, for hybrid models, whose recurrent
            blocks encode the position.
        window: number of tokens that a token attends to, including itself; None means all. Longer sequences use a mask,
            which takes as long as attention over all tokens.
        block_index: index of the block in the backbone; unused, part of the mixer interface.
        num_blocks: number of blocks; unused, part of the mixer interface.
    """

    carries_state = False

    def __init__(
        self,
        d_model: int,
        num_heads: int = 12,
        rope_base: float | None = 10_000.0,
        window: int | None = None,
        block_index: int = 0,
        num_blocks: int = 1,
    ) -> None:
        super().__init__()
        if num_heads < 1 or d_model % (2 * num_heads):
            raise ValueError(
                f"d_model={d_model} with num_heads={num_heads}: d_model must be an even multiple of num_heads "
                "(rotary embedding needs an even head size)"
            )
        if window is not None and window < 1:
            raise ValueError(f"window={window}: expected at least 1 token, or null for attention over all")
        self.num_heads = num_heads
        self.rope_base = rope_base
        self.window = window
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(
        self, x: Tensor, state: tuple[Tensor, ...] | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        B, T, d = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.num_heads, d // self.num_heads).permute(2, 0, 3, 1, 4)  # [B, N, T, D]
        first = x.new_zeros(B, dtype=torch.int64) if state is None else state[2]
        if self.rope_base is not None:
            steps = torch.arange(T, device=x.device)
            # Without a state, all sequences share the same angles.
            positions = steps if state is None else first[:, None, None] + steps
            angles = rotary_angles(positions, d // self.num_heads, self.rope_base)
            q, k = rotate(q, angles), rotate(k, angles)

        past = 0 if state is None else state[0].shape[-2]
        if past:
            k, v = torch.cat((state[0], k), dim=-2), torch.cat((state[1], v), dim=-2)
        starts = _document_starts(state, reset, first, T)
        windowed = self.window is not None and self.window < past + T
        if past == 0 and starts is None and not windowed:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            alone = T == 1 and starts is None and not windowed
            mask = None if alone else self._mask(starts, first, past, T, x.device)
            with sdpa_kernel(_BACKENDS_FOR_CACHE):
                y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        if self.window is not None:
            k, v = (part[:, :, max(0, past + T + 1 - self.window) :] for part in (k, v))
        last = () if starts is None else (starts[:, -1],)
        return self.out(y.transpose(1, 2).reshape(B, T, d)), (k, v, first + T, *last)

    def step(
        self, x: Tensor, state: tuple[Tensor, ...], context: StepContext, residual: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Process one token, as described in `models.mixers`; `state` is a cache of `empty_cache`, updated in place."""
        keys, values = state
        (B, d), N, slots = x.shape, self.num_heads, keys.shape[2]
        slot = (context.position % slots)[:, None, None, None]
        heads = self.qkv(x).view(B, 3 * N, d // N)
        q_and_k = heads[:, : 2 * N]
        if self.rope_base is not None:
            q_and_k = rotate(q_and_k, context.angles(d // N, self.rope_base))
        q, k = q_and_k.view(B, 2, N, 1, d // N).unbind(1)
        slot = slot.expand_as(k)
        keys.scatter_(2, slot, k)
        values.scatter_(2, slot, heads[:, 2 * N :].unsqueeze(2))
        read = min(context.window, slots)
        with sdpa_kernel(_BACKENDS_FOR_CACHE):
            y = F.scaled_dot_product_attention(
                q, keys[:, :, :read], values[:, :, :read], attn_mask=context.visible(read, slots)
            )
        return residual + self.out(y.view(B, d)), state

    def empty_cache(self, state: tuple[Tensor, ...], rows: int, capacity: int) -> tuple[Tensor, ...]:
        """Return empty caches of keys and values [rows, N, slots, D] for `step`, with dtype and device of `state`.

        The token at position p is stored in slot p % slots. The number of slots is `capacity`, the largest number of
        positions, or the length of the window if that is smaller.
        """
        _, N, _, D = state[0].shape
        slots = capacity if self.window is None else min(capacity, self.window)
        return tuple(part.new_zeros(rows, N, slots, D) for part in state[:2])

    @staticmethod
    def load_cache(buffers: tuple[Tensor, ...], rows: Tensor, state: tuple[Tensor, ...]) -> None:
        """Copy the state of several sequences into the given rows (int64) of the cache."""
        positions = _cached_positions(state[2], state[0].shape[2])
        for buffer, part in zip(buffers, state[:2], strict=True):
            buffer[rows[:, None], :, positions % buffer.shape[2]] = part.transpose(1, 2)

    def cached_state(self, buffers: tuple[Tensor, ...], rows: int, context: StepContext) -> tuple[Tensor, ...]:
        """Return the state of the first `rows` rows in the format of `forward`; all have read equally many tokens."""
        position = context.position[:rows].clone()
        length = int(position[0])
        kept = length if self.window is None else min(length, self.window - 1)
        slots = _cached_positions(position[:1], kept)[0] % buffers[0].shape[2]
        state = *(buffer[:rows, :, slots] for buffer in buffers), position
        first = context.first[:rows]
        return (*state, first.clone()) if first.any() else state

    @staticmethod
    def first_visible(state: tuple[Tensor, ...]) -> Tensor | None:
        """Return the first position of each sequence's last document, int64 [B]; None if it is 0 for all."""
        return state[3] if len(state) == 4 else None

    def flops_per_token(self, T: int) -> float:
        """Return the operations per token of scores and weighted sums over T tokens, forward and backward.

        As in PaLM, the half that the causal mask hides is counted.
        """
        return 12.0 * (T if self.window is None else min(T, self.window)) * self.out.in_features

    def _mask(self, starts: Tensor | None, first: Tensor, past: int, T: int, device: torch.device) -> Tensor:
        """Return a mask that is True where one of the last T tokens attends to one of all past + T tokens.

        Later tokens, tokens before the window and tokens of earlier documents are excluded. The shape is [T, past + T],
        or [B, 1, T, past + T] with documents.
        """
        mask = torch.ones(T, past + T, dtype=torch.bool, device=device).tril(diagonal=past)
        if self.window is not None:
            mask = mask.triu(diagonal=past + 1 - self.window)
        if starts is None:
            return mask
        positions = _cached_positions(first + T, past + T)
        return (mask & (positions[:, None] >= starts[:, :, None]))[:, None]


def _document_starts(state: tuple[Tensor, ...] | None, reset: Tensor | None, first: Tensor, T: int) -> Tensor | None:
    """Return the position where the document of each of T tokens starts, int64 [B, T]; None without any reset so far.

    `first` [B] is the position of the first of these tokens.
    """
    before = state[3] if state is not None and len(state) == 4 else None
    if reset is None:
        return None if before is None else before[:, None].expand(-1, T)
    positions = first[:, None] + torch.arange(T, device=first.device)
    starts = torch.where(reset, positions, 0).cummax(dim=1).values
    return starts if before is None else torch.maximum(starts, before[:, None])


def _cached_positions(position: Tensor, length: int) -> Tensor:
    """Return the positions of the last `length` tokens before `position` [B], int64 [B, length]."""
    return position[:, None] - length + torch.arange(length, device=position.device)
