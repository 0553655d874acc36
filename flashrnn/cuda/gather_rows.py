"""Rows of a tensor in another order and with padding, in one launch.

PyTorch's `index_select` copies element by element, and padding with zeros needs another pass over the memory.
"""

import torch
from torch import Tensor

from flashrnn.cuda.dtype_kernel import DtypeKernel
from flashrnn.cuda.parameters import Parameter, Parameters, numbers
from flashrnn.memory_format import aligned

DTYPE = torch.bfloat16  # for tensors of any dtype: the kernel copies vectors of 16 bytes
_VECTOR, _AT_ONCE, _MOST = 16, 4, 2**31  # bytes; vectors of a thread; vectors of a result


def parameters(dtype: torch.dtype) -> Parameters:
    """Return the parameters of kernels/gather_rows.cuh."""
    return (
        Parameter("x", "const uint4* __restrict__"),
        Parameter("index", "const i64* __restrict__", torch.int64),
        Parameter("gathered", "uint4* __restrict__"),
        *numbers("vectors", "all", "first"),
    )


KERNEL = DtypeKernel("gather_rows", 256, parameters)


def serves(x: Tensor, rows: int) -> bool:
    """Return whether x, on a GPU, has rows of whole vectors, and a result with `rows` rows is not too large."""
    size = x.nbytes // len(x) if len(x) else 1
    return size % _VECTOR == 0 and 0 < rows * size // _VECTOR < _MOST


def gather_rows(x: Tensor, index: Tensor, first: bool = False) -> Tensor:
    """Return x[index] for int64 indices [rows].

    Where an index is negative, the result has zeros or, if `first`, the first row.
    """
    x, gathered = aligned(x.contiguous()), x.new_empty(len(index), *x.shape[1:])
    arguments = {
        "x": x,
        "index": index,
        "gathered": gathered,
        "vectors": x.nbytes // len(x) // _VECTOR,
        "all": gathered.nbytes // _VECTOR,
        "first": int(first),
    }
    KERNEL.launch(-(-arguments["all"] // _AT_ONCE), arguments, DTYPE, x.device.index)
    return gathered
