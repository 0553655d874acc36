"""How far a result may be from its float64 reference: the one rule, for every backend and dtype."""

from collections.abc import Mapping

import torch
from torch import Tensor

BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-10}
"""Largest relative error ‖out - ref‖ / ‖ref‖ by the dtype of the computation."""


def relative_error(out: Tensor, ref: Tensor) -> float:
    """‖out - ref‖ / ‖ref‖, and ‖out‖ where ref is zero."""
    error, norm = (out.double() - ref.double()).norm(), ref.double().norm()
    return (error / norm if norm > 0 else error).item()


def assert_close(results: Mapping[str, Tensor], references: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Every result is as near to its reference as computing in `dtype` allows."""
    assert results.keys() == references.keys()
    for name, out in results.items():
        assert out.shape == references[name].shape, f"{name}: {list(out.shape)}, not {list(references[name].shape)}"
    errors = {name: relative_error(out, references[name]) for name, out in results.items()}
    wrong = {name: error for name, error in errors.items() if not error <= BOUNDS[dtype]}  # nan is wrong too
    assert not wrong, f"relative errors above {BOUNDS[dtype]:g}: " + ", ".join(f"{k} {e:.2e}" for k, e in wrong.items())
