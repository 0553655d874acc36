"""A matrix product with a matrix of WIDTH columns, a constant."""

VECTORS = WIDTH // LANES  # vectors in a row


def _tile(rows, vectors):
    """Return a function that computes out [rows, vectors * LANES] += a [rows, depth] @ w with its sums in registers.

    Rows of `out` are WIDTH apart, rows of w are w_step apart.
    """

    @intrinsic
    def tile(typing, out, a, row_step, step, w, w_step, depth):
        def generate(context, builder, signature, values):
            out, a, row_step, step, w, w_step, depth = values
            width = w_step.type(WIDTH)
            vector, aligned, together = ir.VectorType(a.type.pointee, LANES), real.bitwidth // 8, ("contract",)
            undefined = ir.Constant(vector, ir.Undefined)
            first = ir.Constant(ir.VectorType(ir.IntType(32), LANES), None)

            def broadcast(r, d):
                """Return a vector filled with a[r, d]."""
                index = builder.add(builder.mul(row_step, row_step.type(r)), builder.mul(step, d))
                value = builder.load(builder.gep(a, [index]))
                single = builder.insert_element(undefined, value, ir.IntType(32)(0))
                return builder.shuffle_vector(single, undefined, first)

            def vector_at(start, row, apart, v):
                index = builder.add(builder.mul(row, apart), row.type(v * LANES))
                return builder.bitcast(builder.gep(start, [index]), vector.as_pointer())

            places = [(r, v) for r in range(rows) for v in range(vectors)]
            sums = {place: cgutils.alloca_once(builder, vector) for place in places}
            for (r, v), total in sums.items():
                builder.store(builder.load(vector_at(out, depth.type(r), width, v), align=aligned), total)
            with cgutils.for_range(builder, depth) as loop:
                terms = [builder.load(vector_at(w, loop.index, w_step, v), align=aligned) for v in range(vectors)]
                for r in range(rows):
                    factor = broadcast(r, loop.index)
                    for v, term in enumerate(terms):
                        product = builder.fmul(factor, term, flags=together)
                        builder.store(builder.fadd(builder.load(sums[r, v]), product, flags=together), sums[r, v])
            for (r, v), total in sums.items():
                builder.store(builder.load(total), vector_at(out, depth.type(r), width, v), align=aligned)
            return context.get_dummy_value()

        return void(out, a, row_step, step, w, w_step, depth), generate

    return tile


def _in_columns(rows, vectors, begin, end):
    """Return a function that computes `kernel` for whole blocks of `rows` rows and columns `begin` to `end`."""
    tile = _tile(rows, vectors)

    @function
    def add(out, a, row_step, step, w, w_step, count, depth):
        for column in range(begin, end, vectors * LANES):
            for r in range(0, count, rows):
                of_tile, of_a = offset(out, r * WIDTH + column), offset(a, r * row_step)
                tile(of_tile, of_a, row_step, step, offset(w, column), w_step, depth)

    return add


def _in_tiles(rows, most):
    """Return a function that computes `kernel` for whole blocks of `rows` rows.

    Its tiles are at most `most` vectors wide, and their widths differ by at most one vector.
    """
    tiles = -(-VECTORS // most)
    vectors, wider = divmod(VECTORS, tiles)
    end = wider * (vectors + 1) * LANES
    wide, others = _in_columns(rows, vectors + 1, 0, end), _in_columns(rows, vectors, end, WIDTH)

    @function
    def add(out, a, row_step, step, w, w_step, count, depth):
        wide(out, a, row_step, step, w, w_step, count, depth)
        others(out, a, row_step, step, w, w_step, count, depth)

    return add


many, few, singles = _in_tiles(*MANY), _in_tiles(*FEW), _in_tiles(1, 8)


@function
def _rows_of_few(rows):
    """Return how many rows to put into tiles of FEW, the others into tiles of MANY, to leave the fewest single rows."""
    best, left = 0, rows % MANY[0]
    for count in range(FEW[0], min(rows + 1, MANY[0] * FEW[0]), FEW[0]):
        if (rows - count) % MANY[0] < left:
            best, left = count, (rows - count) % MANY[0]
    return best


@cfunc(void(pointer, pointer, intp, intp, pointer, intp, intp, intp), cache=CACHE, pipeline_class=Kernel, **OPTIONS)
def kernel(out, a, row_step, step, w, w_step, rows, depth):
    """Compute out [rows, WIDTH] += a [rows, depth] @ w [depth, WIDTH].

    a[r, d] is at r * row_step + d * step; rows of w are w_step apart. The columns of w that a tile needs stay in the L1
    cache until all rows of `out` are done.
    """
    of_few = _rows_of_few(rows)
    of_many = (rows - of_few) // MANY[0] * MANY[0]
    whole = of_many + of_few
    many(out, a, row_step, step, w, w_step, of_many, depth)
    few(offset(out, of_many * WIDTH), offset(a, of_many * row_step), row_step, step, w, w_step, of_few, depth)
    singles(offset(out, whole * WIDTH), offset(a, whole * row_step), row_step, step, w, w_step, rows - whole, depth)
