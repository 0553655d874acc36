"""Other packages of this project use only those names of flashrnn that docs/api.md documents."""

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
    """Return the names of `flashrnn` that a source imports or reads as attributes, and that are not documented."""
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
def test_package_uses_only_documented_names(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for file in files:
        assert not private(file.read_text()), f"{file.relative_to(ROOT)} uses names that docs/api.md does not document"


def test_private_names_are_found_in_all_forms_of_import():
    assert private("from flashrnn import Cell, flashrnn\nimport flashrnn\nflashrnn.get_cell") == []
    assert private("from flashrnn.gpu import Gpu\nimport flashrnn.gpu") == []
    assert private("from flashrnn.op import recurrence") == ["flashrnn.op.recurrence"]
    assert private("from flashrnn import gpu") == ["flashrnn.gpu"]  # any name could be read from the module
    assert private("from flashrnn import op, cells") == ["flashrnn.cells", "flashrnn.op"]
    assert private("from flashrnn.gpu import cache") == ["flashrnn.gpu.cache"]
    assert private("import flashrnn.op") == ["flashrnn.op"]
    assert private("import flashrnn\nflashrnn.op.recurrence()") == ["flashrnn.op", "flashrnn.op.recurrence"]


def test_exported_names_are_documented():
    assert {f"flashrnn.{name}" for name in flashrnn.__all__} <= PUBLIC
