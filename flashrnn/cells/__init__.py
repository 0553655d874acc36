"""Cells: the step of a recurrent network for one unit, and everything that is derived from it.

A cell is written once, here or by a user, as a few lines of PyTorch. All backends use these lines: the reference calls
them, and the kernels are printed from their trace. The recurrence (arXiv 2412.07752, eq. 1-2) is

    g_t^(j) = x_t^(j) + R^(j) s_{t-1}^(0) + b^(j)      for every gate j: input, recurrent matrix, bias
    s_t^(i) = P^(i)(g_t, s_{t-1})                      for every state i: the step P

and a cell defines P and which gates have an input part and which a recurrent one. P is element-wise except for
reductions over the units of a head.

Letters used everywhere in this package: B batch, T time, G gates, N heads, D head size, S states;
Gi and Gr are the numbers of gates with an input and with a recurrent part.
"""

from flashrnn.cells.built_in import ELMAN, GRU, LSTM, SLSTM
from flashrnn.cells.definition import Cell
from flashrnn.cells.registry import cell_of_key, get_cell, register, registered_cells

__all__ = ["ELMAN", "GRU", "LSTM", "SLSTM", "Cell", "cell_of_key", "get_cell", "register", "registered_cells"]
