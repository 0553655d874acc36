"""Packages from PyPI to compare with. They are not requirements, because one has the name of this project's package."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import pytest


def unpack(requirement: str, folder: Path) -> Path:
    """Unpack a wheel without its dependencies; skip the test if PyPI cannot be reached."""
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--retries=1", "--timeout=20"]
    command = [sys.executable, "-m", "pip", "download", *options, f"--dest={folder}", requirement]
    ended = subprocess.run(command, capture_output=True, text=True)
    if "connection broken" in ended.stderr and ended.returncode:
        pytest.skip(f"PyPI, where {requirement} comes from, cannot be reached")
    assert ended.returncode == 0, ended.stderr
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as content:
        content.extractall(folder)
    return folder


@pytest.fixture(scope="session")
def flashrnn_108(tmp_path_factory) -> Iterator[ModuleType]:
    """Return flashrnn 1.0.8, imported under another name; all its imports are relative."""
    folder = unpack("flashrnn==1.0.8", tmp_path_factory.mktemp("flashrnn_108"))
    (folder / "flashrnn").rename(folder / "flashrnn_108")
    yield from _imported("flashrnn_108", folder)


@pytest.fixture(scope="session")
def xlstm(tmp_path_factory) -> Iterator[ModuleType]:
    """xlstm 2.0.6."""
    yield from _imported("xlstm", unpack("xlstm==2.0.6", tmp_path_factory.mktemp("xlstm")))


def _imported(name: str, folder: Path) -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module(name)
    for module in [key for key in sys.modules if key.partition(".")[0] == name]:
        del sys.modules[module]
