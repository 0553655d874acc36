"""A matrix product of narrow rows."""


def _in_blocks(rows, depth, block, column):
    """Return functions that compute `kernel` for whole blocks of `rows` rows, by `depth` terms at a time or by one."""

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


fours = _in_blocks(4, 4, product_4x4, product_4x1)
pairs = _in_blocks(2, 8, product_2x8, product_2x1)
singles = _in_blocks(1, 8, product_1x8, product_1x1)


@cfunc(void(pointer, pointer, intp, intp, pointer, intp, intp), cache=CACHE, **OPTIONS)
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
