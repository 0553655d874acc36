"""One head of the sequences `first` to `stop` through all steps, forward."""

FIELDS = (
    *SHARED,
    "last",  # [S, B, N, D]
)


@function
def store_step(z, state, row, head):
    """The states of one sequence after a step."""
    copy(behind(z.h, (row * z.heads + head) * z.D), state, z.D)
    for s in range(1, z.states if z.aux != 0 else 1):
        copy(behind(z.aux, aux_at(z, s, row, head)), behind(state, s * z.stride), z.D)


@function
def run(z, part, head, first, stop, room):
    gates, state = room, behind(room, z.gates * z.stride)
    for begin in range(first, stop, z.rows):
        count = min(z.rows, stop - begin)
        load_states(z, state, z.initial, begin, count, head)
        for t in range(z.steps):
            for r in range(count):
                row = row_of(z, begin + r, t)
                if is_reset(z, row):
                    clear_states(z, behind(state, r * z.width))
                load_gates(z, behind(gates, r * z.width), row, head)
            add_recurrent_sums(z, gates, state, head, count)
            call(z.cell, (gates, state, count * z.width))
            for r in range(count):
                store_step(z, behind(state, r * z.width), row_of(z, begin + r, t), head)
        store_states(z, state, z.last, begin, count, head)
