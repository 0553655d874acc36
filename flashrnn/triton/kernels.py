"""The time loops, of one head and a tile of SEQS sequences per program, R on the chip.

Plain functions: whether Triton compiles or interprets them is decided where they are used (launch.py). The cell's
printed functions, and which gates have which part, come as constants:

    INPUT_OF, RECURRENT_OF, ONLY_OF: a gate's place among the gates with an input, with a recurrent part, and with a
        recurrent part alone; -1 if it is not among them.
    P: head size, padded to a power of two. PREFETCH: steps that are loaded or computed at once.

A row is one step of one sequence, [N, D] in memory; sequence n and step t have row n * row_b + t * row_t.
"""

import triton.language as tl


def forward(
    x,  # [rows, GI, N, D]
    R,  # [GR, N, D, D]
    bias,  # [GATES, N, D] float32
    initial,  # [STATES, B, N, D] float32
    reset,  # [B, T] int8 or None
    h,  # out: [rows, N, D]
    aux,  # out: [STATES - 1, rows, N, D] float32, or None
    last,  # out: [STATES, B, N, D] float32
    B,
    T,
    row_b,
    row_t,
    cell_forward: tl.constexpr,
    INPUT_OF: tl.constexpr,
    RECURRENT_OF: tl.constexpr,
    GATES: tl.constexpr,
    GI: tl.constexpr,
    GR: tl.constexpr,
    STATES: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    SEQS: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    ROW: tl.constexpr = N * D
    head = tl.program_id(0) % N
    sequence = (tl.program_id(0) // N * SEQS + tl.arange(0, SEQS)[:, None]).to(tl.int64)
    unit = tl.arange(0, P)[None, :]
    other = tl.arange(0, P)[:, None]
    is_unit = unit < D
    valid = (sequence < B) & is_unit
    element = head * D + unit
    rows = sequence * row_b
    plane = tl.cast(B, tl.int64) * T

    weights, biases, state = (), (), ()
    for j in tl.static_range(GR):
        weights += (tl.load(R + (j * ROW + element) * D + other, mask=is_unit & (other < D), other=0.0),)
    for j in tl.static_range(GATES):
        biases += (tl.load(bias + j * ROW + element, mask=is_unit, other=0.0),)
    for i in tl.static_range(STATES):
        state += (tl.load(initial + (i * B + sequence) * ROW + element, mask=valid, other=0.0),)
    if reset is not None:
        starts = tl.load(reset + sequence * T, mask=sequence < B, other=0)

    for t in tl.range(0, T, num_stages=PREFETCH):
        step = tl.cast(t, tl.int64) * row_t
        old = ()
        for i in tl.static_range(STATES):
            old += (tl.where(starts == 0, state[i], 0.0) if reset is not None else state[i],)
        if reset is not None:
            starts = tl.load(reset + sequence * T + t + 1, mask=(sequence < B) & (t + 1 < T), other=0)
        operand = old[0].to(R.dtype.element_ty)
        gates = ()
        for j in tl.static_range(GATES):
            gate = tl.broadcast_to(biases[j], (SEQS, P))
            if INPUT_OF[j] >= 0:
                at = x + rows * (GI * ROW) + element + (step * GI + INPUT_OF[j]) * ROW
                gate += tl.load(at, mask=valid, other=0.0)
            if RECURRENT_OF[j] >= 0:
                gate += tl.dot(operand, weights[RECURRENT_OF[j]], input_precision="ieee")
            gates += (gate,)
        new = cell_forward(*gates, *old)
        rounded = new[0].to(h.dtype.element_ty)
        if D != P:
            rounded = tl.where(is_unit, rounded, 0.0)  # what is no unit may be NaN, and its product with 0 too
        state = (rounded.to(tl.float32),)
        for i in tl.static_range(1, STATES):
            state += (new[i],)
        tl.store(h + rows * ROW + element + step * ROW, rounded, mask=valid)
        if aux is not None:
            for i in tl.static_range(1, STATES):
                tl.store(aux + (rows + (i - 1) * plane) * ROW + element + step * ROW, state[i], mask=valid)

    for i in tl.static_range(STATES):
        tl.store(last + (i * B + sequence) * ROW + element, state[i], mask=valid)


def backward(
    x,  # [rows, GI, N, D]
    R,  # [GR, N, D, D]
    bias,  # [GATES, N, D] float32
    initial,  # [STATES, B, N, D] float32
    reset,  # [B, T] int8 or None
    h_before,  # [rows, N, D] h before every step, zero after resets
    aux,  # [STATES - 1, rows, N, D] float32
    d_h,  # [rows, N, D] or None
    d_aux,  # as aux, or None
    d_last,  # as initial, or None
    d_x,  # [rows, GI, N, D] in: recurrent sums; out: gradients
    d_u,  # [rows, GU, N, D] the same of the gates with a recurrent part alone
    d_bias,  # out: [B, GATES, N, D] float32
    d_initial,  # out: as initial
    B,
    T,
    row_b,
    row_t,
    cell_factors: tl.constexpr,
    cell_backward: tl.constexpr,
    INPUT_OF: tl.constexpr,
    RECURRENT_OF: tl.constexpr,
    ONLY_OF: tl.constexpr,
    GATES: tl.constexpr,
    GI: tl.constexpr,
    GR: tl.constexpr,
    GU: tl.constexpr,
    STATES: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    SEQS: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    ROW: tl.constexpr = N * D
    head = tl.program_id(0) % N
    sequence = (tl.program_id(0) // N * SEQS + tl.arange(0, SEQS)[:, None]).to(tl.int64)
    unit = tl.arange(0, P)[None, :]
    other = tl.arange(0, P)[:, None]
    is_unit = unit < D
    valid = (sequence < B) & is_unit
    element = head * D + unit
    rows = sequence * row_b
    plane = tl.cast(B, tl.int64) * T

    weights, biases, d_biases, d_sums, first, d_state = (), (), (), (), (), ()
    for j in tl.static_range(GR):
        transposed = R + (j * ROW + head * D + other) * D + unit
        weights += (tl.load(transposed, mask=is_unit & (other < D), other=0.0),)
    # Zeros in the layout that products come in: with them in every sum the compiler computes the whole step in that
    # layout, where the gradients are, rather than factors in the layout of loads, from which it would move them.
    zeros = tl.dot(tl.full((SEQS, P), 0.0, R.dtype.element_ty), weights[0], input_precision="ieee")
    for j in tl.static_range(GATES):
        biases += (zeros + tl.load(bias + j * ROW + element, mask=is_unit, other=0.0),)
        d_biases += (zeros,)
    for _ in tl.static_range(GR):
        d_sums += (zeros,)
    for i in tl.static_range(STATES):
        place = (i * B + sequence) * ROW + element
        first += (zeros + tl.load(initial + place, mask=valid, other=0.0),)
        d_state += (zeros if d_last is None else zeros + tl.load(d_last + place, mask=valid, other=0.0),)
    if reset is not None:
        starts = tl.load(reset + sequence * T + T - 1, mask=sequence < B, other=0)

    for back in tl.range(0, T, num_stages=PREFETCH):
        t = T - 1 - back
        step = tl.cast(t, tl.int64) * row_t
        here = rows * ROW + element + step * ROW
        gates = ()
        for j in tl.static_range(GATES):
            gate = biases[j]
            with_input = rows * (GI * ROW) + element + (step * GI + INPUT_OF[j]) * ROW
            without = rows * (GU * ROW) + element + (step * GU + ONLY_OF[j]) * ROW
            if INPUT_OF[j] >= 0:
                gate += tl.load(x + with_input, mask=valid, other=0.0)
            if RECURRENT_OF[j] >= 0:
                gate += tl.load(d_u + without if ONLY_OF[j] >= 0 else d_x + with_input, mask=valid, other=0.0)
            gates += (gate,)
        old = (tl.load(h_before + here, mask=valid, other=0.0).to(tl.float32),)
        for i in tl.static_range(1, STATES):
            before = aux + here + ((i - 1) * plane - row_t) * ROW
            state = tl.where(t > 0, tl.load(before, mask=valid & (t > 0), other=0.0), first[i])
            old += (tl.where(starts == 0, state, 0.0) if reset is not None else state,)
        factors = cell_factors(*gates, *old)

        d_new = ()
        for i in tl.static_range(STATES):
            d = d_state[i]
            if i == 0:
                for j in tl.static_range(GR):
                    d += d_sums[j]
                if d_h is not None:
                    d += tl.load(d_h + here, mask=valid, other=0.0)
            elif d_aux is not None:
                d += tl.load(d_aux + here + (i - 1) * plane * ROW, mask=valid, other=0.0)
            d_new += (d,)
        d_all = cell_backward(*factors, *d_new)

        # Each gate's product is a sum of its own: one chain of tensor core instructions through all gates takes longer.
        totals, d_sums, d_gates, d_state = (), (), (), ()
        for j in tl.static_range(GATES):
            d = tl.where(is_unit, d_all[j], 0.0) if D != P else d_all[j]
            totals += (d_biases[j] + d,)
            d_gates += (d.to(x.dtype.element_ty),)
            if RECURRENT_OF[j] >= 0:
                d_sum = tl.dot(d_gates[j], weights[RECURRENT_OF[j]], input_precision="ieee")
                d_sums += (tl.where(starts == 0, d_sum, 0.0) if reset is not None else d_sum,)
        d_biases = totals
        for i in tl.static_range(STATES):
            d = d_all[GATES + i]
            d_state += (tl.where(starts == 0, d, 0.0) if reset is not None else d,)
        if reset is not None:
            starts = tl.load(reset + sequence * T + t - 1, mask=(sequence < B) & (t > 0), other=0)
        for j in tl.static_range(GATES):
            if INPUT_OF[j] >= 0:
                with_input = rows * (GI * ROW) + element + (step * GI + INPUT_OF[j]) * ROW
                tl.store(d_x + with_input, d_gates[j], mask=valid)
            elif ONLY_OF[j] >= 0:
                without = rows * (GU * ROW) + element + (step * GU + ONLY_OF[j]) * ROW
                tl.store(d_u + without, d_gates[j], mask=valid)

    for i in tl.static_range(STATES):
        d = d_state[i]
        if i == 0:
            for j in tl.static_range(GR):
                d += d_sums[j]
        tl.store(d_initial + (i * B + sequence) * ROW + element, d, mask=valid)
    for j in tl.static_range(GATES):
        tl.store(d_bias + (sequence * GATES + j) * ROW + element, d_biases[j], mask=valid)
