"""A loss under torch.compile, also inside of DistributedDataParallel."""

from collections.abc import Callable
from typing import Any

import torch

from training._compat import enclosing_ddp, without_ddp_cuts


class CompiledLoss:
    """Compiles `loss`, any function of tensors, for one shape at a time.

    PyTorch cuts what runs inside of DistributedDataParallel at its buckets, so that gradients are reduced while others
    are computed. Batches that have none to reduce (of `no_sync`, which accumulates, or of an evaluation) have a graph
    without those cuts. Where torch.compile cannot take `loss` as one graph (nn.LSTM, Mamba), both kinds use the graphs
    of the kind that came first.
    """

    def __init__(self, loss: Callable[..., tuple]) -> None:
        self._loss = loss
        self._compiled = torch.compile(loss, dynamic=False)
        # By a function of its own: torch.compile keeps its graphs by function.
        self._compiled_whole = torch.compile(self._whole, dynamic=False)

    def _whole(self, *arguments: Any) -> tuple:
        return self._loss(*arguments)

    def __call__(self, *arguments: Any) -> tuple:
        around = enclosing_ddp()
        if around is None or (torch.is_grad_enabled() and around.require_backward_grad_sync):
            return self._compiled(*arguments)
        with without_ddp_cuts():
            return self._compiled_whole(*arguments)
