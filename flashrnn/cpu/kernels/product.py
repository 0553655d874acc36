"""A matrix product of narrow rows."""


@cfunc(void(pointer, intp, pointer, intp, intp, intp, pointer, intp, intp, intp), cache=CACHE, **OPTIONS)
def kernel(out, o, a, i, row_step, step, w, k, rows, depth):
    """out [rows, WIDTH] += a [rows, depth] @ w [depth, WIDTH], where a[r, d] stands at r * row_step + d * step.

    Eight rows of w stay in the first cache until all rows of `out` have had them.
    """
    last = rows - 1
    for d in range(0, depth - 7, 8):
        for r in range(0, last, 2):
            product_2x8(out, o + r * WIDTH, a, i + r * row_step + d * step, row_step, step, w, k + d * WIDTH)
        if rows % 2:
            product_1x8(out, o + last * WIDTH, a, i + last * row_step + d * step, row_step, step, w, k + d * WIDTH)
    for d in range(depth - depth % 8, depth):
        for r in range(0, last, 2):
            product_2x1(out, o + r * WIDTH, a, i + r * row_step + d * step, row_step, step, w, k + d * WIDTH)
        if rows % 2:
            product_1x1(out, o + last * WIDTH, a, i + last * row_step + d * step, row_step, step, w, k + d * WIDTH)
