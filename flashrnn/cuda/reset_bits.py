"""Reset masks as bits, in one launch; by PyTorch it would be five, which take the host longer than a short sequence."""

import torch
from torch import Tensor

from flashrnn.cuda.dtype_kernel import DtypeKernel
from flashrnn.cuda.parameters import Parameter, Parameters, numbers

WORD = 32  # steps
DTYPE = torch.bfloat16  # the kernel is the same for all dtypes


def parameters(dtype: torch.dtype) -> Parameters:
    """Return the parameters of kernels/reset_bits.cuh."""
    return (
        Parameter("reset", "const unsigned char* __restrict__", torch.bool, ("B", "T")),
        Parameter("bits", "u32* __restrict__", torch.int32),
        *numbers("B", "T", "of_b", "of_t"),
    )


KERNEL = DtypeKernel("reset_bits", 128, parameters)


def reset_bits(reset: Tensor) -> Tensor:
    """Return a mask, bool [B, T] with any strides, as bits in int32 [B, ceil(T / WORD)], the first step lowest."""
    (B, T), (of_b, of_t) = reset.shape, reset.stride()
    bits = reset.new_empty(B, -(-T // WORD), dtype=torch.int32)
    arguments = {"reset": reset, "bits": bits, "B": B, "T": T, "of_b": of_b, "of_t": of_t}
    KERNEL.launch(bits.numel(), arguments, DTYPE, reset.device.index)
    return bits
