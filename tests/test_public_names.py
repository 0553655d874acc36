"""What builds on the kernel package uses nothing but what docs/api.md documents, as any user would."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

import flashrnn

ROOT = Path(__file__).parents[1]
PUBLIC = set(re.findall(r"^::: (flashrnn[\w.]*)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE))
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]


def private(source):
    """Names of `flashrnn` that the code imports, or reads as flashrnn.op.recurrence, and the page does not have."""
    imported, read = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                (imported if alias.asname else read).add(alias.name)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            read.add(ast.unparse(node))
    modules = {name.rpartition(".")[0] for name in PUBLIC}
    unknown = (imported - PUBLIC) | (read - PUBLIC - modules)
    return sorted(name for name in unknown if name.startswith("flashrnn."))


@pytest.mark.parametrize("package", [name for name in PACKAGES if name != "flashrnn"])
def test_no_private_name_is_used(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for file in files:
        assert not private(file.read_text()), f"{file.relative_to(ROOT)}: document them in docs/api.md, or do without"


def test_private_names_are_found_however_they_are_written():
    assert private("from flashrnn import Cell, flashrnn\nimport flashrnn\nflashrnn.get_cell") == []
    assert private("from flashrnn.gpu import Gpu\nimport flashrnn.gpu") == []
    assert private("from flashrnn.op import recurrence") == ["flashrnn.op.recurrence"]
    assert private("from flashrnn import gpu") == ["flashrnn.gpu"]  # of which any name could be read then
    assert private("from flashrnn import op, cells") == ["flashrnn.cells", "flashrnn.op"]
    assert private("from flashrnn.gpu import cache") == ["flashrnn.gpu.cache"]
    assert private("import flashrnn.op") == ["flashrnn.op"]
    assert private("import flashrnn\nflashrnn.op.recurrence()") == ["flashrnn.op", "flashrnn.op.recurrence"]


def test_what_the_package_exports_is_documented():
    assert {f"flashrnn.{name}" for name in flashrnn.__all__} <= PUBLIC
