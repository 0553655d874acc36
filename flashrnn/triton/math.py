"""Functions that printed cells call, made of operators that all GPUs and Triton's interpreter support.

`launch.load` puts this text before that of a cell. Unless stated otherwise, relative errors are about 2^-20, and no
argument overflows to NaN. exp2 and rsqrt are one instruction each on NVIDIA GPUs, exp five and a division six;
therefore the square of rsqrt replaces reciprocals.
"""

import triton
import triton.language as tl


@triton.jit
def op_exp2(x):
    return tl.exp2(x)


@triton.jit
def op_exp(x):
    return tl.exp2(1.4426950408889634 * x)  # rounding the argument causes an error of |x| 2^-24


@triton.jit
def op_log(x):
    return tl.log(x)


@triton.jit
def op_sqrt(x):
    return tl.sqrt(x)


@triton.jit
def op_rsqrt(x):
    return tl.rsqrt(x)


@triton.jit
def op_sin(x):
    return tl.sin(x)


@triton.jit
def op_cos(x):
    return tl.cos(x)


@triton.jit
def op_erf(x):
    return tl.erf(x)


@triton.jit
def op_abs(x):
    return tl.abs(x)


@triton.jit
def op_floor(x):
    return tl.floor(x)


@triton.jit
def op_sigmoid(x):
    root = tl.rsqrt(1.0 + tl.exp2(-1.4426950408889634 * x))  # 0 if exp2 is infinite
    return root * root


@triton.jit
def op_tanh(x):
    square = x * x  # a polynomial near 0, where the subtraction below cancels
    small = x + x * square * (-0.3333232 + square * (0.1328940 - 0.0484720 * square))
    root = tl.rsqrt(1.0 + tl.exp2(-2.8853900817779268 * x))
    return tl.where(tl.abs(x) < 0.375, small, 2.0 * (root * root) - 1.0)


@triton.jit
def op_expm1(x):
    series = 1.0 / 120.0 + x * (1.0 / 720.0 + x * (1.0 / 5040.0 + x * (1.0 / 40320.0)))
    small = x + x * x * (1.0 / 2.0 + x * (1.0 / 6.0 + x * (1.0 / 24.0 + x * series)))
    return tl.where(tl.abs(x) < 0.5, small, op_exp(x) - 1.0)


@triton.jit
def op_log1p(x):
    s = x / (2.0 + x)  # log(1 + x) = 2 artanh(s), by its Taylor series
    z = s * s
    series = 1.0 / 3.0 + z * (1.0 / 5.0 + z * (1.0 / 7.0 + z * (1.0 / 9.0)))
    return tl.where(tl.abs(x) < 0.25, 2.0 * (s + s * z * series), tl.log(1.0 + x))


@triton.jit
def op_atan(x):
    """Return the arc tangent by a polynomial for |x| <= tan(pi/8).

    Larger numbers are reduced to this range by tan(a - pi/4) = (x - 1) / (x + 1) and tan(a - pi/2) = -1 / x.
    """
    size = tl.abs(x)
    middle, large = size > 0.4142135623730950, size > 2.414213562373095
    r = tl.where(large, -1.0 / size, tl.where(middle, (size - 1.0) / (size + 1.0), size))
    z = r * r
    series = -0.333329491539 + z * (0.199777106478 + z * (-0.138776856032 + z * 0.0805374449538))
    start = tl.where(large, 1.5707963267948966, tl.where(middle, 0.7853981633974483, 0.0))
    return op_copysign(start + (r + r * z * series), x)


@triton.jit
def op_erfc(x):
    """Return erfc(x) from an approximation of log(erfc(|x|)) + x^2 (Numerical Recipes, erfcc).

    The approximation has an error of 2^-23, the exponential one of x^2 2^-24.
    """
    size = tl.abs(x)
    t = 1.0 / (1.0 + 0.5 * size)
    series = 1.48851587 + t * (-0.82215223 + t * 0.17087277)
    series = -0.18628806 + t * (0.27886807 + t * (-1.13520398 + t * series))
    series = -1.26551223 + t * (1.00002368 + t * (0.37409196 + t * (0.09678418 + t * series)))
    right = t * op_exp(series - size * size)
    return tl.where(x >= 0.0, right, 2.0 - right)


@triton.jit
def op_sign(x):
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))


@triton.jit
def op_copysign(x, y):
    size = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    sign = y.to(tl.int32, bitcast=True) & -0x80000000
    return (size | sign).to(tl.float32, bitcast=True)


@triton.jit
def op_round(x):
    """Return the nearest integer, ties to even."""
    below = tl.floor(x)
    rest = x - below
    odd = below != 2.0 * tl.floor(0.5 * below)
    return tl.where((rest > 0.5) | ((rest == 0.5) & odd), below + 1.0, below)


@triton.jit
def op_fmod(x, y):
    """Return the remainder of x / y with the sign of x; exact if |x / y| < 2^22."""
    size, divisor = tl.abs(x), tl.abs(y)
    rest = tl.fma(-tl.floor(size / divisor), divisor, size)
    rest = tl.where(rest < 0.0, rest + divisor, rest)  # if the quotient was rounded up to an integer
    rest = tl.where(rest >= divisor, rest - divisor, rest)
    rest = tl.where((divisor == float("inf")) & (size < divisor), size, rest)
    return op_copysign(rest, x)


@triton.jit
def op_max(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def op_min(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def op_pow(x, y):
    size = tl.exp2(y * tl.log2(tl.abs(x)))
    odd = y - 2.0 * tl.floor(y / 2.0)
    sign = tl.where(x >= 0.0, 1.0, tl.where(y != tl.floor(y), float("nan"), 1.0 - 2.0 * odd))
    return tl.where(y == 0.0, 1.0, size * sign)


@triton.jit
def only_units(x, D: tl.constexpr, other):
    """Return x [sequences, units] with `other` in the padding of the head."""
    return tl.where(tl.arange(0, x.shape[1])[None, :] < D, x, other)


@triton.jit
def plus(x, y):
    return x + y


@triton.jit
def op_unit_sum(x, D: tl.constexpr):
    return tl.reduce(only_units(x, D, 0.0), 1, plus, keep_dims=True)  # tl.sum may only be compilable


@triton.jit
def op_unit_mean(x, D: tl.constexpr):
    return op_unit_sum(x, D) / D


@triton.jit
def op_unit_max(x, D: tl.constexpr):
    return tl.reduce(only_units(x, D, float("-inf")), 1, op_max, keep_dims=True)


@triton.jit
def op_unit_variance(x, D: tl.constexpr):
    deviation = x - op_unit_mean(x, D)
    return op_unit_mean(deviation * deviation, D)
