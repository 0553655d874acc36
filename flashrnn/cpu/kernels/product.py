"""A matrix product of narrow rows."""


def _block(rows, depth):
    """Return `block(out, a, row_step, step, w)`: out [rows, WIDTH] += a [rows, depth] @ w [depth, WIDTH].

    Vectors of columns, for each of which `depth` products are added up per load and store of `out`.
    """

    @intrinsic
    def block(typing, out, a, row_step, step, w):
        def generate(context, builder, signature, values):
            out, a, row_step, step, w = values
            number, aligned, together = a.type.pointee, real.bitwidth // 8, ("contract",)
            vector, undefined = ir.VectorType(number, LINE), ir.Constant(ir.VectorType(number, LINE), ir.Undefined)
            zero, stop, line = (context.get_constant(intp, k) for k in (0, WIDTH, LINE))
            first = ir.Constant(ir.VectorType(ir.IntType(32), LINE), None)  # place, for every place

            def everywhere(r, d):
                """Return a vector of a[r, d]."""
                row, column = builder.mul(row_step, row_step.type(r)), builder.mul(step, step.type(d))
                value = builder.load(builder.gep(a, [builder.add(row, column)]))
                return builder.shuffle_vector(builder.insert_element(undefined, value, zero), undefined, first)

            def vector_at(start, row, column):
                index = builder.add(context.get_constant(intp, row * WIDTH), column)
                return builder.bitcast(builder.gep(start, [index]), vector.as_pointer())

            factors = [[everywhere(r, d) for d in range(depth)] for r in range(rows)]
            with cgutils.for_range_slice(builder, zero, stop, line, zero.type) as (column, _):
                terms = [builder.load(vector_at(w, d, column), align=aligned) for d in range(depth)]
                for r in range(rows):
                    place = vector_at(out, r, column)
                    total = builder.load(place, align=aligned)
                    for factor, term in zip(factors[r], terms, strict=True):
                        total = builder.fadd(total, builder.fmul(factor, term, flags=together), flags=together)
                    builder.store(total, place, align=aligned)
            return context.get_dummy_value()

        return void(out, a, row_step, step, w), generate

    return block


def _in_blocks(rows, depth):
    """Return a function that computes `kernel` for whole blocks of `rows` rows, by `depth` terms or by one."""
    block, column = _block(rows, depth), _block(rows, 1)

    @function
    def add(out, a, row_step, step, w, count, terms):
        whole = terms - terms % depth
        for d in range(0, whole, depth):
            for r in range(0, count, rows):
                block(offset(out, r * WIDTH), offset(a, r * row_step + d * step), row_step, step, offset(w, d * WIDTH))
        for d in range(whole, terms):
            for r in range(0, count, rows):
                column(offset(out, r * WIDTH), offset(a, r * row_step + d * step), row_step, step, offset(w, d * WIDTH))

    return add


fours, pairs, singles = _in_blocks(4, 4), _in_blocks(2, 8), _in_blocks(1, 8)


@cfunc(void(pointer, pointer, intp, intp, pointer, intp, intp), cache=CACHE, pipeline_class=Kernel, **OPTIONS)
def kernel(out, a, row_step, step, w, rows, depth):
    """out [rows, WIDTH] += a [rows, depth] @ w [depth, WIDTH], where a[r, d] stands at r * row_step + d * step.

    A block's rows of w stay in the first cache until all rows of `out` have had them.
    """
    done = rows - rows % 4
    fours(out, a, row_step, step, w, done, depth)
    if rows % 4 >= 2:
        pairs(offset(out, done * WIDTH), offset(a, done * row_step), row_step, step, w, 2, depth)
    if rows % 2:
        singles(offset(out, (rows - 1) * WIDTH), offset(a, (rows - 1) * row_step), row_step, step, w, 1, depth)
