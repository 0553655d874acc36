"""Reductions over the units of a head, `count` contiguous elements."""


@function
def copy_row(out, p):
    for j in range(D):
        out[j] = p[j]


@sums
def op_unit_sum(x, count):
    total = F(0)
    for j in range(count):
        total += x[j]
    return total


@function
def op_unit_mean(x, count):
    return op_unit_sum(x, count) / F(count)


@sums
def op_unit_variance(x, count):
    mean, total = op_unit_mean(x, count), F(0)
    for j in range(count):
        total += (x[j] - mean) * (x[j] - mean)
    return total / F(count)


@function
def op_unit_max(x, count):
    largest = x[0]
    for j in range(1, count):
        largest = op_max(largest, x[j])
    return largest
