"""The sdist and the wheel contain only kernels and models, and work with only their requirements."""

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
import torch
from packaging.requirements import Requirement

from data import tokenization
from models.hugging_face import FlashRNNConfig, FlashRNNForCausalLM

ROOT = Path(__file__).parents[1]
LEAVE_OUT = (".*", "build", "corpora", "dist", "multirun", "outputs", "site", "*.egg-info", "__pycache__")

IMPORT = """
import time
import torch
start = time.process_time()
from flashrnn import FlashRNN
print(time.process_time() - start)
"""

TRAIN = f"""{IMPORT}
import importlib.util
import sys

assert importlib.util.find_spec("flashrnn").origin.startswith(sys.prefix)
assert not any(importlib.util.find_spec(name) for name in ("models", "data", "scripts", "tests", "lightning"))
torch.manual_seed(0)
rnn = FlashRNN(4, 16, num_heads=2, function="lstm")
x, parameters = torch.randn(12, 8, 4), list(rnn.parameters())
losses = []
for _ in range(20):
    loss = (rnn(x)[0] - x.mean(-1, keepdim=True)).square().mean()
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
        parameter.data -= gradient
    losses.append(loss.item())
assert losses[-1] < 0.8 * losses[0], losses
"""


LOAD = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, again = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
assert "models" not in sys.modules
right = torch.load(f"{folder}/logits.pt")
torch.testing.assert_close(model(torch.arange(12).view(2, 6)).logits, right)  # by another backend, without numba
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer(["the state"], return_tensors="pt")
assert model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, pad_token_id=0).shape[1] > 3
model.save_pretrained(again)
saved = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True)
torch.testing.assert_close(saved(torch.arange(12).view(2, 6)).logits, right)
"""


def run(*command, **options):
    ended = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120, **options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def build(kind, source, out):
    """Build the sdist or the wheel of a source tree; return its path."""
    out.mkdir(exist_ok=True)
    backend = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    run(sys.executable, "-c", backend, out, cwd=source)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Return the wheel, built from the unpacked sdist of a copy of the checkout."""
    folder = tmp_path_factory.mktemp("build")
    shutil.copytree(ROOT, folder / "checkout", ignore=shutil.ignore_patterns(*LEAVE_OUT))
    sdist = build("sdist", folder / "checkout", folder / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return build("wheel", folder / sdist.name.removesuffix(".tar.gz"), folder / "wheel")


def requirements(requires):
    """Return the names of all distributions that these requirements need directly or indirectly, without extras."""
    names, waiting = set(), list(requires)
    while waiting:
        requirement = Requirement(waiting.pop())
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and requirement.name not in names:
            names.add(requirement.name)
            waiting += distribution(requirement.name).requires or []
    return names


def link(names, packages):
    """Link distributions of this environment into the site-packages of another one."""
    for name in names:
        files = distribution(name).files
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(files[0].locate().parents[len(files[0].parts) - 1] / top)


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """Return the interpreter of an environment with the wheel and its requirements."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        requires = Parser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist")
        archive.extractall(packages)  # as pip does, which takes 3 s; the workflow for tests installs the wheel by pip
    link(requirements(requires), packages)
    return folder / "bin" / "python"


def test_wheel_contains_only_kernels_and_models(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    folders = {"flashrnn": "flashrnn", "models": "flashrnn_lm"}  # by their names in the wheel
    sources = (path for folder in folders for path in ROOT.glob(f"{folder}/**/*") if path.is_file())
    parts = (path.relative_to(ROOT).parts for path in sources if "__pycache__" not in path.parts)
    assert names == {"/".join((folders[folder], *rest)) for folder, *rest in parts}


def test_layer_trains_and_import_is_fast_with_only_the_wheel(python, tmp_path):
    """Measures processor time, which does not depend on other programs, in a second run with cached files."""
    imported = float(run(python, "-c", TRAIN, cwd=tmp_path, env={"FLASHRNN_CACHE": str(tmp_path)}))
    assert imported < 1.5 or float(run(python, "-c", IMPORT, cwd=tmp_path)) < 1.5


@pytest.mark.slow
def test_readme_cell_runs_with_only_the_wheel(python, tmp_path):
    program = Path(shutil.copy(ROOT / "tests" / "ten_lines.py", tmp_path))
    run(python, program, cwd=tmp_path, env={"FLASHRNN_CACHE": str(tmp_path)})


@pytest.fixture(scope="module")
def transformers_too(python):
    """Return the interpreter after adding transformers to its environment."""
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    link(requirements(["transformers"]), packages)
    return python


@pytest.mark.slow
def test_exported_model_loads_with_only_the_wheel_and_transformers(transformers_too, tmp_path):
    torch.manual_seed(0)
    mixer = {"name": "RNNMixer", "function": "slstm", "num_heads": 2}
    model = FlashRNNForCausalLM(FlashRNNConfig(vocab_size=300, d_model=16, num_blocks=2, mixer=mixer)).eval()
    model.save_pretrained(tmp_path / "out")
    tokenization.train(["the state of a network"] * 9, 257).save_pretrained(tmp_path / "out")
    torch.save(model(torch.arange(12).view(2, 6)).logits, tmp_path / "out" / "logits.pt")
    environment = {"FLASHRNN_CACHE": str(tmp_path), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    run(transformers_too, "-c", LOAD, tmp_path / "out", tmp_path / "again", cwd=tmp_path, env=environment)
