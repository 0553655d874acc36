"""PyTorch versions without one of the private interfaces: the package can be imported and gives the same results."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashrnn
from flashrnn._torch_private import apply_of
from tests.flashrnn.without_private import CASES

PRIVATE = re.compile(r"torch(\.\w+)*\._[a-zA-Z]|from torch\S* import _|GOMP_parallel|_dynamo_marked_constant")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """Return the errors without each interface, by interface."""
    command = [sys.executable, "-m", "tests.flashrnn.without_private"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("interface", CASES)
def test_results_are_the_same_without_a_private_interface(outcomes, interface):
    assert outcomes[interface] == "", outcomes[interface]


def test_private_interfaces_are_used_in_one_module_only():
    package = Path(flashrnn.__file__).parent
    users = [path.name for path in package.rglob("*.py") if PRIVATE.search(path.read_text())]
    assert users == ["_torch_private.py"]


def test_fast_apply_has_gradients():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, factor: int, x: torch.Tensor) -> torch.Tensor:
            return factor * x

        @staticmethod
        def backward(ctx, d: torch.Tensor) -> tuple[None, torch.Tensor]:
            return None, 2 * d

    x = torch.ones(3, requires_grad=True)
    out = apply_of(Double)(2, x)
    assert torch.equal(out, 2 * x)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.full((3,), 2.0))
