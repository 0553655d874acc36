"""Names that all parts of a kernel use. F and `real` are numpy's and numba's names of the dtype."""

# ruff: noqa: F401  (the files that are printed after this one use them)

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
    Function = Kernel = None  # numba's own

pointer, words = CPointer(real), CPointer(intp)
LINE = 512 // real.bitwidth  # numbers in 64 bytes
# Products and sums become one instruction; NaN, infinities and the order of sums stay. Python calls none of these
# functions, and wrappers for it would take a third of the time to compile.
OPTIONS = {"error_model": "numpy", "fastmath": {"contract"}, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
function = njit(pipeline_class=Function, **OPTIONS)
# Of vectors, whose places are added up apart.
sums = njit(pipeline_class=Function, **(OPTIONS | {"fastmath": {"contract", "reassoc"}}))


def _places_of(kind):
    """Return a function `place(start, index)`: the pointer to element `index` of `start`, a pointer or an address."""

    @intrinsic
    def place(typing, start, index):
        def generate(context, builder, signature, values):
            first = values[0]
            if start == intp:
                first = builder.inttoptr(first, context.get_value_type(kind))
            return builder.gep(first, [values[1]])

        return kind(start, intp), generate

    return place


offset, words_at, bytes_at = _places_of(pointer), _places_of(words), _places_of(CPointer(uint8))


@intrinsic
def with_widest_vectors(typing):
    """Let loops of the calling function use 64-byte vectors where there are any: for many processors LLVM takes 32."""

    def generate(context, builder, signature, values):
        with suppress(TypeError):  # it is none of the attributes that llvmlite knows, whose sets check that
            set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return void(), generate
