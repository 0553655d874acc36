"""Compilation by NVRTC and the cache of binaries, with a small kernel."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import pytest

from flashrnn.cache import one_at_a_time
from flashrnn.cuda import build as module
from flashrnn.cuda import nvrtc
from flashrnn.cuda.ahead import meanwhile
from flashrnn.cuda.build import Binary, build, cache_folder
from flashrnn.problem import KernelUnavailable
from tests.processes import in_processes

KERNEL = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }'


def twice(prelude: str = KERNEL, arch: str = "sm_90a") -> Binary:
    return build(prelude, "kernels/common.cuh", "twice", arch)


@pytest.fixture
def folder(tmp_path, monkeypatch, new_process) -> Path:
    """Return an empty cache folder."""
    monkeypatch.setenv("FLASHRNN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compiled(monkeypatch) -> list[str]:
    """Return a list of the architectures of all compilations."""
    calls, compile_ = [], module._compile

    def counting(source: str, entry: str, arch: str):
        calls.append(arch)
        return compile_(source, entry, arch)

    monkeypatch.setattr(module, "_compile", counting)
    return calls


def test_binary_and_record_are_stored(folder):
    binary = twice()
    assert binary.code[:4] == b"\x7fELF"
    assert 0 < binary.registers < 32
    assert binary.spilled == 0
    assert sorted(folder.iterdir()) == [binary.path, binary.path.with_suffix(".json")]
    assert binary.path.read_bytes() == binary.code
    record = json.loads(binary.path.with_suffix(".json").read_text())
    assert record["source"] == f'{KERNEL}\n#include "kernels/common.cuh"\n'
    assert (record["arch"], record["registers"], record["spilled"]) == ("sm_90a", binary.registers, 0)
    assert record["compiler"].startswith("nvrtc ")


def test_binary_is_compiled_once(folder, compiled, new_process):
    first = twice()
    assert twice() is first
    new_process()
    assert twice() == first
    assert compiled == ["sm_90a"]


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


DAMAGE = {
    "binary truncated": lambda cubin, record: _truncated(cubin),
    "binary of another kernel": lambda cubin, record: cubin.write_bytes(twice(KERNEL.replace("2", "3")).code),
    "binary lost": lambda cubin, record: cubin.unlink(),
    "record truncated": lambda cubin, record: _truncated(record),
    "record lost": lambda cubin, record: record.unlink(),
    "record empty": lambda cubin, record: record.write_text("{}"),
    "record of zeros": lambda cubin, record: record.write_bytes(bytes(100)),
    "record without registers": lambda cubin, record: record.write_text(
        json.dumps({"sha256": hashlib.sha256(cubin.read_bytes()).hexdigest()})
    ),
    "record of something else": lambda cubin, record: record.write_text("[1, 2]"),
    "record not readable": lambda cubin, record: (record.unlink(), record.symlink_to(record.name)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_entry_is_built_again(folder, compiled, new_process, damage):
    first = twice()
    damage(first.path, first.path.with_suffix(".json"))
    new_process()
    compiled.clear()
    assert twice() == first
    assert len(compiled) == 1
    new_process()
    assert twice() == first
    assert len(compiled) == 1


def test_cache_key_depends_on_everything_that_shapes_the_binary(folder, tmp_path, monkeypatch, new_process):
    paths = {"": twice().path, "prelude": twice(f"{KERNEL} // other").path, "arch": twice(arch="sm_80").path}
    new_process()
    with monkeypatch.context() as patch:
        patch.setattr(module, "_OPTIONS", (*module._OPTIONS, "--use_fast_math"))
        paths["options"] = twice().path
    new_process()
    with monkeypatch.context() as patch:
        patch.setattr(module, "_compiler", lambda: "nvrtc 12.8")
        paths["compiler"] = twice().path
    new_process()
    with monkeypatch.context() as patch:
        patch.setattr(module, "SOURCES", tmp_path / "cuda")
        shutil.copytree(Path(module.__file__).parent, module.SOURCES)
        (module.SOURCES / "kernels" / "cluster.cuh").open("a").write("// changed\n")
        module.sources_hash.cache_clear()
        paths["kernels"] = twice().path
    module.sources_hash.cache_clear()
    assert len(set(paths.values())) == len(paths), paths
    new_process()
    assert twice().path == paths[""]


EIGHTH = f"""
import hashlib, sys
sys.path.insert(0, {str(Path(module.__file__).parent)!r})  # as a top-level module, so that PyTorch is not imported
import build, cuda.core
print("ready", flush=True)
input()
binary = build.build({KERNEL!r}, "kernels/common.cuh", "twice", "sm_90a")
print(hashlib.sha256(binary.code).hexdigest(), binary.registers)
"""


@pytest.mark.slow
def test_eight_processes_can_build_concurrently(folder, compiled):
    command = [sys.executable, "-c", EIGHTH]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **streams) for _ in range(8)]
    for process in processes:
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    results = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, results
    binary = twice()
    assert compiled == []
    expected = f"{hashlib.sha256(binary.code).hexdigest()} {binary.registers}\n"
    assert [output for output, _ in results] == [expected] * 8
    assert sorted(folder.iterdir()) == [binary.path, binary.path.with_suffix(".json")]


def test_folder_that_is_not_writable_causes_one_warning(tmp_path, monkeypatch, new_process):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASHRNN_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match="file/cache .*FLASHRNN_CACHE"):
        first = twice()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert twice() is first
        assert twice(arch="sm_80").code


def test_full_disk_leaves_no_files(folder, monkeypatch):
    def full(path: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        assert twice().registers > 0
    assert list(folder.iterdir()) == []


def test_compile_error_contains_the_compiler_log(folder):
    wrong = 'extern "C" __global__ void twice(float* x) { x[0] = unheard_of(x[1]); }'
    with pytest.raises(RuntimeError, match=r'twice .*sm_90a(?s:.*)"unheard_of"'):
        twice(wrong)
    assert not list(folder.iterdir())


def test_unknown_architecture_is_an_error(folder):
    with pytest.raises(RuntimeError, match=r"twice .*sm_77"):
        twice(arch="sm_77")


def test_error_of_missing_headers_names_the_package(folder, monkeypatch):
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_header_directory", lambda name: None)
    with pytest.raises(KernelUnavailable, match="pip install nvidia-cuda-runtime"):
        twice()


def test_error_of_missing_nvrtc_names_the_package(folder, monkeypatch):
    def missing():
        raise RuntimeError("Failure finding libnvrtc.so")

    monkeypatch.setattr(module, "nvrtc_version", missing)
    expected = r"pip install nvidia-cuda-nvrtc: Failure finding libnvrtc\.so$"
    with pytest.raises(KernelUnavailable, match=expected):
        twice()


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("FLASHRNN_CACHE", "/mine")
    assert cache_folder() == Path("/mine")
    monkeypatch.setenv("FLASHRNN_CACHE", "~/mine")
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.setenv("FLASHRNN_CACHE", "")
    assert cache_folder() == Path("/xdg/flashrnn")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == tmp_path / ".cache" / "flashrnn"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("FLASHRNN_CACHE")
    assert cache_folder() == tmp_path / ".cache" / "flashrnn"


def test_kernels_are_compiled_ahead_in_other_processes(monkeypatch, folder, compiled, new_process):
    here = twice().code
    monkeypatch.setattr(nvrtc, "_compile", None)  # fails if this process compiles
    monkeypatch.setenv("FLASHRNN_CACHE", str(folder / "other"))
    new_process()
    with meanwhile(twice):
        pass
    assert twice().code == here
    assert len(compiled) == 2


@pytest.mark.parametrize("name", ["", "program", "python"])
def test_this_process_compiles_if_other_processes_cannot(monkeypatch, folder, tmp_path, name):
    """The executable is missing, is a program that embeds Python, or fails."""
    executable = tmp_path / name
    if name:
        executable.write_text(f"#!/bin/sh\necho x >> {tmp_path}/started\nexit 1\n")
        executable.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(executable) if name else "")
    with meanwhile(twice):
        pass
    assert len(list(folder.glob("*.cubin"))) == 1
    assert (tmp_path / "started").exists() == (name == "python")


def test_error_in_another_process_is_raised_when_the_kernel_is_needed(folder):
    with meanwhile(partial(twice, "mistake;")):
        pass
    with pytest.raises(KernelUnavailable, match="mistake"):
        twice("mistake;")


def test_one_of_eight_processes_compiles_and_the_others_wait(monkeypatch, folder, tmp_path):
    log = tmp_path / "log"

    def compile_(source, entry, arch):
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.3)
        return b"code", "Used 40 registers, 0 bytes spill stores"

    monkeypatch.setattr(module, "_compile", compile_)
    assert in_processes(8, twice) == [0] * 8
    assert len(log.read_text().splitlines()) == 1
    assert not list(folder.glob("*.lock"))


def test_lock_of_a_killed_process_is_released(tmp_path):
    def hold_and_die():
        with one_at_a_time(tmp_path / "a.lock"):
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_processes(1, hold_and_die) == [signal.SIGKILL]
    entered = []
    with one_at_a_time(tmp_path / "a.lock"):
        entered.append(True)
    assert entered


def test_without_file_locks_nobody_waits(tmp_path):
    (tmp_path / "file").touch()
    entered = []
    with one_at_a_time(tmp_path / "file" / "a.lock"):
        entered.append(True)
    assert entered
