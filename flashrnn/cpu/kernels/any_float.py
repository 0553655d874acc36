"""Element-wise functions that are the same for every dtype."""


@function
def op_where(condition, a, b):
    return a if condition else b


@function
def op_max(a, b):
    return a if (a > b) | (a != a) else b


@function
def op_min(a, b):
    return a if (a < b) | (a != a) else b


@function
def op_abs(x):
    return abs(x)


@function
def op_sign(x):
    return op_where(x > F(0), F(1), op_where(x < F(0), F(-1), F(0)))


@function
def op_sqrt(x):
    return np.sqrt(x)


@function
def op_rsqrt(x):
    return F(1) / np.sqrt(x)


@function
def op_sin(x):
    return np.sin(x)


@function
def op_cos(x):
    return np.cos(x)


@function
def op_atan(x):
    return F(math.atan(x))


@function
def op_erf(x):
    return F(math.erf(x))


@function
def op_erfc(x):
    return F(math.erfc(np.float64(x)))  # the C library's float32 version is less accurate


@function
def op_floor(x):
    return np.floor(x)


@function
def op_round(x):
    return np.rint(x)


@function
def op_fmod(x, y):
    return np.fmod(x, y)


@function
def op_copysign(x, y):
    return np.copysign(x, y)


@function
def op_pow(x, y):
    return F(x**y)
