"""A matrix product as dot products with rows of the matrix: needs no transposed copy, and works for any width."""


def _dots(rows, columns):
    """Return `dots(out, out_step, a, a_step, w, depth)`: out [rows, columns] += a [rows, depth] @ w.T.

    w is [columns, depth]. Each sum stays in a vector register as one partial sum per lane. Rows of `out` are `out_step`
    apart, and those of a are `a_step` apart.
    """

    @intrinsic
    def dots(typing, out, out_step, a, a_step, w, depth):
        def generate(context, builder, signature, values):
            out, out_step, a, a_step, w, depth = values
            number, i32, aligned, together = a.type.pointee, ir.IntType(32), real.bitwidth // 8, ("contract",)
            vector, indices = ir.VectorType(number, LANES), ir.VectorType(i32, LANES)
            zeros, undefined = ir.Constant(vector, None), ir.Constant(indices, ir.Undefined)

            def pointer_to(start, index):
                return builder.bitcast(builder.gep(start, [index]), vector.as_pointer())

            def load(start, d):
                return builder.load(pointer_to(start, d), align=aligned)

            def load_rest(start, d):
                """Return the last elements of a row, padded with zeros."""
                mask = builder.icmp_signed("<", ir.Constant(indices, list(range(LANES))), left)
                kind = ir.FunctionType(vector, [vector.as_pointer(), i32, mask.type, vector])
                name = f"v{LANES}f{real.bitwidth}"
                masked = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.load.{name}.p0{name}")
                return builder.call(masked, [pointer_to(start, d), i32(aligned), mask, zeros])

            rows_of_a = [builder.gep(a, [builder.mul(a_step, a_step.type(r))]) for r in range(rows)]
            rows_of_w = [builder.gep(w, [builder.mul(depth, depth.type(c))]) for c in range(columns)]
            sums = [[cgutils.alloca_once_value(builder, zeros) for _ in rows_of_w] for _ in rows_of_a]

            def add_products(load, d):
                terms = [load(start, d) for start in rows_of_w]
                for start, of_row in zip(rows_of_a, sums, strict=True):
                    factor = load(start, d)
                    for total, term in zip(of_row, terms, strict=True):
                        product = builder.fmul(factor, term, flags=together)
                        builder.store(builder.fadd(builder.load(total), product, flags=together), total)

            rest = builder.and_(depth, depth.type(LANES - 1))
            whole = builder.sub(depth, rest)
            with cgutils.for_range_slice(builder, whole.type(0), whole, whole.type(LANES)) as (d, _):
                add_products(load, d)
            with builder.if_then(builder.icmp_signed("!=", rest, rest.type(0))):
                left = builder.insert_element(undefined, builder.trunc(rest, i32), i32(0))
                left = builder.shuffle_vector(left, undefined, ir.Constant(indices, None))
                add_products(load_rest, whole)

            def sums_of_pairs(x, y):
                """Return the sums of adjacent elements of x, followed by those of y."""
                halves = (ir.Constant(indices, list(range(first, 2 * LANES, 2))) for first in range(2))
                return builder.fadd(*(builder.shuffle_vector(x, y, half) for half in halves))

            for r, of_row in enumerate(sums):
                vectors = [builder.load(total) for total in of_row]
                for _ in range(LANES.bit_length() - 1):
                    vectors += vectors[-1:] * (len(vectors) % 2)
                    vectors = [sums_of_pairs(x, y) for x, y in zip(vectors[::2], vectors[1::2], strict=True)]
                for c in range(columns):
                    to = builder.gep(out, [builder.add(builder.mul(out_step, out_step.type(r)), out_step.type(c))])
                    total = builder.extract_element(vectors[c // LANES], i32(c % LANES))
                    builder.store(builder.fadd(builder.load(to), total), to)
            return context.get_dummy_value()

        return void(out, out_step, a, a_step, w, depth), generate

    return dots


ROWS, COLUMNS = DOTS
many, row, single = _dots(ROWS, COLUMNS), _dots(1, COLUMNS), _dots(1, 1)


@cfunc(void(pointer, pointer, intp, intp, pointer, intp, intp, intp), cache=CACHE, pipeline_class=Kernel, **OPTIONS)
def kernel(out, a, a_step, out_step, w, columns, rows, depth):
    """Compute out [rows, columns] += a [rows, depth] @ w.T, with w [columns, depth].

    Rows of `out` are `out_step` apart, and those of a are `a_step` apart. A few rows of w stay in the L1 cache until
    all rows of a are done.
    """
    of_many, whole = rows - rows % ROWS, columns - columns % COLUMNS
    for j in range(0, whole, COLUMNS):
        of_w = offset(w, j * depth)
        for r in range(0, of_many, ROWS):
            many(offset(out, r * out_step + j), out_step, offset(a, r * a_step), a_step, of_w, depth)
        for r in range(of_many, rows):
            row(offset(out, r * out_step + j), out_step, offset(a, r * a_step), a_step, of_w, depth)
    for j in range(whole, columns):
        of_w = offset(w, j * depth)
        for r in range(rows):
            single(offset(out, r * out_step + j), out_step, offset(a, r * a_step), a_step, of_w, depth)
