import pytest

from flashrnn.cuda.build import build
from flashrnn.cuda.resident import kernel
from flashrnn.cuda.streaming import backend as streaming


@pytest.fixture
def new_process():
    """Forget the binaries of this process, so that the next build reads the cache folder; return a function for it."""
    build.cache_clear()
    yield build.cache_clear
    build.cache_clear()


@pytest.fixture
def one_batch(monkeypatch):
    """Compile kernels for a spec's own batch, because finding the buckets of all batches takes as long as compiling."""
    for module in (kernel, streaming):
        monkeypatch.setattr(module, "bucket", lambda spec, solver: spec)
