"""Bounds of h that are known before a sequence is run."""

import pytest
import torch

from flashrnn import Cell, get_cell
from flashrnn.cells.bounds import is_bounded


def mixed(z, n, h):
    z = torch.sigmoid(z)
    return z * h + (1 - z) * torch.tanh(n)


def mixed_the_other_way(z, n, h):
    z = torch.sigmoid(z)
    return (1 - z) * h + torch.tanh(n) * z


def mixed_with_two(z, n, h):
    return torch.sigmoid(z) * h + (1 - torch.sigmoid(n)) * torch.tanh(n)


def added(z, n, h):
    return torch.sigmoid(z) * h + torch.tanh(n)


def of_an_unbounded_number(z, n, h):
    return torch.sigmoid(z) * n


def half(z, n, h):
    return -0.5 * torch.where(z > 0, h, torch.tanh(n))


@pytest.mark.parametrize(
    ("step", "bounded"),
    [
        (mixed, True),
        (mixed_the_other_way, True),
        (mixed_with_two, False),
        (added, False),
        (of_an_unbounded_number, False),
        (half, True),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_bounded_steps_are_detected(step, bounded):
    assert is_bounded(Cell(step.__name__, step, states=("h",))) is bounded


def test_built_in_cells_with_bounded_h():
    names = "elman", "gru", "lstm", "layernorm_gru", "layernorm_lstm"
    assert all(is_bounded(get_cell(name)) for name in names)
    assert not any(is_bounded(get_cell(name)) for name in ("elman_relu", "slstm"))
