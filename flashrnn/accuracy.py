"""Bounds for the error of a result against its float64 reference, by the dtype of the computation."""

import torch
from torch import Tensor

BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-10}
"""The largest relative error ‖out - ref‖ / ‖ref‖."""

TF32_BOUND = 4 * 2**-16
"""The bound for float32 if PyTorch allows TF32: four times the error of a product of bf16x2 splits, as the bound for
float16 is four times its rounding error.

A split x = hi + lo + e rounds twice to 8 bits, so |e| <= 2^-18 |x|. A product of two splits omits both e and lo * lo,
in total at most 3 * 2^-18 of the product, less than 2^-16. PyTorch's own TF32 products, before and after the kernels,
round both factors to 11 bits, like float16, with an error of up to 2^-10 of the product.
"""


def relative_error(out: Tensor, ref: Tensor) -> float:
    """Return ‖out - ref‖ / ‖ref‖, or ‖out‖ if ref is zero."""
    error, norm = (out.double() - ref.double()).norm(), ref.double().norm()
    return (error / norm if norm > 0 else error).item()
