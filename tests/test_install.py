"""What a user installs: sdist and wheel hold the kernel package and nothing else, and work with what they require."""

import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LEAVE_OUT = (".*", "build", "corpora", "dist", "multirun", "outputs", "site", "*.egg-info", "__pycache__")

IMPORT = """
import time
import torch
start = time.process_time()
import flashrnn
print(time.process_time() - start)
"""

TRAIN = """
import importlib.util
import sys
import torch
from flashrnn import FlashRNN

assert importlib.util.find_spec("flashrnn").origin.startswith(sys.prefix)
assert not any(importlib.util.find_spec(name) for name in ("models", "data", "scripts", "tests", "lightning"))
torch.manual_seed(0)
rnn = FlashRNN(4, 16, num_heads=2, function="lstm")
optimizer = torch.optim.Adam(rnn.parameters(), lr=1e-2)
x = torch.randn(12, 8, 4)
losses = []
for _ in range(20):
    loss = (rnn(x)[0] - x.mean(-1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < 0.8 * losses[0], losses
"""


def run(*command, **options):
    ended = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120, **options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def build(kind, source, out):
    """The sdist or the wheel of a source tree, by the backend that pyproject.toml names."""
    out.mkdir(exist_ok=True)
    backend = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    run(sys.executable, "-c", backend, out, cwd=source)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from the unpacked sdist, that from a copy of the checkout."""
    folder = tmp_path_factory.mktemp("build")
    shutil.copytree(ROOT, folder / "checkout", ignore=shutil.ignore_patterns(*LEAVE_OUT))
    sdist = build("sdist", folder / "checkout", folder / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return build("wheel", folder / sdist.name.removesuffix(".tar.gz"), folder / "wheel")


def requirements(requires):
    """Names of distributions that these requirements need, and that those need, without extras."""
    names, waiting = set(), list(requires)
    while waiting:
        requirement = Requirement(waiting.pop())
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and requirement.name not in names:
            names.add(requirement.name)
            waiting += distribution(requirement.name).requires or []
    return names


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of an environment with the wheel and what it requires, linked from this environment."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        requires = Parser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist")
    for name in requirements(requires):
        files = distribution(name).files
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(files[0].locate().parents[len(files[0].parts) - 1] / top)
    interpreter = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", interpreter, "install", "--quiet", "--no-index", wheel)
    return interpreter


def test_the_wheel_holds_the_kernel_package_alone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = (path for path in ROOT.glob("flashrnn/**/*") if path.is_file() and "__pycache__" not in path.parts)
    assert names == {str(path.relative_to(ROOT)) for path in sources}


def test_flashrnn_is_imported_soon_after_torch(python, tmp_path):
    """Seconds of processor time, which other programs do not lengthen; the better of two, for files are cached."""
    assert min(float(run(python, "-c", IMPORT, cwd=tmp_path)) for _ in range(2)) < 1.5


def test_a_layer_trains_with_what_the_wheel_requires(python, tmp_path):
    run(python, "-c", TRAIN, cwd=tmp_path, env={"FLASHRNN_CACHE": str(tmp_path)})


def test_the_cell_of_ten_lines_runs_with_what_the_wheel_requires(python, tmp_path):
    program = Path(shutil.copy(ROOT / "tests" / "ten_lines.py", tmp_path))
    run(python, program, cwd=tmp_path, env={"FLASHRNN_CACHE": str(tmp_path)})
