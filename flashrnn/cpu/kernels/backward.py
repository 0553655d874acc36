"""One head of the sequences `first` to `stop` through all steps, backward.

Time is cut into chunks of as many steps as there are rows: their gates are recomputed by one product, and their part of
d_R is one product. Row k of a chunk is step k // count of sequence k % count.
"""


@function
def load_previous(z, old, at, states, reset, h, aux, sequence, t, head):
    """The states before step t of a sequence."""
    row = row_of(z, sequence, t - 1)
    for s in range(z.states):
        to = s * z.stride + at
        if reset[row_of(z, sequence, t)] != 0:
            clear(old, to, z.width)
        elif t == 0:
            copy(old, to, states, ((s * z.batch + sequence) * z.heads + head) * z.D, z.D)
        elif s == 0:
            copy(old, to, h, (row * z.heads + head) * z.D, z.D)
        else:
            copy(old, to, aux, (((s - 1) * z.batch * z.steps + row) * z.heads + head) * z.D, z.D)


@function
def add_given(z, d_state, at, d_h, d_aux, row, head, has_d_h, has_d_aux):
    """What the states after a step are given as gradients from outside."""
    if has_d_h:
        add(d_state, at, d_h, (row * z.heads + head) * z.D, z.D)
    for s in range(1, z.states if has_d_aux else 1):
        given = ((s - 1) * z.batch * z.steps + row) * z.heads + head
        add(d_state, s * z.stride + at, d_aux, given * z.D, z.D)


@function
def add_recurrent_gradient(z, recurrent_of, multiply, gates, at, d_h, R, head, count):
    """Adds what the gates' gradients give to that of the h before the step."""
    for gate in range(z.gates):
        if recurrent_of[gate] >= 0:
            matrix = (recurrent_of[gate] * z.heads + head) * z.D * z.width
            add_product(multiply, d_h, 0, gates, gate * z.stride + at, z.width, 1, R, matrix, count, z.D)


@function
def add_outer_products(z, recurrent_of, multiply, gates, h, d_R, head, rows):
    """Adds gates' gradients times the h they saw, summed over rows."""
    for gate in range(z.gates):
        if recurrent_of[gate] >= 0:
            matrix = (recurrent_of[gate] * z.heads + head) * z.D * z.width
            add_product(multiply, d_R, matrix, gates, gate * z.stride, 1, z.width, h, 0, z.D, rows)


@function
def store_gates(z, input_of, gates, at, d_x, d_b, row, head):
    """The gradient of the gates at one row: to its place in d_x, and to the sum over all rows."""
    for gate in range(z.gates):
        add(d_b, (gate * z.heads + head) * z.D, gates, gate * z.stride + at, z.D)
        if input_of[gate] >= 0:
            copy(d_x, ((row * z.inputs + input_of[gate]) * z.heads + head) * z.D, gates, gate * z.stride + at, z.D)


@cfunc(
    void(
        pointer,  # x [rows, Gi, N, D]
        pointer,  # weights [Gr, N, D, width]: R transposed, [previous unit, unit]
        pointer,  # R [Gr, N, D, width]
        pointer,  # b [G, N, D]
        pointer,  # states [S, B, N, D]
        CPointer(uint8),  # reset [rows]
        pointer,  # h [rows, N, D]
        pointer,  # aux [S-1, rows, N, D]
        pointer,  # d_h [rows, N, D] if there is one
        pointer,  # d_aux [S-1, rows, N, D] if there is one
        pointer,  # d_x [rows, Gi, N, D]
        pointer,  # d_R [Gr, N, D, width], to be added to
        pointer,  # d_b [G, N, D], to be added to
        pointer,  # d_states [S, B, N, D]: of the last states, then of the first
        pointer,  # gates [G, stride]
        pointer,  # old [S, stride]
        pointer,  # d_state [S, stride]
        CPointer(intp),  # sizes
        CPointer(intp),  # input_of [G]: which input is this gate's, or -1
        CPointer(intp),  # recurrent_of [G]: which matrix is this gate's, or -1
        *(intp,) * 7,
    ),
    cache=CACHE,
    **OPTIONS,
)
def kernel(
    x, weights, R, b, states, reset, h, aux, d_h, d_aux, d_x, d_R, d_b, d_states, gates, old, d_state, sizes, input_of,
    recurrent_of, multiply, cell, head, first, stop, has_d_h, has_d_aux,
):  # fmt: skip
    z = unpack(sizes)
    for begin in range(first, stop, z.rows):
        count = min(z.rows, stop - begin)
        load_states(z, d_state, d_states, begin, count, head)
        chunk = z.rows // count
        for end in range(z.steps, 0, -chunk):
            start = max(0, end - chunk)
            rows = (end - start) * count
            for k in range(rows):
                sequence, t = begin + k % count, start + k // count
                load_gates(z, input_of, gates, k * z.width, x, b, row_of(z, sequence, t), head)
                load_previous(z, old, k * z.width, states, reset, h, aux, sequence, t, head)
            add_recurrent_sums(z, recurrent_of, multiply, gates, old, weights, head, rows)
            for t in range(end - 1, start - 1, -1):
                at = (t - start) * count * z.width
                for r in range(count):
                    add_given(z, d_state, r * z.width, d_h, d_aux, row_of(z, begin + r, t), head, has_d_h, has_d_aux)
                call(cell, (gates, old, at, d_state, count * z.width))
                add_recurrent_gradient(z, recurrent_of, multiply, gates, at, d_state, R, head, count)
                for r in range(count):
                    if reset[row_of(z, begin + r, t)] != 0:
                        clear_states(z, d_state, r * z.width)
            for k in range(rows):
                row = row_of(z, begin + k % count, start + k // count)
                store_gates(z, input_of, gates, k * z.width, d_x, d_b, row, head)
            add_outer_products(z, recurrent_of, multiply, gates, old, d_R, head, rows)
        store_states(z, d_state, d_states, begin, count, head)
