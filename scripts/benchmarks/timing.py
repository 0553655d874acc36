"""Random inputs on the GPU, and the time and memory of what runs on them.

Imports nothing of this project's, so that the process of another package of the name `flashrnn` can use it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Effort(NamedTuple):
    """Milliseconds for which a function is called before and while it is timed."""

    warmup: int
    rep: int


FULL, QUICK = Effort(100, 400), Effort(25, 50)


def random_inputs(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, device: str = "cuda") -> list[Tensor]:
    """Wx, R and b of these shapes and of the sizes of a trained network; they ask for gradients."""
    torch.manual_seed(0)
    scale = {"R": shapes["R"][-1] ** -0.5}
    inputs = (scale.get(name, 1.0) * torch.randn(*shape, device=device) for name, shape in shapes.items())
    return [x.to(dtype).requires_grad_() for x in inputs]


def measure(forward: Callable[[], Tensor], inputs: Sequence[Tensor], training: bool, effort: Effort) -> dict:
    """Time of `forward` without gradients, or with those of `inputs`, and the memory that it takes beside them."""
    if training:
        d_out = torch.randn_like(forward().detach())

        def run():
            return torch.autograd.grad(forward(), inputs, d_out)
    else:
        run = torch.no_grad()(forward)
    return {"ms": _quantiles(run, effort), "peak_mib": _peak_mib(run)}


def _quantiles(run: Callable, effort: Effort) -> dict[str, float]:
    """Milliseconds between events on the device around each call; the L2 cache is emptied before it."""
    from triton.testing import do_bench

    times = do_bench(run, warmup=effort.warmup, rep=effort.rep, quantiles=[0.2, 0.5, 0.8])
    return dict(zip(("p20", "p50", "p80"), (round(ms, 4) for ms in times), strict=True))


def _peak_mib(run: Callable) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
