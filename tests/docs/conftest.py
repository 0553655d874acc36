import sys

import pytest
import torch

from data.tasks import TASKS
from flashrnn.cells.registry import _REGISTRY
from tests.docs import pages


@pytest.fixture(scope="module")
def run_page(tmp_path_factory):
    """Return `pages.run` in a temporary folder; the modules, cells and tasks of pages are removed afterwards."""
    folder = tmp_path_factory.mktemp("reader")
    before = [(registry, dict(registry)) for registry in (_REGISTRY, TASKS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        torch.manual_seed(0)
        yield lambda page: pages.run(page, folder)
    for registry, entries in before:
        registry.clear()
        registry.update(entries)
    for file in folder.glob("*.py"):
        sys.modules.pop(file.stem, None)
