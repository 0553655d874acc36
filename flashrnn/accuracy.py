"""How far a result may be from its float64 reference, by the dtype of the computation."""

import torch
from torch import Tensor

BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-10}
"""Largest relative error ‖out - ref‖ / ‖ref‖."""


def relative_error(out: Tensor, ref: Tensor) -> float:
    """‖out - ref‖ / ‖ref‖, and ‖out‖ where ref is zero."""
    error, norm = (out.double() - ref.double()).norm(), ref.double().norm()
    return (error / norm if norm > 0 else error).item()
