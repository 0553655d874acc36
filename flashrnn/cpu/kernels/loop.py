"""Arguments and functions of the time loops of both directions.

The gates and states of a head are in a workspace [gates or states, rows, width]. Its rows are sequences, or steps times
sequences; gates are `stride` elements apart. Columns from D on are padding: column-wise computations include them, sums
over columns do not. Code that depends on the cell or the width is called through function pointers, so that these loops
are compiled only once.
"""

# The fields of a kernel's arguments `z`: integers and addresses.
FIELDS = (
    "begun",  # number of tasks that have begun, 0 before the call
    "threads",  # number of threads that have begun, 0 before the call
    "tasks",
    "part",  # number of sequences in a part of the batch
    "workspace",  # [threads, workspace_size]
    "workspace_size",
    "clear",  # whether threads set their workspace to zero, because computing with some values of padding is slow
    "batch",
    "steps",
    "heads",
    "D",
    "batch_stride",  # rows from one sequence to the next
    "time_stride",
    "width",
    "rows",
    "chunk",  # rows of the workspace: steps times sequences
    "stride",
    "gates",
    "states",
    "inputs",
    "matrices",
    "input_of",  # [G]: index of each gate's input, or -1
    "recurrent_of",  # [G]: index of each gate's matrix, or -1
    "multiply",  # the function of product.py or of rows.py
    "row",  # its argument: elements in a row of the matrices; for rows.py the number of their rows
    "step",  # its argument: 1; for rows.py the width
    "cell",  # the function of the cell's step
    "initial",  # [S] addresses of [B, N, D]
    "reset",  # [rows], or 0
    "h",  # [rows, N, D]
    "aux",  # [S-1, rows, N, D]; forward: 0 if not requested
    "pre",  # [rows, N, G, D], the gates' pre-activations; forward: 0 if not requested
    # the input product of a layer of one head
    "features",  # elements in a row of the layer's input; 0 if the kernel reads x and writes d_x instead
    "source",  # [rows, features], the layer's input
    "source_width",  # elements in a row of it in the workspace
    "multiply_source",  # the function of product.py for that width
    "W",  # forward: [Gi, features, row], for rows.py [Gi, D, features]; backward: [Gi, D, source_width]
    # forward
    "x",  # [rows, Gi, N, D]
    "weights",  # [Gr, N, D, row]: R transposed, [previous unit, unit]; for rows.py R itself
    "b",  # [G, N, D]
    "last",  # [S] addresses of [B, N, D]
    # backward
    "R",  # [Gr, N, D, row]; for rows.py transposed
    "d_h",  # [rows, N, D], or 0
    "d_aux",  # [S-1, rows, N, D], or 0
    "d_x",  # [rows, Gi, N, D], or 0
    "d_source",  # [rows, features], or 0
    "d_W",  # [parts, Gi, D, source_width], accumulated
    "d_u",  # [rows, Ga, N, D]: gradients of the gates without an input, or 0
    "alone",  # Ga
    "alone_of",  # [G]: index of each gate among those without an input, or -1
    "d_R",  # [parts, Gr, N, D, width], accumulated, or 0
    "d_b",  # [parts, G, N, width], accumulated
    "one",  # address of a 1; 0 if products are those of rows.py
    "d_last",  # [S] addresses of [B, N, D], or 0: gradients of the last states
    "d_initial",  # [S] addresses of [B, N, D]
)


Arguments = from_dtype(np.dtype([(name, np.intp) for name in FIELDS]))


@intrinsic
def arguments_at(typing, data):
    def generate(context, builder, signature, values):
        return builder.bitcast(values[0], context.get_value_type(Arguments))

    return Arguments(data), generate


@intrinsic
def next_of(typing, counter):
    """Atomically increment the counter and return its previous value."""

    def generate(context, builder, signature, values):
        return builder.atomic_rmw("add", values[0], context.get_constant(intp, 1), "monotonic")

    return intp(counter), generate


