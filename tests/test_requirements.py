"""All imported distributions are in the requirements, even if other requirements install them too."""

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    "flashrnn": ("cpu", "cuda"),
    **dict.fromkeys(("models", "data", "training", "reproduction", "scripts"), ("train",)),
    "benchmarks": ("train", "cuda"),
    "docs": ("train", "docs"),
}
NOT_REQUIRED = {
    "triton",  # comes with PyTorch for GPUs
    "fla",  # the optional extra fla; its distribution is flash-linear-attention
    "flashrnn_lm",  # the name of models/ in the wheel
    "lm_eval",  # scripts/lm_eval.py says how to install it
}


DISTRIBUTIONS = packages_distributions()


def imported(package):
    """Return the top-level names that a package imports, each with a file that imports it."""
    names = {}
    for file in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                modules.append(node.module)
            names |= {module.partition(".")[0]: file for module in modules}
    return {name: file for name, file in names.items() if name not in {*sys.stdlib_module_names, *EXTRAS}}


def required(extras):
    """Return the names of the distributions that the project with these extras requires."""
    names = set()
    for line in [*PROJECT["dependencies"], *(line for e in extras for line in PROJECT["optional-dependencies"][e])]:
        requirement = Requirement(line)
        of_project = requirement.name == PROJECT["name"]
        names |= required(requirement.extras) if of_project else {canonicalize_name(requirement.name)}
    return names


@pytest.mark.parametrize("package", EXTRAS)
def test_imports_are_required(package):
    found = imported(package)
    assert found
    for name in found.keys() - NOT_REQUIRED:
        of_name = {canonicalize_name(distribution) for distribution in DISTRIBUTIONS.get(name, [name])}
        assert of_name & required(EXTRAS[package]), (
            f"{found[name]} imports {name}, which is not in pyproject.toml's requirements for {package}"
        )
