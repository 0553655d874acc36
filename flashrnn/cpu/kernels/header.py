"""Names that all parts of a kernel use. F and `real` are numpy's and numba's type of the elements."""

# ruff: noqa: F401  (files that are printed after this one use the imports)

import math
from contextlib import suppress
from math import inf, nan

import numpy as np
from llvmlite import ir
from numba import cfunc, from_dtype, intp, njit, uint8, void
from numba.core import cgutils
from numba.extending import intrinsic
from numba.types import CPointer

try:
    from flashrnn.cpu._numba_private import Function, Kernel
except ImportError:
    Function = Kernel = None  # numba's own passes

pointer, words = CPointer(real), CPointer(intp)
LINE = 512 // real.bitwidth  # elements in a cache line of 64 bytes
# "contract" fuses multiplications and additions, but preserves NaN, infinities and the order of sums. Python calls none
# of these functions; wrappers would take a third of the compile time.
OPTIONS = {"error_model": "numpy", "fastmath": {"contract"}, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
function = njit(pipeline_class=Function, **OPTIONS)
# "reassoc" also lets sums be vectorized.
sums = njit(pipeline_class=Function, **(OPTIONS | {"fastmath": {"contract", "reassoc"}}))


def _element_pointer(kind):
    """Return a function of `start`, a pointer or an address, and `index` that returns the pointer to the element."""

    @intrinsic
    def element_pointer(typing, start, index):
        def generate(context, builder, signature, values):
            first = values[0]
            if start == intp:
                first = builder.inttoptr(first, context.get_value_type(kind))
            return builder.gep(first, [values[1]])

        return kind(start, intp), generate

    return element_pointer


offset, words_at, bytes_at = _element_pointer(pointer), _element_pointer(words), _element_pointer(CPointer(uint8))


@intrinsic
def with_widest_vectors(typing):
    """Let the calling function use 64-byte vectors if there are any; for many processors, LLVM prefers 32 bytes."""

    def generate(context, builder, signature, values):
        with suppress(TypeError):  # llvmlite's sets reject attributes that they do not know
            set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return void(), generate
