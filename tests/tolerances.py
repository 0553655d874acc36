"""The tolerance of results against their float64 reference, for every backend and dtype."""

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
    """Check that the relative errors of all results are within the bounds of `dtype`.

    `peers` are results of the reference backend in `dtype`. At discontinuities of a gradient (branches of a max), even
    rounding errors exceed the bound. The peer only rounds h; a kernel also rounds R h and uses approximate functions.
    These are three errors of the same size, so its error may be three times that of the peer.

    `tf32` means that PyTorch allows TF32. The gradient of R is then a TF32 product of PyTorch.
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
