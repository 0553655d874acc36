"""Modules build on each other in one direction."""

import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]


def test_no_circle_of_imports():
    """Imports within functions and for type checkers count: a circle that they hide ties the modules together, too."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert {"flashrnn.constrint.expressions", "flashrnn.cells.trace"} < imports.keys()
    TopologicalSorter(imports).prepare()  # raises CycleError with the circle
