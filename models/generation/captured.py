"""What a CUDA graph has captured of a model, to tell when it is out of date."""

import torch
from torch import nn

from ..walk import parameters


def captured(of_model: list[nn.Module]) -> tuple:
    """Return what a graph has captured of a model's modules and of PyTorch's settings. Weights may change in place."""
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    weights = tuple((p.data_ptr(), p.dtype) for p in parameters(of_model))
    return torch.backends.cuda.matmul.fp32_precision, autocast, weights
