"""Asynchronous copies between the host and a GPU."""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the values as a tensor on the device, without waiting for the copy."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


class PendingTokens:
    """Tokens that are being copied to the host asynchronously."""

    def __init__(self, tokens: Tensor) -> None:
        self._arrived = None
        if tokens.device.type == "cpu":
            self._tokens = tokens.clone()
            return
        self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        self._tokens.copy_(tokens, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def read(self) -> Tensor:
        """Wait for the copy and return the tokens, int64 [steps, rows]."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tokens
