import gc
import logging
import os
import shutil

import pytest

gc.disable()


def pytest_collection_finish():
    """Exclude imported modules from garbage collection, which would take a tenth of a run's time."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _cache_of_its_own(tmp_path_factory):
    """Set one cache folder for all tests and test processes, instead of the user's."""
    session = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        session = session.parent
    cache = session / "cache"
    cache.mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHRNN_CACHE", str(cache))
        yield


@pytest.fixture(autouse=True)
def _restore_process():
    """Undo what commands and Lightning change in the process: environment variables and log levels."""
    variables = dict(os.environ)
    loggers = [logging.getLogger(name) for name in (None, "flashrnn", "lightning", "lightning.pytorch")]
    logged = [(logger, logger.level, logger.propagate) for logger in loggers]
    yield
    if os.environ != variables:
        os.environ.clear()
        os.environ.update(variables)
    for logger, level, propagates in logged:
        logger.setLevel(level)
        logger.propagate = propagates


@pytest.fixture
def other_backends():
    """Clear the cached choices of backends before and after a test that changes what backends support."""
    from flashrnn import dispatch

    def forget():
        dispatch._refusal.cache_clear()
        dispatch._choose.cache_clear()

    forget()
    yield
    forget()


@pytest.fixture
def interpreted(other_backends):
    """Run Triton kernels in the interpreter on the CPU, as under TRITON_INTERPRET=1."""
    import triton

    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        yield


@pytest.fixture
def tiny_config(request, tmp_path, monkeypatch):
    """Return a function that builds configs of tiny runs, see `tiny_runs.configs_in`.

    Plots are only drawn in tests with the mark `drawn`, because they take a third of a tiny run.
    """
    from tests.tiny_runs import configs_in  # imports Hydra, which tests of kernels do not need

    if not request.node.get_closest_marker("drawn"):
        _without_plots(monkeypatch)
    monkeypatch.chdir(tmp_path)
    return configs_in(tmp_path)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Return config and result of a tiny run on text with a schedule of 20 steps. Tests must not change its files."""
    return _trained(tmp_path_factory.mktemp("trained"), "text_tiny")


@pytest.fixture(scope="session")
def trained_parity(tmp_path_factory):
    """Return the same as `trained` for a run on parity."""
    return _trained(tmp_path_factory.mktemp("trained_parity"), "parity")


def _without_plots(patch):
    from training import plots

    for name in ("accuracy_by_length", "perplexity_by_position"):
        patch.setattr(plots, name, lambda *_: None)


def _trained(folder, experiment):
    from scripts.train import train
    from tests.tiny_runs import configs_in

    with pytest.MonkeyPatch.context() as patch:
        _without_plots(patch)
        patch.chdir(folder)
        config = configs_in(folder)(experiment, "schedule.total_steps=20")
        return config, train(config)


@pytest.fixture
def change_texts(tmp_path):
    """Return a function that changes the texts of `tiny_config("text_tiny")` and deletes the prepared corpora."""
    from tests.tiny_runs import write_texts

    def change():
        for file in tmp_path.glob("texts/*.jsonl"):
            names = [f"{file.stem}{n}" for n in range(4)]
            write_texts(file, (f"{name} quite other words about something else, {name * 3}. " * 9 for name in names))
        shutil.rmtree(tmp_path / "corpora", ignore_errors=True)

    return change
