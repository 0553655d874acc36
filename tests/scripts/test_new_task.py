"""A new task needs only a function in data/tasks.py; pages and scripts do not require results of it."""

import shutil
import subprocess
import sys

import pytest

from tests.tiny_runs import ROOT, SHORT, TINY, run

SUM_MODULO_3 = '''

@task(vocab_size=3, num_classes=3)
def sum_modulo_3(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The sum of the digits so far, modulo 3."""
    digits = rng.integers(0, 3, shape)
    return digits, digits.cumsum(axis=1) % 3
'''


@pytest.mark.slow
def test_task_without_results(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for path in ROOT.iterdir():
        if path.name not in ("data", "outputs"):
            tmp_path.joinpath(path.name).symlink_to(path)
    shutil.copytree(ROOT / "data", tmp_path / "data")
    with (tmp_path / "data" / "tasks.py").open("a") as file:
        file.write(SUM_MODULO_3)

    files = ["tests/data/test_tasks.py", "tests/docs/tools/test_readme.py"]
    pytest = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    tested = subprocess.run([*pytest, *files], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "test_labels_are_balanced[sum_modulo_3] PASSED" in tested.stdout

    trained = run("scripts.train", "data.task=sum_modulo_3", *TINY["parity"], *SHORT, folder=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert "0.3333" in trained.stdout