@intrinsic
def call(typing, address, arguments):
    """Call the C function at `address` with the elements of the tuple `arguments`."""

    def generate(context, builder, signature, values):
        given = cgutils.unpack_tuple(builder, values[1])
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in given])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), given)
        return context.get_dummy_value()

    return void(address, arguments), generate


@intrinsic
def store_line(typing, out, p):
    """Copy a cache line from p to `out`, which is aligned to lines, bypassing the caches."""

    def generate(context, builder, signature, values):
        line = ir.VectorType(context.get_value_type(real), LINE).as_pointer()
        value = builder.load(builder.bitcast(values[1], line), align=real.bitwidth // 8)
        store = builder.store(value, builder.bitcast(values[0], line), align=64)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return void(out, p), generate


@function
def copy(out, p, count):
    for j in range(count):
        out[j] = p[j]


@function
def stream(start, index, p, count):
    """Copy elements that are not read again soon to offset(start, index), bypassing the caches for whole lines.

    On x86 these stores are not ordered with others until the atomic operation that ends a task.
    """
    out = offset(start, index)
    if count % LINE or index % LINE or start % 64:
        copy(out, p, count)
    else:
        for j in range(0, count, LINE):
            store_line(offset(out, j), offset(p, j))


@function
def add(out, p, count):
    for j in range(count):
        out[j] += p[j]


@function
def clear(out, count):
    for j in range(count):
        out[j] = F(0)


@function
def add_product(z, out, a, row_step, step, w, w_step, rows, depth):
    """Compute out [rows, width] += a [rows, depth] @ w [depth, width].

    a[r, d] is at r * row_step + d * step; rows of w are w_step apart.
    """
    call(z.multiply, (out, a, intp(row_step), intp(step), w, intp(w_step), intp(rows), intp(depth)))


@function
def add_product_of_rows(z, out, a, row_step, w, rows, depth):
    """out [rows, width] += a [rows, depth] @ w [depth, width]; for rows.py, w is transposed.

    Rows of a are row_step apart.
    """
    call(z.multiply, (out, a, intp(row_step), z.step, w, z.row, intp(rows), intp(depth)))


@function
def row_of(z, sequence, t):
    return sequence * z.batch_stride + t * z.time_stride


@function
def is_reset(z, row):
    return z.reset != 0 and bytes_at(z.reset, row)[0] != 0


@function
def input_at(z, row, k, head):
    return ((row * z.inputs + k) * z.heads + head) * z.D


@function
def aux_at(z, s, row, head):
    return (((s - 1) * z.batch * z.steps + row) * z.heads + head) * z.D


@function
def gate_at(z, row, gate, head):
    return ((row * z.heads + head) * z.gates + gate) * z.D


@function
def state_of(z, states, s, sequence, head):
    """Return a pointer to state s of a sequence; `states` are [S] addresses of [B, N, D]."""
    return offset(words_at(states, s)[0], (sequence * z.heads + head) * z.D)


@function
def load_source(z, source, begin, count, start, end):
    """Load the layer's input of steps `start` to `end`."""
    for t in range(start, end):
        for r in range(count):
            to = offset(source, ((t - start) * count + r) * z.source_width)
            copy(to, offset(z.source, row_of(z, begin + r, t) * z.features), z.features)


@function
def matrix_at(z, k, head):
    return (k * z.heads + head) * z.D * z.row


@function
def load_states(z, state, states, begin, count, head):
    """Load the states of `count` sequences; zeros for a state whose address is 0."""
    for s in range(z.states):
        for r in range(count):
            to = offset(state, s * z.stride + r * z.width)
            if words_at(states, s)[0] == 0:
                clear(to, z.D)
            else:
                copy(to, state_of(z, states, s, begin + r, head), z.D)


@function
def store_states(z, state, states, begin, count, head):
    for s in range(z.states):
        for r in range(count):
            copy(state_of(z, states, s, begin + r, head), offset(state, s * z.stride + r * z.width), z.D)


@function
def clear_states(z, state):
    """Set the states of one row to zero."""
    for s in range(z.states):
        clear(offset(state, s * z.stride), z.width)
