"""A loss function under torch.compile, with or without DistributedDataParallel."""

from collections.abc import Callable
from typing import Any

import torch

from training._compat import enclosing_ddp, without_ddp_cuts


class CompiledLoss:
    """Compiles `loss`, any function of tensors, for one shape at a time.

    Inside of DistributedDataParallel, PyTorch cuts the graph at the gradient buckets, so that gradients are reduced
    while others are still being computed. Batches without a reduction (accumulated ones in `no_sync`, and those of an
    evaluation) get a second graph without these cuts. If torch.compile cannot capture `loss` as one graph (nn.LSTM,
    Mamba), both kinds of batches use the graphs of the kind that came first.
    """

    def __init__(self, loss: Callable[..., tuple]) -> None:
        self._loss = loss
        self._compiled = torch.compile(loss, dynamic=False)
        # A separate function for each kind, because torch.compile caches graphs by function.
        self._compiled_whole = torch.compile(self._whole, dynamic=False)

    def _whole(self, *arguments: Any) -> tuple:
        return self._loss(*arguments)

    def __call__(self, *arguments: Any) -> tuple:
        around = enclosing_ddp()
        if around is None or (torch.is_grad_enabled() and around.require_backward_grad_sync):
            return self._compiled(*arguments)
        with without_ddp_cuts():
            return self._compiled_whole(*arguments)
