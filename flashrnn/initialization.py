"""Initial values of recurrent matrices and biases, as in nn.LSTM and as in xLSTM (arXiv 2405.04517)."""

import math

import torch
from torch import Tensor, nn

from flashrnn.cells import Cell

RECURRENT = ("standard", "zeros")
BIAS = ("standard", "zeros", "powerlaw")


def check_init(kind: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{kind} must be one of {', '.join(allowed)}, got {value!r}")


@torch.no_grad()
def init_input(weight: Tensor, hidden_size: int) -> None:
    """Fill `weight` [Gi * hidden_size, features] with uniform numbers in ±1/√hidden_size, as in nn.LSTM."""
    nn.init.uniform_(weight, -1 / math.sqrt(hidden_size), 1 / math.sqrt(hidden_size))


@torch.no_grad()
def init_recurrent(R: Tensor, init: str) -> None:
    """Fill R [Gr, N, D, features]: "standard" means uniform in ±1/√D, as in nn.LSTM; "zeros" is the choice of xLSTM."""
    if init == "zeros":
        R.zero_()
    else:
        nn.init.uniform_(R, -1 / math.sqrt(R.shape[2]), 1 / math.sqrt(R.shape[2]))


@torch.no_grad()
def init_bias(b: Tensor, init: str, cell: Cell, block_index: int = 0, num_blocks: int = 1) -> None:
    """Fill b [G, N, D]: "standard" means uniform in ±1/√D, "zeros" zeros, and "powerlaw" the initial values of xLSTM.

    The latter are zeros, except that the biases of the forget gate fall from 5 (remember) to -7 (forget) over the units
    of a head, the faster the deeper the block is in the model.
    """
    if init == "standard":
        nn.init.uniform_(b, -1 / math.sqrt(b.shape[-1]), 1 / math.sqrt(b.shape[-1]))
        return
    b.zero_()
    if init == "powerlaw":
        if "f" not in cell.gates:
            raise ValueError(f"bias_init 'powerlaw' is for cells with a forget gate f; {cell.name!r} has {cell.gates}")
        depth = block_index / max(num_blocks - 1, 1)
        unit = torch.linspace(0, 1, b.shape[-1], dtype=b.dtype, device=b.device)
        b[cell.gates.index("f")] = 5 - 12 * unit ** (0.3 + 1.3 * depth)
