"""The tests of this folder are marked `gpu`, and skipped without a GPU."""

from pathlib import Path

import pytest
import torch


@pytest.hookimpl(tryfirst=True)  # before -m selects tests by their marks
def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))
