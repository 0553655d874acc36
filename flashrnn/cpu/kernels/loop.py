"""What the time loops of both directions do.

A head's numbers are kept as [gates or states][rows][width], rows being sequences, or steps of sequences; `stride` is
the distance of two gates. The columns from D to the width take part in all that is done by column, and are not read
across columns. `p, i` is the place i behind the pointer p. All that depends on the cell or the width stands behind
function pointers, so that these loops are compiled once.
"""

Sizes = namedtuple(
    "Sizes", "batch steps heads D batch_stride time_stride width rows stride gates states inputs"
)  # as the array `sizes` has them


@function
def unpack(sizes):
    return Sizes(
        sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8], sizes[9], sizes[10],
        sizes[11],
    )  # fmt: skip


@intrinsic
def call(typing, address, arguments):
    """Calls the C function at `address` with the elements of the tuple `arguments`."""

    def generate(context, builder, signature, values):
        given = cgutils.unpack_tuple(builder, values[1])
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in given])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), given)
        return context.get_dummy_value()

    return void(address, arguments), generate


@function
def copy(out, o, p, i, count):
    for j in range(count):
        out[o + j] = p[i + j]


@function
def add(out, o, p, i, count):
    for j in range(count):
        out[o + j] += p[i + j]


@function
def clear(out, o, count):
    for j in range(count):
        out[o + j] = F(0)


@function
def add_product(multiply, out, o, a, i, row_step, step, w, k, rows, depth):
    """out [rows, width] += a [rows, depth] @ w [depth, width], where a[r, d] stands at r * row_step + d * step."""
    call(multiply, (out, intp(o), a, intp(i), intp(row_step), intp(step), w, intp(k), intp(rows), intp(depth)))


@function
def row_of(z, sequence, t):
    return sequence * z.batch_stride + t * z.time_stride


@function
def load_gates(z, input_of, gates, at, x, b, row, head):
    """Bias and input of every gate at one row of x."""
    for gate in range(z.gates):
        copy(gates, gate * z.stride + at, b, (gate * z.heads + head) * z.D, z.D)
        if input_of[gate] >= 0:
            add(gates, gate * z.stride + at, x, ((row * z.inputs + input_of[gate]) * z.heads + head) * z.D, z.D)


@function
def add_recurrent_sums(z, recurrent_of, multiply, gates, h, weights, head, rows):
    """Adds R h of `rows` rows of h to the gates that have a recurrent part."""
    for gate in range(z.gates):
        if recurrent_of[gate] >= 0:
            matrix = (recurrent_of[gate] * z.heads + head) * z.D * z.width
            add_product(multiply, gates, gate * z.stride, h, 0, z.width, 1, weights, matrix, rows, z.D)


@function
def load_states(z, state, states, begin, count, head):
    for s in range(z.states):
        for r in range(count):
            copy(state, s * z.stride + r * z.width, states, ((s * z.batch + begin + r) * z.heads + head) * z.D, z.D)


@function
def store_states(z, state, states, begin, count, head):
    for s in range(z.states):
        for r in range(count):
            copy(states, ((s * z.batch + begin + r) * z.heads + head) * z.D, state, s * z.stride + r * z.width, z.D)


@function
def clear_states(z, state, at):
    for s in range(z.states):
        clear(state, s * z.stride + at, z.width)
