"""The time loops. A program computes one head of a tile of sequences, with R on the chip.

A row is one step of one sequence, [N, D] in memory. Step t of sequence n is row n * row_b + t * row_t.
"""

from typing import NamedTuple

import triton
import triton.language as tl

SIZES = ("B", "T", "row_b", "row_t")  # arguments that kernels are not specialized for


class Constants(NamedTuple):
    """The compile-time constants of a kernel, besides the cell's printed functions."""

    INPUT_OF: tuple[int, ...]  # the index of every gate among the gates with an input, or -1
    RECURRENT_OF: tuple[int, ...]  # the same among the gates with a recurrent part
    RECURRENT_ONLY_OF: tuple[int, ...]  # the same among the recurrent-only gates
    GATES: int
    GI: int
    GR: int
    GU: int  # recurrent-only gates
    STATES: int
    N: int
    D: int
    P: int  # head size, padded to a power of two
    ROW: int  # N * D
    SEQS: int  # sequences per program
    PREFETCH: int  # stages of the software pipeline: steps that are loaded or computed at once


class Tile(NamedTuple):
    """The head and the sequences of a program."""

    first: tl.tensor  # offset of the head in a row
    unit: tl.tensor  # [1, P], index in the head
    place: tl.tensor  # [1, P], offset of the unit in a row
    is_unit: tl.tensor  # [1, P], False for padding
    sequence: tl.tensor  # [SEQS, 1] int64, index in the batch
    row: tl.tensor  # [SEQS, 1] int64, row of step 0
    valid: tl.tensor  # [SEQS, P], whether sequence and unit exist


@triton.jit(do_not_specialize=SIZES)
def forward(
    x,  # [rows, GI, N, D]
    R,  # [GR, N, D, D]
    bias,  # [GATES, N, D] float32
    initial,  # [STATES, B, N, D] float32
    reset,  # [B, T] int8 or None
    h,  # out: [rows, N, D]
    aux,  # out: [STATES - 1, rows, N, D], or None
    last,  # out: [STATES, B, N, D] float32
    gates,  # out: [rows, GATES, N, D] pre-activations, or None
    B,
    T,
    row_b,
    row_t,
    cell_forward: tl.constexpr,
    C: tl.constexpr,
):
    tile = tile_of_program(B, row_b, C)
    before = tl.arange(0, C.P)[:, None]
    weights = load_matrices(R, tile.place, before, tile.is_unit & (before < C.D), C)
    biases, state = load_biases(bias, tile, C), load_states(initial, B, tile, C)
    plane = tl.cast(B, tl.int64) * T
    starts = load_starts(reset, tile, 0, True, B, T)

    for t in tl.range(0, T, num_stages=C.PREFETCH):
        step = tl.cast(t, tl.int64) * row_t
        old = zero_at(starts, state)
        if reset is not None:
            starts = load_starts(reset, tile, t + 1, t + 1 < T, B, T)
        sums = add_up_gates(x, biases, weights, old[0].to(R.dtype.element_ty), tile, step, C)
        new = cell_forward(*sums, *old)
        (rounded,) = zero_padding((new[0].to(h.dtype.element_ty),), tile, C)
        state = (rounded.to(tl.float32),)
        state += new[1:]
        tl.store(in_rows(h, tile, step, 0, 1, C), rounded, mask=tile.valid)
        if gates is not None:
            store_gates(gates, sums, tile, step, C)
        if aux is not None:
            for i in tl.static_range(1, C.STATES):
                store_saturated(in_rows(aux, tile, step + (i - 1) * plane, 0, 1, C), state[i], tile)

    store_states(last, state, B, tile, C)


@triton.jit(do_not_specialize=SIZES)
def backward(
    R,  # [GR, N, D, D]
    initial,  # [STATES, B, N, D] float32
    reset,  # [B, T] int8 or None
    h_before,  # [rows, N, D] h before every step, zero after resets
    aux,  # [STATES - 1, rows, N, D]
    gates,  # [rows, GATES, N, D] pre-activations
    d_h,  # [rows, N, D] or None
    d_aux,  # as aux, but float32, or None
    d_last,  # as initial, or None
    d_x,  # out: [rows, GI, N, D]
    d_u,  # out: [rows, GU, N, D], of the recurrent-only gates
    d_bias,  # out: [B, GATES, N, D] float32
    d_initial,  # out: as initial
    B,
    T,
    row_b,
    row_t,
    cell_factors: tl.constexpr,
    cell_backward: tl.constexpr,
    C: tl.constexpr,
):
    tile = tile_of_program(B, row_b, C)
    after = tl.arange(0, C.P)[:, None]
    transposed = load_matrices(R, tile.first + after, tile.unit, tile.is_unit & (after < C.D), C)
    zeros = zeros_of_product(transposed[0], C)
    d_biases, d_sums, d_state = copies(zeros, C.GATES), copies(zeros, C.GR), copies(zeros, C.STATES)
    initial_states = add(d_state, load_states(initial, B, tile, C))
    if d_last is not None:
        d_state = add(d_state, load_states(d_last, B, tile, C))
    plane = tl.cast(B, tl.int64) * T
    starts = load_starts(reset, tile, T - 1, True, B, T)

    for back in tl.range(0, T, num_stages=C.PREFETCH):
        t = T - 1 - back
        step = tl.cast(t, tl.int64) * row_t
        sums = load_gates(gates, tile, step, C)
        old = (tl.load(in_rows(h_before, tile, step, 0, 1, C), mask=tile.valid, other=0.0).to(tl.float32),)
        old += zero_at(starts, load_before(aux, plane, initial_states, t, tile, step - row_t, C))
        factors = cell_factors(*sums, *old)
        d_new = add_gradients(sum_up(d_state, d_sums), d_h, d_aux, plane, tile, step, C)
        d_all = cell_backward(*factors, *d_new)
        d_gates, rounded, products = multiply(d_all[: C.GATES], transposed, tile, C)
        d_biases = add(d_biases, d_gates)
        d_sums, d_state = zero_at(starts, products), zero_at(starts, d_all[C.GATES :])
        if reset is not None:
            starts = load_starts(reset, tile, t - 1, t > 0, B, T)
        store_gradients(d_x, d_u, rounded, tile, step, C)

    store_states(d_initial, sum_up(d_state, d_sums), B, tile, C)
    store_biases(d_bias, d_biases, tile, C)


