"""Causal self-attention with rotary position embedding and a key-value cache."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.mixers.step_context import StepContext, rotary_frequencies

# cuDNN plans anew for every length, and a cache grows by a token at a time: 50 ms per token in place of 12 on an H100.
_BACKENDS_FOR_CACHE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@torch.library.custom_op("models::rotary_angles", mutates_args=())
def rotary_angles(first_position: int, T: int, D: int, base: float, device: torch.device) -> Tensor:
    """Return cosines and sines, float32 [2, T, D/2], for positions first_position ... first_position + T - 1.

    An operator of its own, because torch.compile would move the sines into the product and compute them for every
    element anew; and no buffer, because that is lost when a model is built on the meta device. All layers of a compiled
    model share one call.
    """
    positions = torch.arange(first_position, first_position + T, device=device, dtype=torch.float32)
    angles = torch.outer(positions, rotary_frequencies(D, base, device))
    return torch.stack((angles.cos(), angles.sin()))


@rotary_angles.register_fake
def _(first_position: int, T: int, D: int, base: float, device: torch.device) -> Tensor:
    return torch.empty(2, T, D // 2, dtype=torch.float32, device=device)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Return the rotary embedding of x [B, N, T, D] by `angles` [2, T, D/2], or by others that fit x; computed in
    float32, in the dtype of x after that."""
    cos, sin = angles
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class AttentionMixer(nn.Module):
    """Multi-head causal self-attention, 4 d² parameters.

    The state is (keys [B, N, L, D], values [B, N, L, D]) of the L tokens so far, and (keys, values, resets [B, L]) once
    resets were given: a token attends to tokens of its own document only.

    Args:
        d_model: width of input and output.
        num_heads: number of heads; d_model / num_heads must be even (rotary embedding turns pairs).
        rope_base: base of the rotary frequencies.
        block_index: place in the backbone, part of the mixer interface, unused here.
        num_blocks: number of such places, unused here.
    """

    def __init__(
        self, d_model: int, num_heads: int = 12, rope_base: float = 10_000.0, block_index: int = 0, num_blocks: int = 1
    ) -> None:
        super().__init__()
        if num_heads < 1 or d_model % (2 * num_heads):
            raise ValueError(
                f"d_model={d_model} with num_heads={num_heads}: d_model must be an even multiple of num_heads "
                "(rotary embedding needs an even head size)"
            )
        self.num_heads = num_heads
        self.rope_base = rope_base
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(
        self, x: Tensor, state: tuple[Tensor, ...] | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        B, T, d = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.num_heads, d // self.num_heads).permute(2, 0, 3, 1, 4)  # [B, N, T, D]
        past = 0 if state is None else state[0].shape[-2]
        angles = rotary_angles(past, T, d // self.num_heads, self.rope_base, x.device)
        q, k = rotate(q, angles), rotate(k, angles)

        if state is not None:
            k, v = torch.cat((state[0], k), dim=-2), torch.cat((state[1], v), dim=-2)
        resets = _all_resets(state, reset, past, T)
        if state is None and resets is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mask = None if T == 1 and resets is None else _mask(resets, past, T, x.device)
            with sdpa_kernel(_BACKENDS_FOR_CACHE):
                y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(B, T, d)), (k, v) if resets is None else (k, v, resets)

    def step(
        self, x: Tensor, state: tuple[Tensor, ...], context: StepContext, residual: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute one token as any mixer's `step` does, on a state of `empty_cache`, which is changed in place."""
        keys, values = state
        (B, d), N, place = x.shape, self.num_heads, context.position[:, None, None, None]
        heads = self.qkv(x).view(B, 3 * N, d // N)
        q, k = rotate(heads[:, : 2 * N], context.angles(d // N, self.rope_base)).view(B, 2, N, 1, d // N).unbind(1)
        place = place.expand_as(k)
        keys.scatter_(2, place, k)
        values.scatter_(2, place, heads[:, 2 * N :].unsqueeze(2))
        with sdpa_kernel(_BACKENDS_FOR_CACHE):
            y = F.scaled_dot_product_attention(
                q, keys[:, :, : context.window], values[:, :, : context.window], attn_mask=context.visible()
            )
        return residual + self.out(y.view(B, d)), state

    @staticmethod
    def empty_cache(state: tuple[Tensor, ...], rows: int, capacity: int) -> tuple[Tensor, ...]:
        """Return keys and values [rows, N, capacity, D] of no token, for `step`, like those of a state."""
        _, N, _, D = state[0].shape
        return tuple(part.new_zeros(rows, N, capacity, D) for part in state[:2])

    @staticmethod
    def load_cache(buffers: tuple[Tensor, ...], rows: Tensor, state: tuple[Tensor, ...]) -> None:
        """Put the state of some sequences into these `rows` (int64) of the buffers."""
        for buffer, part in zip(buffers, state[:2], strict=True):
            buffer[:, :, : part.shape[2]].index_copy_(0, rows, part)

    @staticmethod
    def cached_state(buffers: tuple[Tensor, ...], rows: int, context: StepContext) -> tuple[Tensor, ...]:
        """Return the state of the first `rows` rows, which have read as many tokens each, as `forward` has it."""
        length = int(context.position[0])
        state = tuple(buffer[:rows, :, :length].clone() for buffer in buffers)
        first = context.first[:rows]
        if not first.any():
            return state
        places = torch.arange(length, device=first.device)
        return (*state, (places == first[:, None]) & (first[:, None] > 0))

    @staticmethod
    def first_visible(state: tuple[Tensor, ...]) -> Tensor | None:
        """Return where the last document of each sequence starts, int64 [B]; None where that is 0 for all."""
        if len(state) < 3:
            return None
        places = torch.arange(state[2].shape[1], device=state[2].device)
        return (places * state[2]).amax(1)

    def flops_per_token(self, T: int) -> float:
        """Return the operations of scores and weighted sums over T tokens, forward and backward; causality is not
        deducted, as in PaLM."""
        return 12.0 * T * self.out.in_features


def _all_resets(state: tuple[Tensor, ...] | None, reset: Tensor | None, past: int, T: int) -> Tensor | None:
    """Return `reset` of all tokens so far, bool [B, past + T]; None where it was never given."""
    before = state[2] if state is not None and len(state) == 3 else None
    if before is None:
        return None if reset is None else F.pad(reset, (past, 0))
    return F.pad(before, (0, T)) if reset is None else torch.cat((before, reset), dim=1)


def _mask(resets: Tensor | None, past: int, T: int, device: torch.device) -> Tensor:
    """Return a mask that is True where one of the last T tokens attends to one of all: not to later ones, nor to those
    of another document.

    bool [T, past + T], or [B, 1, T, past + T] if there are documents.
    """
    causal = torch.ones(T, past + T, dtype=torch.bool, device=device).tril(diagonal=past)
    if resets is None:
        return causal
    document = resets.cumsum(dim=1)
    return (causal & (document[:, past:, None] == document[:, None, :]))[:, None]
