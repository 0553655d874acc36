"""The weights of a layer, a Linear and a Recurrence, for functions that compute both without calling the modules."""

import torch
from torch import Tensor, nn

from flashrnn.problem import PLAIN
from flashrnn.recurrence import Recurrence

_MISSING = object()  # stands for a parameter that was replaced by another kind of tensor


def without_hooks(product: nn.Module, recurrent: nn.Module) -> bool:
    """Return whether a layer is completely described by W, R and b.

    Its modules must have no hooks, no parametrizations and no bias of the input product.
    """
    if type(product) is not nn.Linear or type(recurrent) is not Recurrence:  # parametrizations change the class
        return False
    if product._parameters.get("bias") is not None:
        return False
    hooks = product._forward_pre_hooks or product._forward_hooks
    hooks = hooks or recurrent._forward_pre_hooks or recurrent._forward_hooks
    hooks = hooks or product._backward_pre_hooks or product._backward_hooks
    return not (hooks or recurrent._backward_pre_hooks or recurrent._backward_hooks)


def weights_of(
    product: nn.Module, recurrent: nn.Module, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return W, R and b of a layer with this dtype and device; None if its modules are not `without_hooks`.

    Return None, too, if weights have been replaced by ones that do not fit. Parameters are read from the modules'
    dictionaries, because attribute access takes ten times as long.
    """
    if not without_hooks(product, recurrent):
        return None
    of_recurrent = recurrent._parameters
    W, R, b = product._parameters.get("weight"), of_recurrent.get("R"), of_recurrent.get("b", _MISSING)
    for weight in (W, R) if b is None else (W, R, b):
        if type(weight) not in PLAIN or weight.dtype != dtype or weight.device != device:
            return None
    return (W, R, b) if fit(recurrent, W, R, b) else None


def fit(recurrent: Recurrence, W: Tensor, R: Tensor, b: Tensor | None) -> bool:
    """Return whether the weights of a layer, which may have been replaced, have the sizes of its cell and heads.

    Kernels do not check this, and would read beyond the end of a smaller tensor.
    """
    cell, N, D = recurrent.cell, recurrent.num_heads, recurrent.head_dim
    if W.shape[0] != len(cell.input_gates) * N * D or R.shape != (len(cell.recurrent_gates), N, D, D):
        return False
    return b is None or b.shape == (len(cell.gates), N, D)
