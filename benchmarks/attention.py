"""Causal attention, which a Transformer has in place of a recurrence, with each of PyTorch's kernels."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch.nn import attention as pytorch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from benchmarks.cases import TRAINING, Case, Job
from benchmarks.timing import Effort, measure

_OF_PYTORCH = {
    "flash_2": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# Kernels that replace PyTorch's own flash kernel, with the module that each needs.
_INSTALLED = {"flash_3": ("FA3", "flash_attn_interface"), "flash_4": ("FA4", "flash_attn.cute")}


def _names() -> list[str]:
    """Return the names of PyTorch's own kernels, and of flash 3 and 4 if they are installed."""
    return [*_OF_PYTORCH, *(name for name, (_, module) in _INSTALLED.items() if _found(module))]


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def by_each_kernel(call: Callable[[], dict]) -> dict[str, dict]:
    """Return the results of `call`, which runs attention, by the name of each kernel that supports it."""
    found = {}
    for name in _names():
        try:
            with _kernel(name):
                found[name] = call()
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
    return found


@contextmanager
def _kernel(name: str) -> Iterator[None]:
    """A context in which scaled_dot_product_attention uses only one kernel."""
    if name in _OF_PYTORCH:
        with sdpa_kernel(_OF_PYTORCH[name]):
            yield
        return
    pytorch.activate_flash_attention_impl(_INSTALLED[name][0])
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield
    finally:
        pytorch.restore_flash_attention_impl()


def supports(case: Case) -> bool:
    return 16 <= case.D <= 256


def run(job: Job, effort: Effort) -> dict:
    """Measure causal attention with the heads of the case and every kernel; return the row of the fastest one."""
    case, options = job.case, {"device": "cuda", "dtype": getattr(torch, job.case.dtype), "requires_grad": True}
    qkv = [torch.randn(case.B, case.T, case.N, case.D, **options) for _ in range(3)]

    def forward() -> torch.Tensor:
        return scaled_dot_product_attention(*(x.transpose(1, 2) for x in qkv), is_causal=True)

    found = by_each_kernel(lambda: measure(forward, qkv, job.mode == TRAINING, effort))
    if not found:
        raise ValueError(f"no attention kernel supports {case.name}")
    fastest = min(found, key=lambda name: found[name]["ms"]["p50"])
    return found[fastest] | {"kernel": fastest, "kernels_ms": {name: row["ms"]["p50"] for name, row in found.items()}}


def operators(call: Callable[[], object]) -> list[str]:
    """Return PyTorch's operators for attention that a call runs, such as "cudnn" or "flash"."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        call()
    prefix, suffix = "aten::_scaled_dot_product_", "_attention"
    called = {event.key for event in profiled.key_averages() if event.key.startswith(prefix)}
    return sorted(name.removeprefix(prefix).partition(suffix)[0] for name in called if "_backward" not in name)
