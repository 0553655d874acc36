import pytest
import triton


@pytest.fixture
def interpreted():
    """Kernels run in Triton's interpreter, on the CPU, as under TRITON_INTERPRET=1."""
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        yield
