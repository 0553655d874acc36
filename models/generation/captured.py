"""The state of a model that a CUDA graph depends on, to detect when a graph is out of date."""

import torch
from torch import nn

from ..walk import parameters


def captured(all_modules: list[nn.Module]) -> tuple:
    """Return everything that a graph of these modules depends on: PyTorch's settings and the addresses of the weights.

    Weights may change in place.
    """
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    weights = tuple((p.data_ptr(), p.dtype) for p in parameters(all_modules))
    return torch.backends.cuda.matmul.fp32_precision, autocast, weights
