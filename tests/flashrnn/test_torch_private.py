"""A PyTorch that has dropped an interface it never promised: the package imports and gives the same results."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flashrnn
from tests.flashrnn.without_private import CASES

PRIVATE = re.compile(r"torch(\.\w+)*\._[a-zA-Z]|from torch\S* import _|GOMP_parallel|_dynamo_marked_constant")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """By interface, what went wrong where it is missing."""
    command = [sys.executable, "-m", "tests.flashrnn.without_private"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("interface", CASES)
def test_without_a_private_interface_results_are_the_same(outcomes, interface):
    assert outcomes[interface] == "", outcomes[interface]


def test_private_interfaces_are_used_in_one_file():
    package = Path(flashrnn.__file__).parent
    users = [path.name for path in package.rglob("*.py") if PRIVATE.search(path.read_text())]
    assert users == ["_torch_private.py"]
