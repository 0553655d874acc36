"""A loss under torch.compile, also inside of DistributedDataParallel."""

from collections.abc import Callable

import torch
from torch import Tensor

from training._compat import enclosing_ddp, without_ddp_cuts


class CompiledLoss:
    """Compiles `loss`, any function of tensors, for one shape at a time.

    PyTorch cuts what runs inside of DistributedDataParallel at its buckets, so that gradients are reduced while others
    are computed. Batches that have none to reduce (of `no_sync`, which accumulates, or of an evaluation) have a graph
    without those cuts. Where torch.compile cannot take `loss` as one graph (nn.LSTM, Mamba), both kinds use the graphs
    of the kind that came first.
    """

    def __init__(self, loss: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self._loss = loss
        self._compiled = torch.compile(loss, dynamic=False)
        # By a function of its own: torch.compile keeps its graphs by function.
        self._compiled_whole = torch.compile(self._whole, dynamic=False)

    def _whole(self, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._loss(*tensors)

    def __call__(self, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        around = enclosing_ddp()
        if around is None or (torch.is_grad_enabled() and around.require_backward_grad_sync):
            return self._compiled(*tensors)
        with without_ddp_cuts():
            return self._compiled_whole(*tensors)
