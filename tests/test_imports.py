"""Imports and includes without cycles, and the contents of scripts/."""

import re
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
COMMANDS = {
    "train",
    "evaluate",
    "generate",
    "export",
    "prepare_data",
    "benchmark",
    "reproduce",
    "lm_eval",
    "memory",
    "import_xlstm",
    "results",
}
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]


def test_imports_have_no_cycle():
    """Includes imports within functions and for type checkers."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert {"flashrnn.constrint.expressions", "flashrnn.cells.trace"} < imports.keys()
    TopologicalSorter(imports).prepare()  # raises CycleError


def test_includes_have_no_cycle():
    kernels = ROOT / "flashrnn" / "cuda"
    files = {file.relative_to(kernels).as_posix(): file.read_text() for file in kernels.rglob("*.cuh")}
    includes = {name: re.findall(r'^#include "(.*)"$', text, flags=re.MULTILINE) for name, text in files.items()}
    assert {included for found in includes.values() for included in found} <= includes.keys()
    TopologicalSorter(includes).prepare()


def test_scripts_contains_only_short_command_modules():
    files = {file.stem: file.read_text() for file in (ROOT / "scripts").rglob("*.py")}
    assert files.keys() - {"__init__"} == COMMANDS
    assert all(len(text.splitlines()) < 100 for text in files.values())


def test_no_module_imports_a_command():
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    for command in COMMANDS:
        assert not graph.find_modules_that_directly_import(f"scripts.{command}")


def test_models_import_each_other_relatively():
    """The package has another name in the wheel, flashrnn_lm."""
    for file in (ROOT / "models").rglob("*.py"):
        assert "from models" not in (text := file.read_text()), file
        assert "import models" not in text, file
