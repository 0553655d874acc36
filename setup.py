"""The one thing that pyproject.toml cannot say: the wheel has models/ too, under the name flashrnn_lm."""

from setuptools import find_namespace_packages, setup

models = [name.replace("models", "flashrnn_lm", 1) for name in find_namespace_packages(include=["models*"])]
setup(
    packages=[*find_namespace_packages(include=["flashrnn*"]), *models],
    package_dir={"flashrnn_lm": "models"},
)
