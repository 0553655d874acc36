import pytest

from flashrnn.cuda.build import build


@pytest.fixture(scope="session", autouse=True)
def _cache_of_its_own(tmp_path_factory):
    """Binaries of the tests, kept from one test to the next, never in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHRNN_CACHE", str(tmp_path_factory.mktemp("binaries")))
        yield


@pytest.fixture
def new_process():
    """Forgets what this process has built: the next build looks into the cache folder."""
    build.cache_clear()
    yield build.cache_clear
    build.cache_clear()
