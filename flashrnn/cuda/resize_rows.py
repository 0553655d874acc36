"""Rows of a tensor made longer or shorter by one launch, which is bound by memory.

PyTorch's `pad` and copies of slices take up to four times as long, because they copy number by number.
"""

from torch import Tensor

from flashrnn.cuda import parameters
from flashrnn.cuda.dtype_kernel import DtypeKernel

KERNEL = DtypeKernel("resize_rows", 256, parameters.resize_rows)


def resize_rows(x: Tensor, size: int) -> Tensor:
    """Return x [..., K], contiguous and of a half type or float32, as [..., size]: cut off, or padded with zeros."""
    resized = x.new_empty(*x.shape[:-1], size)
    if not resized.numel():
        return resized
    vectors = -(-resized.nbytes // 16)
    rows = resized.numel() // size
    arguments = {"x": x, "resized": resized, "rows": rows, "from": x.shape[-1], "to": size}
    KERNEL.launch(vectors, arguments, x.dtype, x.device.index)
    return resized
