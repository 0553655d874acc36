"""Element-wise functions in float64, from the C library."""


@function
def op_exp(x):
    return math.exp(x)


@function
def op_exp2(x):
    return np.exp2(x)


@function
def op_expm1(x):
    return math.expm1(x)


@function
def op_tanh(x):
    return math.tanh(x)


@function
def op_sigmoid(x):
    return F(1) / (F(1) + math.exp(-x))


@function
def op_log(x):
    return np.log(x)


@function
def op_log1p(x):
    return np.log1p(x)
