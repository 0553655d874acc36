"""One head of the sequences `first` to `stop` through all steps, forward."""


@cfunc(
    void(
        pointer,  # x [rows, Gi, N, D]
        pointer,  # weights [Gr, N, D, width]: R transposed, [previous unit, unit]
        pointer,  # b [G, N, D]
        pointer,  # states [S, B, N, D]
        CPointer(uint8),  # reset [rows]
        pointer,  # h [rows, N, D]
        pointer,  # aux [S-1, rows, N, D] if it is wanted
        pointer,  # last [S, B, N, D]
        pointer,  # gates [G, stride]
        pointer,  # state [S, stride]
        CPointer(intp),  # sizes
        CPointer(intp),  # input_of [G]: which input is this gate's, or -1
        CPointer(intp),  # recurrent_of [G]: which matrix is this gate's, or -1
        *(intp,) * 6,
    ),
    cache=CACHE,
    **OPTIONS,
)
def kernel(
    x, weights, b, states, reset, h, aux, last, gates, state, sizes, input_of, recurrent_of,
    multiply, cell, head, first, stop, all_states,
):  # fmt: skip
    z = unpack(sizes)
    for begin in range(first, stop, z.rows):
        count = min(z.rows, stop - begin)
        load_states(z, state, states, begin, count, head)
        for t in range(z.steps):
            for r in range(count):
                row = row_of(z, begin + r, t)
                if reset[row] != 0:
                    clear_states(z, state, r * z.width)
                load_gates(z, input_of, gates, r * z.width, x, b, row, head)
            add_recurrent_sums(z, recurrent_of, multiply, gates, state, weights, head, count)
            call(cell, (gates, state, intp(0), count * z.width))
            for r in range(count):
                row = row_of(z, begin + r, t)
                copy(h, (row * z.heads + head) * z.D, state, r * z.width, z.D)
                for s in range(1, z.states if all_states else 1):
                    to = ((s - 1) * z.batch * z.steps + row) * z.heads + head
                    copy(aux, to * z.D, state, s * z.stride + r * z.width, z.D)
        store_states(z, state, last, begin, count, head)
