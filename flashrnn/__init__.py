"""Recurrent networks with fused forward and backward kernels for GPUs and CPUs, for any cell written in PyTorch."""

from flashrnn.cells import Cell, get_cell, register, registered_cells
from flashrnn.cells.reductions import layer_norm, max, mean, rms_norm, sum
from flashrnn.dispatch import UnsupportedProblem, backends
from flashrnn.functional import flashrnn
from flashrnn.layer import FlashRNN
from flashrnn.precompile import warmup
from flashrnn.recurrence import Recurrence

__all__ = [
    "Cell",
    "FlashRNN",
    "Recurrence",
    "UnsupportedProblem",
    "backends",
    "flashrnn",
    "get_cell",
    "layer_norm",
    "max",
    "mean",
    "register",
    "registered_cells",
    "rms_norm",
    "sum",
    "warmup",
]
__version__ = "0.1.0"
