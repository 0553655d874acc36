"""How far a result may be from its float64 reference, by the dtype of the computation."""

import torch
from torch import Tensor

BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-10}
"""Largest relative error ‖out - ref‖ / ‖ref‖."""

TF32_BOUND = 4 * 2**-16
"""The same for float32 where PyTorch allows TF32: four times the error of a product of bf16x2 splits, as the bound of
float16 is four times its rounding error.

A split x = hi + lo + e rounds twice to 8 bits, so that |e| <= 2^-18 |x|. A product of two of them leaves out both e and
lo lo: together at most 3 * 2^-18 of it, less than 2^-16. TF32 itself, in which PyTorch makes the products around the
kernels, rounds both factors to 11 bits, as float16 does: 2^-10 of a product.
"""


def relative_error(out: Tensor, ref: Tensor) -> float:
    """Return ‖out - ref‖ / ‖ref‖, or ‖out‖ where ref is zero."""
    error, norm = (out.double() - ref.double()).norm(), ref.double().norm()
    return (error / norm if norm > 0 else error).item()
