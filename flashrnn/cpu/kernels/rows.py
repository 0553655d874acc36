"""A matrix product by rows of the matrix: it needs no copy in another order, nor a width that the compiler knows."""


@cfunc(void(pointer, pointer, intp, intp, pointer, intp, intp), cache=CACHE, pipeline_class=Kernel, **OPTIONS)
def kernel(out, a, row_step, step, w, rows, depth):
    """out [rows, depth] += a [rows, depth] @ w.T, w [depth, depth], rows of `out` and a being `row_step` apart.

    Four rows of w stay in the first cache until all rows of a have had them.
    """
    fours, whole = rows - rows % 4, depth - depth % 4
    for j in range(0, whole, 4):
        w4 = offset(w, j * depth)
        for r in range(0, fours, 4):
            dots_4x4(offset(out, r * row_step + j), offset(a, r * row_step), row_step, w4, depth)
        for r in range(fours, rows):
            dots_1x4(offset(out, r * row_step + j), offset(a, r * row_step), row_step, w4, depth)
    for j in range(whole, depth):
        for r in range(rows):
            dots_1x1(offset(out, r * row_step + j), offset(a, r * row_step), row_step, offset(w, j * depth), depth)