@triton.jit
def tile_of_program(B, row_b, C: tl.constexpr) -> Tile:
    sequence = (tl.program_id(0) // C.N * C.SEQS + tl.arange(0, C.SEQS)[:, None]).to(tl.int64)
    unit = tl.arange(0, C.P)[None, :]
    first, is_unit = tl.program_id(0) % C.N * C.D, unit < C.D
    return Tile(first, unit, first + unit, is_unit, sequence, sequence * row_b, (sequence < B) & is_unit)


@triton.jit
def in_rows(x, tile, step, k, COUNT: tl.constexpr, C: tl.constexpr):
    """Return pointers [SEQS, P] into x [rows, COUNT, N, D]: index k of the tile's rows at a step."""
    return x + tile.row * (COUNT * C.ROW) + tile.place + (step * COUNT + k) * C.ROW


@triton.jit
def in_states(tile, i, B, C: tl.constexpr):
    """Return the offsets [SEQS, P] of the tile's state i in [STATES, B, N, D]."""
    return (i * B + tile.sequence) * C.ROW + tile.place


@triton.jit
def load_matrices(R, row, column, mask, C: tl.constexpr):
    """Load the head's recurrent matrices [P, P]; `row` indexes the units of all heads, `column` the previous units."""
    matrices = ()
    for j in tl.static_range(C.GR):
        matrices += (tl.load(R + (j * C.ROW + row) * C.D + column, mask=mask, other=0.0),)
    return matrices


@triton.jit
def zeros_of_product(matrix, C: tl.constexpr):
    """Return zeros [SEQS, P] in the register layout of products.

    States and gradients start from them, so that the compiler computes the whole step in this layout. Otherwise it
    computes the factors in the layout of loads and then converts them.
    """
    return tl.dot(tl.full((C.SEQS, C.P), 0.0, matrix.dtype), matrix, input_precision="ieee")


@triton.jit
def load_biases(bias, tile, C: tl.constexpr):
    """Load the bias [1, P] of every gate."""
    biases = ()
    for j in tl.static_range(C.GATES):
        biases += (tl.load(bias + j * C.ROW + tile.place, mask=tile.is_unit, other=0.0),)
    return biases


@triton.jit
def store_biases(to, biases, tile, C: tl.constexpr):
    """Store the gradient of every gate's bias [SEQS, P] to [B, GATES, N, D]."""
    for j in tl.static_range(C.GATES):
        place = (tile.sequence * C.GATES + j) * C.ROW + tile.place
        tl.store(to + place, biases[j], mask=tile.valid)


@triton.jit
def load_starts(reset, tile, t, is_step, B, T):
    """Load whether each sequence is reset at step t, [SEQS, 1] of `reset` [B, T]; return None without `reset`.

    If `is_step` is False, there is no step t, and no reset.
    """
    starts = None
    if reset is not None:
        starts = tl.load(reset + tile.sequence * T + t, mask=(tile.sequence < B) & is_step, other=0)
    return starts


@triton.jit
def load_states(states, B, tile, C: tl.constexpr):
    """Load every state [SEQS, P] from [STATES, B, N, D]."""
    loaded = ()
    for i in tl.static_range(C.STATES):
        loaded += (tl.load(states + in_states(tile, i, B, C), mask=tile.valid, other=0.0),)
    return loaded


@triton.jit
def store_states(to, states, B, tile, C: tl.constexpr):
    """Store every state [SEQS, P] to [STATES, B, N, D]."""
    for i in tl.static_range(C.STATES):
        tl.store(to + in_states(tile, i, B, C), states[i], mask=tile.valid)


@triton.jit
def zero_at(starts, blocks):
    """Return the blocks with zeros where sequences are reset; `starts` is None if there are no resets."""
    cleared = ()
    for i in tl.static_range(len(blocks)):
        cleared += (blocks[i] if starts is None else tl.where(starts == 0, blocks[i], 0.0),)
    return cleared


@triton.jit
def zero_padding(blocks, tile, C: tl.constexpr):
    """Return the blocks with zeros in the padding, which may contain NaN: NaN times 0 is NaN."""
    padded = ()
    for i in tl.static_range(len(blocks)):
        padded += (blocks[i] if C.D == C.P else tl.where(tile.is_unit, blocks[i], 0.0),)
    return padded


@triton.jit
def copies(block, COUNT: tl.constexpr):
    blocks = ()
    for _ in tl.static_range(COUNT):
        blocks += (block,)
    return blocks


@triton.jit
def add(blocks, others):
    sums = ()
    for i in tl.static_range(len(blocks)):
        sums += (blocks[i] + others[i],)
    return sums


@triton.jit
def sum_up(d_state, d_sums):
    """Return the gradients of the states through the next step; that of h includes the gradients through R."""
    d_h = d_state[0]
    for j in tl.static_range(len(d_sums)):
        d_h += d_sums[j]
    sums = (d_h,)
    sums += d_state[1:]
    return sums


@triton.jit
def add_up_gates(x, biases, weights, h, tile, step, C: tl.constexpr):
    """Return every gate of a step; h is the previous one, in the dtype of R."""
    gates = ()
    for j in tl.static_range(C.GATES):
        gate = tl.broadcast_to(biases[j], (C.SEQS, C.P))
        if C.INPUT_OF[j] >= 0:
            gate += tl.load(in_rows(x, tile, step, C.INPUT_OF[j], C.GI, C), mask=tile.valid, other=0.0)
        if C.RECURRENT_OF[j] >= 0:
            gate += tl.dot(h, weights[C.RECURRENT_OF[j]], input_precision="ieee")
        gates += (gate,)
    return gates


@triton.jit
def store_gates(gates, sums, tile, step, C: tl.constexpr):
    """Store every gate of a step."""
    for j in tl.static_range(C.GATES):
        store_saturated(in_rows(gates, tile, step, j, C.GATES, C), sums[j], tile)


@triton.jit
def store_saturated(to, block, tile):
    """Store a block; for float16, values out of range are clamped."""
    dtype: tl.constexpr = to.dtype.element_ty
    if dtype == tl.float16:
        block = tl.clamp(block, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(to, block.to(dtype), mask=tile.valid)


@triton.jit
def load_gates(gates, tile, step, C: tl.constexpr):
    """Load the gates that store_gates has stored."""
    sums = ()
    for j in tl.static_range(C.GATES):
        gate = tl.load(in_rows(gates, tile, step, j, C.GATES, C), mask=tile.valid, other=0.0)
        sums += (gate.to(tl.float32),)
    return sums


@triton.jit
def store_gradients(d_x, d_u, d_gates, tile, step, C: tl.constexpr):
    """Store the gradients of a step's gates."""
    for j in tl.static_range(C.GATES):
        if C.INPUT_OF[j] >= 0:
            tl.store(in_rows(d_x, tile, step, C.INPUT_OF[j], C.GI, C), d_gates[j], mask=tile.valid)
        elif C.RECURRENT_ONLY_OF[j] >= 0:
            tl.store(in_rows(d_u, tile, step, C.RECURRENT_ONLY_OF[j], C.GU, C), d_gates[j], mask=tile.valid)


@triton.jit
def load_before(aux, plane, initial, t, tile, step, C: tl.constexpr):
    """Load the states before step t, except the first one: those of the previous step in row `step`, or the initial."""
    states = ()
    for i in tl.static_range(1, C.STATES):
        pointers = in_rows(aux, tile, step + (i - 1) * plane, 0, 1, C)
        before = tl.load(pointers, mask=tile.valid & (t > 0), other=0.0).to(tl.float32)
        states += (tl.where(t > 0, before, initial[i]),)
    return states


@triton.jit
def add_gradients(d_state, d_h, d_aux, plane, tile, step, C: tl.constexpr):
    """Return the gradients of a step's states plus those of its outputs."""
    sums = ()
    for i in tl.static_range(C.STATES):
        d = d_state[i]
        if i == 0:
            if d_h is not None:
                d += tl.load(in_rows(d_h, tile, step, 0, 1, C), mask=tile.valid, other=0.0)
        elif d_aux is not None:
            d += tl.load(in_rows(d_aux, tile, step + (i - 1) * plane, 0, 1, C), mask=tile.valid, other=0.0)
        sums += (d,)
    return sums


@triton.jit
def multiply(d_gates, matrices, tile, C: tl.constexpr):
    """Return the gates' gradients with zeros in the padding, the same in the dtype of R, and their products with R.

    The products are not summed here: one chain of tensor-core instructions through all gates takes longer.
    """
    padded, rounded, products = (), (), ()
    for j in tl.static_range(C.GATES):
        padded += zero_padding((d_gates[j],), tile, C)
        rounded += (padded[j].to(matrices[0].dtype),)
        if C.RECURRENT_OF[j] >= 0:
            products += (tl.dot(rounded[j], matrices[C.RECURRENT_OF[j]], input_precision="ieee"),)
    return padded, rounded, products
