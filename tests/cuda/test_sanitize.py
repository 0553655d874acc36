"""Helpers of the cases under compute-sanitizer, tested without a GPU."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashrnn import get_cell
from flashrnn.products import weight_gradient_of_states
from tests.cuda.decoding.test_step import random_model
from tests.gpu.sanitize import DECODED, placed, products_in_float32


@pytest.mark.parametrize("case", DECODED, ids=str)
def test_all_tensors_of_a_model_are_moved(case):
    model = random_model(case.cell, case.N, case.D, 2, case.B, torch.bfloat16)
    on_meta = placed(model, torch.device("meta"))
    tensors = [x for part in (on_meta, *on_meta.blocks) for x in part if isinstance(x, torch.Tensor)]
    assert {x.device.type for x in tensors} == {"meta"}
    assert [block.gates_scale for block in on_meta.blocks] == [block.gates_scale for block in model.blocks]


class _Products(TorchDispatchMode):
    """Records the dtypes of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (
            torch.ops.aten.mm,
            torch.ops.aten.bmm,
            torch.ops.aten.addmm_,
            torch.ops.aten.baddbmm_,
        ):
            self.dtypes.add(args[-1].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("steps", [1, 4, 130])
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize(("cell", "heads"), [("lstm", 1), ("gru", 1), ("lstm", 2)])
@pytest.mark.parametrize("time_major", [False, True])
def test_all_products_are_in_float32(cell, heads, steps, reset, time_major):
    cell, shape = get_cell(cell), (steps, 3) if time_major else (3, steps)

    def rows(gates: int) -> torch.Tensor:
        x = torch.randn(*shape, gates, heads, 16).bfloat16()
        return x.transpose(0, 1) if time_major else x

    d_Wx, d_u, h = (
        rows(len(cell.input_gates)),
        rows(len(cell.recurrent_gates) - 3) if cell.name == "gru" else rows(0),
        rows(1)[:, :, 0],
    )
    states, mask = torch.randn(len(cell.states), 3, heads, 16), torch.zeros(3, steps, dtype=torch.bool)
    with products_in_float32(), _Products() as seen:
        weight_gradient_of_states(cell, d_Wx, d_u, h, states, mask if reset else None)
    assert seen.dtypes == {torch.float32}
