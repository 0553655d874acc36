import pytest

from flashrnn.cuda.build import build
from flashrnn.cuda.resident import kernel
from flashrnn.cuda.streaming import backend as streaming


@pytest.fixture
def new_process():
    """Forgets what this process has built: the next build looks into the cache folder."""
    build.cache_clear()
    yield build.cache_clear
    build.cache_clear()


@pytest.fixture
def one_batch(monkeypatch):
    """Kernels are those of a spec's own batch: to find those of all batches takes as long as to compile one."""
    for module in (kernel, streaming):
        monkeypatch.setattr(module, "bucket", lambda spec, solver: spec)
