"""The command `python -m flashrnn`."""

import json
import os
import re
from functools import cache
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch

from flashrnn import backends, dispatch, doctor, limits
from flashrnn.__main__ import main
from flashrnn.gpu import device_gpu, named_gpu
from flashrnn.problem import Gradients, States
from flashrnn.reference import Reference
from tests import fresh


def test_doctor_on_this_machine(tmp_path):
    done = fresh.run(["flashrnn", "doctor"], tmp_path, {**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    said = {line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in done.stdout.splitlines()}
    assert said["torch"].startswith(torch.__version__)
    assert said["numba"] == version("numba")
    assert said["cache"] == f"{os.environ['FLASHRNN_CACHE']}, writable"
    assert said["cpu_fused on cpu"].startswith("ok, error ")
    assert said["vanilla on cpu"].startswith("ok, error ")
    if not torch.cuda.is_available():
        assert "CUDA GPUs" in done.stdout
    for name in backends():
        assert f"testing {name} on cpu ..." in done.stderr


class Wrong(Reference):
    """A backend with correct h and wrong gradients."""

    name = "wrong"

    def backward(self, *arguments) -> Gradients:
        gradients = super().backward(*arguments)
        return gradients._replace(R=1.001 * gradients.R)


class Failing(Reference):
    name = "failing"

    def forward(self, *arguments, **options) -> States:
        raise OSError("no such library")


class Broken(Reference):
    name = "broken"

    def unsupported_reason(self, problem) -> str | None:
        raise ImportError("half installed")


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        (Wrong(), r"wrong on cpu: FAILED.* d_R 1\.0e-03.* 1e-05"),
        (Failing(), "failing on cpu: FAILED, OSError: no such library"),
        (Broken(), "broken on cpu: FAILED, ImportError: half installed"),
    ],
    ids=["wrong", "failing", "broken"],
)
def test_doctor_reports_wrong_and_failing_backends(monkeypatch, capsys, backend, expected):
    monkeypatch.setattr(dispatch, "BACKENDS", (backend, Reference()))
    monkeypatch.setattr(doctor, "devices", lambda: [torch.device("cpu")])
    assert main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert re.search(expected, output)
    assert "vanilla on cpu: ok" in output


def test_doctor_reports_a_cache_folder_that_is_not_writable(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASHRNN_CACHE", str(tmp_path / "file" / "cache"))
    assert re.match(
        rf"{tmp_path}/file/cache, NOT WRITABLE \(Not a directory\): .*FLASHRNN_CACHE", doctor.environment()["cache"]
    )


@pytest.fixture
def _rtx_5090(monkeypatch):
    """Pretend that the driver describes this GPU."""
    described = SimpleNamespace(
        name="NVIDIA RTX 5090", major=12, minor=0, multi_processor_count=170, shared_memory_per_block_optin=101376
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: described)
    device_gpu.cache_clear()
    yield
    device_gpu.cache_clear()


@pytest.mark.usefixtures("_rtx_5090")
def test_doctor_lists_gpus():
    gpu = "NVIDIA RTX 5090, compute capability 12.0, 170 multiprocessors with 99 KiB of shared memory"
    assert doctor.environment()["GPU"] == f"{gpu}; {gpu}"
    assert [str(device) for device in doctor.devices()] == ["cuda:0", "cpu"]
    assert limits.known_gpus()[0].name == "NVIDIA RTX 5090"
    assert limits.known_gpus()[1] == named_gpu("A100")


@pytest.mark.usefixtures("_rtx_5090")
def test_doctor_shows_supported_problems_of_a_gpu(capsys, monkeypatch):
    """The backends are not tested, because there is no GPU."""
    monkeypatch.setattr(doctor, "self_test", lambda backend, device: None)
    assert main(["doctor"]) == 0
    gpu, cpu = capsys.readouterr().out.split("LSTM, training, on ")[1:]
    assert gpu.startswith("cuda:0 ")
    chosen = {line.split("  ")[1]: line.split()[-len(backends()) :] for line in gpu.splitlines() if " of " in line[:15]}
    assert chosen["12 heads of 64, bfloat16"][:3] == ["auto", "yes", "yes"]
    assert chosen["1 head of 4096, bfloat16"][2] == "auto"
    assert "shared memory: " in gpu
    assert cpu.startswith("cpu ")


def test_limits_print_a_table_or_json(monkeypatch, capsys):
    monkeypatch.setattr(limits, "known_gpus", lambda: [named_gpu("A100")])
    monkeypatch.setattr(limits, "registered_cells", lambda: ["elman", "lstm"])
    monkeypatch.setattr(limits, "limit", cache(limits.limit))
    assert main(["limits"]) == 0
    table = capsys.readouterr()
    assert main(["limits", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["gpu"], row["cell"], row["dtype"]) for row in rows[:3]] == [
        ("A100", "elman", "bfloat16"),
        ("A100", "elman", "float16"),
        ("A100", "elman", "float32"),
    ]
    (line,) = (line for line in table.out.splitlines() if line.startswith("A100  lstm"))
    of_lstm = [str(row[use]) for row in rows if row["cell"] == "lstm" for use in ("inference", "training")]
    assert line.split()[2:] == of_lstm
    assert "2688" in table.out
    assert table.err == "solving for A100 ...\n"


def test_unknown_cell_lists_the_registered_ones(capsys):
    with pytest.raises(SystemExit):
        main(["tune", "--cell", "nope", "--heads", "1", "--head-dim", "64", "--batch", "8"])
    assert re.search("--cell: .*'nope'.* elman, ", capsys.readouterr().err)


@pytest.mark.parametrize("sizes", [["--heads", "0"], ["--head-dim", "-8"], ["--batch", "many"]])
def test_invalid_size_is_an_error(sizes, capsys):
    with pytest.raises(SystemExit):
        main(["explain", "--gpu", "H100", "--heads", "1", "--head-dim", "64", "--batch", "8", *sizes])
    assert f"{sizes[0]}: expected an integer of at least 1, got '{sizes[1]}'" in capsys.readouterr().err


def test_unknown_command_lists_the_commands(capsys):
    with pytest.raises(SystemExit):
        main(["dcotor"])
    assert re.search("'?doctor'?, '?limits'?", capsys.readouterr().err)
