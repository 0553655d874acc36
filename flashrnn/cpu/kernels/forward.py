"""The forward time loop of one head and the sequences `first` to `stop`.

If the kernel computes the input product, it does so in one product per chunk of steps, whose results stay in the
caches. Row k of a chunk is step k // count of sequence k % count.
"""


@intrinsic
def prefetch_line(typing, p):
    """Prefetch the cache line that holds p[0]."""

    def generate(context, builder, signature, values):
        byte, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(prefetch, [builder.bitcast(values[0], byte), i32(0), i32(3), i32(1)])  # read, all caches, data
        return context.get_dummy_value()

    return void(p), generate


@function
def load_gates(z, gates, row, head):
    """Load the bias plus the input of every gate for one row of x."""
    for gate in range(z.gates):
        to, bias = offset(gates, gate * z.stride), offset(z.b, (gate * z.heads + head) * z.D)
        k = words_at(z.input_of, gate)[0]
        if k >= 0:
            x = offset(z.x, input_at(z, row, k, head))
            for j in range(z.D):
                to[j] = bias[j] + x[j]
        else:
            copy(to, bias, z.D)


@function
def prefetch_input(z, gate, begin, count, t, head):
    """Prefetch a gate's inputs for step t."""
    k = words_at(z.input_of, gate)[0]
    for r in range(count if k >= 0 and t < z.steps and z.features == 0 else 0):
        x = offset(z.x, input_at(z, row_of(z, begin + r, t), k, head))
        for j in range(0, z.D, LINE):
            prefetch_line(offset(x, j))


@function
def compute_gates(z, gates, source, head, rows):
    """Compute the bias plus the input of every gate from rows of the layer's input."""
    for gate in range(z.gates):
        to, bias = offset(gates, gate * z.stride), offset(z.b, (gate * z.heads + head) * z.D)
        for r in range(rows):
            copy(offset(to, r * z.width), bias, z.D)
        k = words_at(z.input_of, gate)[0]
        if k >= 0:
            W = offset(z.W, k * z.features * z.row)
            add_product_of_rows(z, to, source, z.source_width, W, rows, z.features)


@function
def add_recurrent_sums(z, gates, h, begin, count, t, head):
    """Add R h to the recurrent gates, and prefetch the next step's inputs between the products."""
    for gate in range(z.gates):
        prefetch_input(z, gate, begin, count, t + 1, head)
        k = words_at(z.recurrent_of, gate)[0]
        if k >= 0:
            matrix = offset(z.weights, matrix_at(z, k, head))
            add_product_of_rows(z, offset(gates, gate * z.stride), h, z.width, matrix, count, z.D)


@function
def store_step(z, gates, state, row, head):
    """Store the gates of one sequence in a step, and its states after the step."""
    for gate in range(z.gates if z.pre != 0 else 0):
        stream(z.pre, gate_at(z, row, gate, head), offset(gates, gate * z.stride), z.D)
    stream(z.h, (row * z.heads + head) * z.D, state, z.D)
    for s in range(1, z.states if z.aux != 0 else 1):
        stream(z.aux, aux_at(z, s, row, head), offset(state, s * z.stride), z.D)


@function
def run(z, part, head, first, stop, workspace):
    gates, state = workspace, offset(workspace, z.gates * z.stride)
    source = offset(state, z.states * z.stride)
    for begin in range(first, stop, z.rows):
        count = min(z.rows, stop - begin)
        load_states(z, state, z.initial, begin, count, head)
        chunk = z.chunk // count if z.features else 1
        for start in range(0, z.steps, chunk):
            end = min(start + chunk, z.steps)
            if z.features:
                load_source(z, source, begin, count, start, end)
                compute_gates(z, gates, source, head, (end - start) * count)
            for t in range(start, end):
                now = offset(gates, (t - start) * count * z.width)
                for r in range(count):
                    row = row_of(z, begin + r, t)
                    if is_reset(z, row):
                        clear_states(z, offset(state, r * z.width))
                    if z.features == 0:
                        load_gates(z, offset(now, r * z.width), row, head)
                add_recurrent_sums(z, now, state, begin, count, t, head)
                call(z.cell, (now, state, count * z.width))
                for r in range(count):
                    at = r * z.width
                    store_step(z, offset(now, at), offset(state, at), row_of(z, begin + r, t), head)
        store_states(z, state, z.last, begin, count, head)
