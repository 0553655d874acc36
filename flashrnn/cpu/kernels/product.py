"""A matrix product of narrow rows."""


@cfunc(void(pointer, pointer, intp, intp, pointer, intp, intp), cache=CACHE, **OPTIONS)
def kernel(out, a, row_step, step, w, rows, depth):
    """out [rows, WIDTH] += a [rows, depth] @ w [depth, WIDTH], where a[r, d] stands at r * row_step + d * step.

    Eight rows of w stay in the first cache until all rows of `out` have had them.
    """
    last = rows - 1
    for d in range(0, depth - 7, 8):
        for r in range(0, last, 2):
            product_2x8(
                behind(out, r * WIDTH), behind(a, r * row_step + d * step), row_step, step, behind(w, d * WIDTH)
            )
        if rows % 2:
            at = last * row_step + d * step
            product_1x8(behind(out, last * WIDTH), behind(a, at), row_step, step, behind(w, d * WIDTH))
    for d in range(depth - depth % 8, depth):
        for r in range(0, last, 2):
            product_2x1(
                behind(out, r * WIDTH), behind(a, r * row_step + d * step), row_step, step, behind(w, d * WIDTH)
            )
        if rows % 2:
            at = last * row_step + d * step
            product_1x1(behind(out, last * WIDTH), behind(a, at), row_step, step, behind(w, d * WIDTH))
