"""The prepared single step of the CPU's kernel."""

import pytest
import torch

from flashrnn import Recurrence
from tests.problems import CELLS, cell_name, random_inputs


@pytest.mark.parametrize("cell", CELLS, ids=cell_name)
def test_steps_equal_the_sequence_and_update_states_in_place(cell):
    module = Recurrence(6, num_heads=2, function=cell, bias_init="standard")
    Wx, _, _, states = random_inputs(module.cell, 3, 4, 2, 3, dtype=torch.float32)
    h, last = module(Wx, states)
    stepper = module.stepper(states)
    for t in range(4):
        torch.testing.assert_close(stepper(Wx[:, t]), h[:, t].detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(states, last.detach(), rtol=1e-5, atol=1e-6)


def test_stepper_requires_backend_cpu_fused():
    assert Recurrence(6, backend="vanilla").stepper(torch.zeros(2, 1, 1, 6)) is None


def test_wrong_shapes_are_an_error():
    stepper = Recurrence(6).stepper(torch.zeros(2, 1, 1, 6))
    with pytest.raises(ValueError, match=r"\[2, 4, 1, 6\].*expected \[1, 4, 1, 6\]"):
        stepper(torch.zeros(2, 4, 1, 6))
