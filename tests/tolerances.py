"""How far a result may be from its float64 reference: the one rule, for every backend and dtype."""

from collections.abc import Mapping

import torch
from torch import Tensor

from flashrnn.accuracy import BOUNDS, TF32_BOUND, relative_error


def assert_close(
    results: Mapping[str, Tensor],
    references: Mapping[str, Tensor],
    dtype: torch.dtype,
    peers: Mapping[str, Tensor] | None = None,
    tf32: bool = False,
) -> None:
    """Every result is as near to its reference as computing in `dtype` allows.

    `peers` are results of the reference in `dtype` itself. Where a gradient is not continuous (the branches of a max),
    rounding alone costs more than the bound. The peer rounds h, a kernel rounds R h as well and has approximate
    functions: three errors of the same size, so it may be off by three times as much as its peer.

    `tf32`: of float32 results where PyTorch allows TF32. The gradient of R is a product of PyTorch's, in TF32 itself.
    """
    assert results.keys() == references.keys()
    for name, out in results.items():
        assert out.shape == references[name].shape, f"{name}: {list(out.shape)}, not {list(references[name].shape)}"
    errors = {name: relative_error(out, references[name]) for name, out in results.items()}
    bounds = dict.fromkeys(results, TF32_BOUND if tf32 else BOUNDS[dtype])
    if tf32 and "gradient of R" in bounds:
        bounds["gradient of R"] = BOUNDS[torch.float16]
    for name, peer in (peers or {}).items():
        bounds[name] = max(bounds[name], 3 * relative_error(peer, references[name]))
    wrong = {name: error for name, error in errors.items() if not error <= bounds[name]}  # nan is wrong too
    assert not wrong, "relative errors: " + ", ".join(f"{k} {e:.2e} > {bounds[k]:.2e}" for k, e in wrong.items())
