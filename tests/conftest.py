import pytest


@pytest.fixture(scope="session", autouse=True)
def _cache_of_its_own(tmp_path_factory):
    """Traces and binaries of the tests, kept from one test to the next, never in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHRNN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def interpreted():
    """Triton's kernels run in its interpreter, on the CPU, as under TRITON_INTERPRET=1."""
    import triton

    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        yield
