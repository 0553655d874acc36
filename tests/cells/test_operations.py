"""Operations that a step may use and their gradients, printed by every printer, compared with autograd."""

import math
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_ssize_t, c_void_p

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from flashrnn.cells.printers.cuda import cell_functions
from flashrnn.cells.printers.functions import Function, functions
from flashrnn.cpu.build import cell_step, tile
from tests.cells.graphs import by_graph
from tests.cells.operations import EVERY_OPERATION, OF_ONE, OF_TWO
from tests.cells.test_cuda import compile_for_host, on_host
from tests.cells.test_triton import flat, in_triton

# Points at kinks and jumps, where parts of functions meet, and where exponentials and squares overflow.
SIZES = [0.0, 1e-30, 1e-6, 1e-3, 0.3, 0.42, 0.5, 0.99999, 1.0, 1.00001, 1.5, 2.4, 2.5, 3.0, 6.0, 20.0, 30.0]
SIZES += [88.5, 100.0, 1e4, 1e30, math.inf]
NUMBERS = torch.tensor([*SIZES, *(-x for x in SIZES), math.nan])
# Pairs with exact quotients: fmod needs a fused multiply-add otherwise, which Triton's interpreter does not have.
FEW = torch.tensor([x for size in (0.0, 0.375, 1.0, 2.5, 30.0, math.inf) for x in (size, -size)])
PAIRS = torch.cartesian_prod(FEW, FEW).T  # [2, points]
POINTS, GATES, STATES = PAIRS.shape[1], len(EVERY_OPERATION.gates), len(EVERY_OPERATION.states)


def operands() -> Tensor:
    """Return gates [points, gates]: x of every operation, then y of those with two operands."""
    one = torch.cat([NUMBERS, NUMBERS.new_ones(POINTS - len(NUMBERS))])
    return torch.stack([*[one] * len(OF_ONE), *[PAIRS[0]] * len(OF_TWO), *[PAIRS[1]] * len(OF_TWO)], 1)


def check(new: Tensor, gradients: Tensor) -> None:
    """Compare new states [points, states] and gradients [points, gates] with the step and autograd.

    Errors are relative near 0, where operations are nearly linear, and absolute where they saturate, because there
    1 - tanh(x)^2 is the difference of two numbers near 1.
    """
    values = operands().requires_grad_()
    states = EVERY_OPERATION.update(list(values.unbind(1)), [torch.zeros(POINTS)] * STATES)
    expected = torch.cat([torch.stack(states, 1), *torch.autograd.grad(sum(states).sum(), values)], 1).detach()
    names = [*EVERY_OPERATION.states, *(f"gradient of {gate}" for gate in EVERY_OPERATION.gates)]
    found, x = torch.cat([new, gradients], 1), torch.cat([operands()[:, :STATES], operands()], 1)
    close = (found - expected).abs() <= 1e-5 * expected.abs() + 1e-6 * x.abs().clamp(max=1)
    close |= torch.isclose(found, expected, rtol=0, atol=0, equal_nan=True)
    wrong = [f"{names[k]} at {x[p, k]:g}: {found[p, k]:g}, not {expected[p, k]:g}" for p, k in (~close).nonzero()]
    assert not wrong, "\n".join(wrong)


def check_printed(call: Callable[[Function, Tensor], Tensor]) -> None:
    """Check printed functions; `call` returns their results [points, results] for arguments [points, arguments]."""
    forward, factors, backward = functions(EVERY_OPERATION)
    values = torch.cat([operands(), torch.zeros(POINTS, STATES)], 1)
    inner = torch.cat([call(factors, values), torch.ones(POINTS, STATES)], 1)
    check(call(forward, values), call(backward, inner)[:, :GATES])


def test_pytorch():
    check_printed(lambda function, x: by_graph(function.graph, flat(function.inputs), flat(function.outputs), x))


@pytest.mark.usefixtures("interpreted")
def test_triton():
    check_printed(in_triton)


def test_cuda(tmp_path):
    library = compile_for_host({"every": cell_functions(EVERY_OPERATION)}, tmp_path)

    def call(function: Function, values: Tensor) -> Tensor:
        groups = values.split([len(names) for names in function.inputs.values()], 1)
        sizes = [len(names) for names in function.outputs.values()]
        return torch.cat(on_host(library, f"every_{function.name}", groups, sizes), 1)

    check_printed(call)


def test_numba():
    stride = tile(POINTS).stride  # stride of the kernel's arrays

    def call(direction: str, *arrays: Tensor) -> None:
        address = cell_step(direction, EVERY_OPERATION, POINTS, torch.float32).part.address
        kernel = CFUNCTYPE(None, *[c_void_p] * len(arrays), c_ssize_t)(address)
        kernel(*(array.data_ptr() for array in arrays), POINTS)

    gates, states, d_states = operands().T, torch.zeros(STATES, POINTS), torch.ones(STATES, POINTS)
    gates, states, d_states, new = (pad(x, (0, stride - POINTS)) for x in (gates, states, d_states, states))
    call("forward", gates, new)
    call("backward", gates, states, d_states)
    check(new[:, :POINTS].T, gates[:, :POINTS].T)
