"""Compiles kernels with NVRTC and caches the binaries on disk.

The file name of a binary is a hash of everything that determines it; a readable record is stored beside it. If several
processes need the same binary, one compiles it and the others wait. Both files are written under temporary names and
then renamed. A binary without a valid checksum in its record is compiled again.
"""

import hashlib
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flashrnn.cache import cache_folder, one_at_a_time, store
from flashrnn.cuda import nvrtc
from flashrnn.forking import lock_that_forks_wait_for
from flashrnn.problem import KernelUnavailable, making_kernels

SOURCES = Path(__file__).parent  # names of included files are relative to this folder
_OPTIONS = (
    "--std=c++17",
    "--device-as-default-execution-space",
    "--disable-warnings",  # constants that only the kernel of the other direction uses
    "--ptxas-options=-v",
)


@dataclass(frozen=True)
class Binary:
    """A compiled kernel, and the resources that the compiler reports for it."""

    code: bytes
    entry: str
    registers: int  # per thread
    spilled: int  # bytes per thread
    path: Path


@cache
def build(prelude: str, header: str, entry: str, arch: str, made_for: str = "") -> Binary:
    """Return kernel `entry` of the file `header`, compiled after `prelude` for `arch`, or read from the cache.

    `made_for` is written to the record for people who read it; the same binary may serve other specs.
    """
    source = f'{prelude}\n#include "{header}"\n'
    identity = {
        "entry": entry,
        "arch": arch,
        "compiler": _compiler(),
        "options": _OPTIONS,
        "kernels": sources_hash(),
        "source": source,
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    path = cache_folder() / f"{entry}-{arch}-{key}.cubin"
    cached = _read(path, entry)
    if cached is None:
        with one_at_a_time(path.with_suffix(".lock")):
            cached = _read(path, entry)  # another process may have compiled it
            if cached is None:
                code, log = _compile(source, entry, arch)
                cached = Binary(code, entry, *_resources(log), path)
                _write(cached, {"made_for": made_for, **identity})
    return cached


def _compile(source: str, entry: str, arch: str) -> tuple[bytes, str]:
    with making_kernels(f"{entry} does not compile for {arch} with {_compiler()}"):
        options = [f"-arch={arch}", *_OPTIONS]
        options += [f"--include-path={folder}" for folder in (str(SOURCES), *_cuda_headers())]
        if nvrtc_version() >= (12, 9):  # NVRTC's own cache would leave registers and spills out of the log
            options.append("--no-cache")
        return nvrtc.compiled(source, entry, options)


def _cuda_headers() -> list[str]:
    from cuda.pathfinder import find_nvidia_header_directory

    folder = find_nvidia_header_directory("cudart")
    if folder is None:
        raise KernelUnavailable(
            "no CUDA headers (cuda_bf16.h) found: they come with PyTorch's CUDA wheels; "
            "without those, pip install nvidia-cuda-runtime"
        )
    return [folder]


_IMPORTING = lock_that_forks_wait_for()  # concurrent imports of this module fail


@cache
def nvrtc_version() -> tuple[int, int]:
    """Return the major and minor version of NVRTC."""
    with _IMPORTING:
        from cuda.bindings.nvrtc import nvrtcVersion

    return nvrtcVersion()[1:]


def _compiler() -> str:
    with making_kernels("no NVRTC: it comes with PyTorch's CUDA wheels; without those, pip install nvidia-cuda-nvrtc"):
        return f"nvrtc {'.'.join(map(str, nvrtc_version()))}"


def prepare() -> None:
    """Compute once what names of binaries depend on.

    Otherwise, threads that compute it while another thread is busy wait for it at every file.
    """
    sources_hash()
    with suppress(KernelUnavailable):
        _compiler()


@cache
def sources_hash() -> str:
    """Return a hash of the sources of all kernels."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.rglob("*.cuh")):
        digest.update(path.relative_to(SOURCES).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _resources(log: str) -> tuple[int, int]:
    """Return the registers and the spilled bytes per thread from the compiler's log."""
    registers = re.search(r"Used (\d+) registers", log)
    spilled = re.search(r"(\d+) bytes spill stores", log)
    if not registers or not spilled:
        raise RuntimeError(f"the compiler's log names no registers or spills:\n{log}")
    return int(registers[1]), int(spilled[1])


def _read(path: Path, entry: str) -> Binary | None:
    """Return the binary at `path`; None if it is missing or is not what `_write` wrote."""
    try:
        code, record = path.read_bytes(), json.loads(path.with_suffix(".json").read_text())
        if record["sha256"] == hashlib.sha256(code).hexdigest():
            return Binary(code, entry, record["registers"], record["spilled"], path)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _write(binary: Binary, identity: dict) -> None:
    """Store the binary, then the record with its checksum."""
    resources = {"registers": binary.registers, "spilled": binary.spilled}
    record = {"sha256": hashlib.sha256(binary.code).hexdigest(), **resources, **identity}
    store({binary.path: binary.code, binary.path.with_suffix(".json"): json.dumps(record, indent=2).encode()})
