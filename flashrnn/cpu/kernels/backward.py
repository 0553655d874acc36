"""The backward time loop of one head and the sequences `first` to `stop`.

Time is divided into chunks of steps that fill the rows of the workspace. Each chunk adds one product to d_R, one to the
gradient of W and one to the gradient of the layer's input. Row k of a chunk is step k // count of sequence k % count.
"""


@function
def load_gates(z, gates, row, head):
    for gate in range(z.gates):
        copy(offset(gates, gate * z.stride), offset(z.pre, gate_at(z, row, gate, head)), z.D)


@function
def load_previous(z, old, sequence, t, head):
    """Load the states before step t of a sequence."""
    row = row_of(z, sequence, t - 1)
    for s in range(z.states):
        to = offset(old, s * z.stride)
        if is_reset(z, row_of(z, sequence, t)):
            clear(to, z.width)
        elif t == 0:
            copy(to, state_of(z, z.initial, s, sequence, head), z.D)
        elif s == 0:
            copy(to, offset(z.h, (row * z.heads + head) * z.D), z.D)
        else:
            copy(to, offset(z.aux, aux_at(z, s, row, head)), z.D)


@function
def add_given(z, d_state, row, head):
    """Add the caller's gradients of the states after a step."""
    if z.d_h != 0:
        add(d_state, offset(z.d_h, (row * z.heads + head) * z.D), z.D)
    for s in range(1, z.states if z.d_aux != 0 else 1):
        add(offset(d_state, s * z.stride), offset(z.d_aux, aux_at(z, s, row, head)), z.D)


@function
def add_recurrent_gradient(z, gates, d_h, head, count):
    """Add the gates' gradients times R to the gradient of the previous h."""
    for gate in range(z.gates):
        k = words_at(z.recurrent_of, gate)[0]
        if k >= 0:
            matrix = offset(z.R, matrix_at(z, k, head))
            add_product_of_rows(z, d_h, offset(gates, gate * z.stride), z.width, matrix, count, z.D)


@function
def add_sums(z, gates, h, part, head, rows):
    """Add the sums over rows of the gates' gradients to d_b, and of their products with the previous h to d_R."""
    for gate in range(z.gates):
        given, d_b = offset(gates, gate * z.stride), offset(z.d_b, ((part * z.gates + gate) * z.heads + head) * z.width)
        if z.one != 0:
            add_product(z, d_b, offset(z.one, 0), 0, 0, given, z.width, 1, rows)
        else:
            for r in range(rows):
                add(d_b, offset(given, r * z.width), z.D)
        k = words_at(z.recurrent_of, gate)[0]
        if k >= 0 and z.d_R != 0:
            d_R = offset(z.d_R, matrix_at(z, part * z.matrices + k, head))
            add_product(z, d_R, given, 1, z.width, h, z.width, z.D, rows)


@function
def store_gates(z, gates, row, head):
    """Store the gradients of the gates of one row."""
    for gate in range(z.gates):
        k = words_at(z.input_of, gate)[0]
        if k >= 0:
            if z.d_x != 0:
                stream(z.d_x, input_at(z, row, k, head), offset(gates, gate * z.stride), z.D)
        elif z.d_u != 0:
            k = words_at(z.alone_of, gate)[0]
            if k >= 0:
                stream(z.d_u, ((row * z.alone + k) * z.heads + head) * z.D, offset(gates, gate * z.stride), z.D)


@function
def add_of_source(z, out, a, row_step, step, w, rows, depth):
    """Do the same as `add_product` for `out` and w with rows as wide as those of the layer's input."""
    call(z.multiply_source, (out, a, intp(row_step), intp(step), w, z.source_width, intp(rows), intp(depth)))


@function
def add_source_sums(z, gates, source, part, rows):
    """Add the sums over rows of the gates' gradients times the layer's input to d_W."""
    for gate in range(z.gates):
        k = words_at(z.input_of, gate)[0]
        if k >= 0:
            d_W = offset(z.d_W, (part * z.inputs + k) * z.D * z.source_width)
            add_of_source(z, d_W, offset(gates, gate * z.stride), 1, z.width, source, z.D, rows)


@function
def store_source_gradient(z, gates, d_source, begin, count, start, end):
    """Store the gradient of the layer's input, which is the gates' gradients times W, of steps `start` to `end`."""
    rows = (end - start) * count
    clear(d_source, rows * z.source_width)
    for gate in range(z.gates):
        k = words_at(z.input_of, gate)[0]
        if k >= 0:
            W = offset(z.W, k * z.D * z.source_width)
            add_of_source(z, d_source, offset(gates, gate * z.stride), z.width, 1, W, rows, z.D)
    for t in range(start, end):
        for r in range(count):
            of_row = offset(d_source, ((t - start) * count + r) * z.source_width)
            stream(z.d_source, row_of(z, begin + r, t) * z.features, of_row, z.features)


@function
def load_chunk(z, gates, old, begin, count, start, end, head):
    """Load the gates of steps `start` to `end`, and the states before each step."""
    for t in range(start, end):
        for r in range(count):
            at = ((t - start) * count + r) * z.width
            load_gates(z, offset(gates, at), row_of(z, begin + r, t), head)
            load_previous(z, offset(old, at), begin + r, t, head)


@function
def run(z, part, head, first, stop, workspace):
    gates, old = workspace, offset(workspace, z.gates * z.stride)
    d_state = offset(old, z.states * z.stride)
    source = offset(d_state, z.states * z.stride)
    for begin in range(first, stop, z.rows):
        count = min(z.rows, stop - begin)
        load_states(z, d_state, z.d_last, begin, count, head)
        chunk = z.chunk // count
        for end in range(z.steps, 0, -chunk):
            start = max(0, end - chunk)
            load_chunk(z, gates, old, begin, count, start, end, head)
            for t in range(end - 1, start - 1, -1):
                for r in range(count):
                    add_given(z, offset(d_state, r * z.width), row_of(z, begin + r, t), head)
                at = (t - start) * count * z.width
                now = offset(gates, at)
                call(z.cell, (now, offset(old, at), d_state, count * z.width))
                add_recurrent_gradient(z, now, d_state, head, count)
                for r in range(count):
                    row = row_of(z, begin + r, t)
                    store_gates(z, offset(now, r * z.width), row, head)
                    if is_reset(z, row):
                        clear_states(z, offset(d_state, r * z.width))
            add_sums(z, gates, old, part, head, (end - start) * count)
            if z.features:
                load_source(z, source, begin, count, start, end)
                add_source_sums(z, gates, source, part, (end - start) * count)
                if z.d_source != 0:
                    store_source_gradient(z, gates, source, begin, count, start, end)
        store_states(z, d_state, z.d_initial, begin, count, head)
