import pytest

from flashrnn.cuda.build import build


@pytest.fixture
def new_process():
    """Forgets what this process has built: the next build looks into the cache folder."""
    build.cache_clear()
    yield build.cache_clear
    build.cache_clear()
