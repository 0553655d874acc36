"""The site of the documentation builds without warnings, and its configuration reference lists all keys."""

import subprocess
import sys

import pytest
from omegaconf import DictConfig, OmegaConf

from docs.tools import config_reference
from docs.tools.config_reference import CONFIGS
from tests.docs.pages import PAGES, ROOT


@pytest.mark.slow
def test_site_builds_without_warnings(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert built.returncode == 0, built.stderr
    for name in PAGES:
        if name.startswith("docs/"):
            folder = name.removeprefix("docs/").removesuffix(".md").removesuffix("index")
            assert (tmp_path / folder / "index.html").is_file(), name
    assert "data.batch_size" in (tmp_path / "configuration" / "index.html").read_text()


def keys(config: DictConfig, above: str = ""):
    for key, node in config.items_ex(resolve=False):
        if isinstance(node, DictConfig):
            yield from keys(node, f"{above}{key}.")
        elif key != "defaults":
            yield above + key


def test_configuration_reference_lists_all_keys():
    reference = f"\n{config_reference.reference()}"
    for path in CONFIGS.rglob("*.yaml"):
        is_global = path.parent == CONFIGS or "@package _global_" in path.read_text()
        prefix = "" if is_global else f"{path.parent.name}."
        title = f"## {path.name}" if path.parent == CONFIGS else f"### {path.parent.name}={path.stem}"
        section = reference.partition(f"\n{title}\n")[2].partition("\n## ")[0].partition("\n### ")[0]
        config = OmegaConf.load(path)
        config.pop("hydra", None)
        for key in keys(config):
            assert f"| `{prefix}{key}` |" in section, path
