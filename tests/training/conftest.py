import pytest

from scripts.train import train
from tests.tiny_runs import configs_in


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Config and result of a tiny run on text, which tests read and do not change."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        config = configs_in(folder)("text_tiny")
        return config, train(config)
