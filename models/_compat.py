"""A private interface of PyTorch that models use, with a public one in its place where it is missing."""

import torch
from torch import Tensor


def copy_each(into: list[Tensor], tensors: list[Tensor]) -> None:
    """Copy each tensor into one of the same size; on a GPU one kernel does, if PyTorch has its operator."""
    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(into, tensors)
        return
    for own, tensor in zip(into, tensors, strict=True):
        own.copy_(tensor)
