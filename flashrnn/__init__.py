"""FlashRNN: traditional recurrent networks at the speed of the hardware."""

from flashrnn.cells import Cell, cells, get_cell, register
from flashrnn.dispatch import UnsupportedProblem, backends
from flashrnn.layer import FlashRNN, Recurrence
from flashrnn.op import flashrnn

__all__ = [
    "Cell",
    "FlashRNN",
    "Recurrence",
    "UnsupportedProblem",
    "backends",
    "cells",
    "flashrnn",
    "get_cell",
    "register",
]
__version__ = "0.1.0"
