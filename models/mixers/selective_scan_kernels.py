"""Triton kernels of the selective scan. Each program computes a block of channels of one row over all steps."""

import triton
import triton.language as tl


@triton.jit
def forward(
    u, step, A, B, C, first, goes_on, y, last, kept,
    T, channels, states, rows, BLOCK: tl.constexpr, STATES: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    state = tl.arange(0, STATES)
    in_channels, in_states = channel < channels, state < states
    tile = in_channels[:, None] & in_states[None, :]
    place = channel[:, None] * states + state[None, :]
    a = tl.load(A + row // rows * channels * states + place, mask=tile, other=0.0)
    h = tl.load(first + row * channels * states + place, mask=tile, other=0.0)
    for t in range(T):
        at = row * T + t
        dt = tl.load(step + at * channels + channel, mask=in_channels, other=0.0)
        x = tl.load(u + at * channels + channel, mask=in_channels, other=0.0)
        b = tl.load(B + at * states + state, mask=in_states, other=0.0)
        c = tl.load(C + at * states + state, mask=in_states, other=0.0)
        decay = tl.exp(dt[:, None] * a) * tl.load(goes_on + at)
        h = decay * h + (dt * x)[:, None] * b[None, :]
        tl.store(y + at * channels + channel, tl.sum(h * c[None, :], 1), mask=in_channels)
        if KEEP:
            tl.store(kept + at * channels * states + place, h, mask=tile)
    tl.store(last + row * channels * states + place, h, mask=tile)


@triton.jit
def backward(
    u, step, A, B, C, first, goes_on, kept, d_y, d_last, d_u, d_step, d_A, d_B, d_C, d_first,
    T, channels, states, rows, BLOCK: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    state = tl.arange(0, STATES)
    in_channels, in_states = channel < channels, state < states
    tile = in_channels[:, None] & in_states[None, :]
    place = channel[:, None] * states + state[None, :]
    of_row = row * channels * states + place
    of_block = (tl.program_id(1) * tl.num_programs(0) + row) * T  # d_B and d_C are [blocks, rows, T, states]
    a = tl.load(A + row // rows * channels * states + place, mask=tile, other=0.0)
    start = tl.load(first + of_row, mask=tile, other=0.0)
    h = tl.load(kept + (row * T + T - 1) * channels * states + place, mask=tile, other=0.0)
    d_h = tl.load(d_last + of_row, mask=tile, other=0.0)
    d_a = tl.zeros_like(a)
    for k in range(T):
        t = T - 1 - k
        at = row * T + t
        dt = tl.load(step + at * channels + channel, mask=in_channels, other=0.0)
        x = tl.load(u + at * channels + channel, mask=in_channels, other=0.0)
        dy = tl.load(d_y + at * channels + channel, mask=in_channels, other=0.0)
        b = tl.load(B + at * states + state, mask=in_states, other=0.0)
        c = tl.load(C + at * states + state, mask=in_states, other=0.0)
        before = tl.load(kept + (at - 1) * channels * states + place, mask=tile & (t > 0), other=0.0)
        before = tl.where(t > 0, before, start)
        tl.store(d_C + (of_block + t) * states + state, tl.sum(dy[:, None] * h, 0), mask=in_states)
        d_h += dy[:, None] * c[None, :]
        tl.store(d_B + (of_block + t) * states + state, tl.sum(d_h * (dt * x)[:, None], 0), mask=in_states)
        decay = tl.exp(dt[:, None] * a) * tl.load(goes_on + at)
        d_exponent = d_h * before * decay
        d_a += d_exponent * dt[:, None]
        d_added = tl.sum(d_h * b[None, :], 1)
        tl.store(d_u + at * channels + channel, d_added * dt, mask=in_channels)
        tl.store(d_step + at * channels + channel, d_added * x + tl.sum(d_exponent * a, 1), mask=in_channels)
        d_h = d_h * decay
        h = before
    tl.store(d_A + of_row, d_a, mask=tile)
    tl.store(d_first + of_row, d_h, mask=tile)
