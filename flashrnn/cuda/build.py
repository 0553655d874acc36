"""Compiles kernels with NVRTC and keeps the binaries on disk.

A binary is stored under a hash of everything that shaped it, with a readable record beside it. Both are written to a
temporary name and renamed, so that several processes may build the same kernel at once.
"""

import hashlib
import io
import json
import os
import re
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

KERNELS = Path(__file__).parent / "kernels"


@dataclass(frozen=True)
class Binary:
    """A compiled kernel and what the compiler says of it."""

    code: bytes
    entry: str
    registers: int  # per thread
    spilled: int  # bytes per thread, stored to local memory because registers ran out
    path: Path


def cache_folder() -> Path:
    """Where binaries are kept: $FLASHRNN_CACHE, or flashrnn in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "flashrnn"
    return Path(os.environ.get("FLASHRNN_CACHE", default))


def build(prelude: str, header: str, entry: str, arch: str) -> Binary:
    """The kernel `entry` of kernels/`header`, compiled after `prelude` for `arch`, from the cache if it is there."""
    identity = {"entry": entry, "arch": arch, "compiler": _compiler(), "kernels": _sources_hash(), "prelude": prelude}
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    path = cache_folder() / f"{entry}-{arch}-{key}.cubin"
    cached = _read(path, entry)
    if cached is None:
        code, log = _compile(f'{prelude}\n#include "{header}"\n', entry, arch)
        cached = Binary(code, entry, *_resources(log), path)
        _write(cached, identity)
    return cached


def _compile(source: str, entry: str, arch: str) -> tuple[bytes, str]:
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        arch=arch,
        std="c++17",
        include_path=[str(KERNELS), *_cuda_headers()],
        device_as_default_execution_space=True,
        ptxas_options=["-v"],
    )
    log = io.StringIO()
    program = Program(source, "c++", options)
    return program.compile("cubin", logs=log).code, log.getvalue()


def _cuda_headers() -> list[str]:
    from cuda.pathfinder import find_nvidia_header_directory

    folder = find_nvidia_header_directory("cudart")
    if folder is None:
        raise RuntimeError(
            "no CUDA headers (cuda_bf16.h) found: they come with PyTorch's CUDA wheels; "
            "without those, pip install nvidia-cuda-runtime"
        )
    return [folder]


@cache
def _compiler() -> str:
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"nvrtc {major}.{minor}, cuda-core {version('cuda-core')}"


@cache
def _sources_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted(KERNELS.glob("*.cuh")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _resources(log: str) -> tuple[int, int]:
    registers = re.search(r"Used (\d+) registers", log)
    spilled = re.search(r"(\d+) bytes spill stores", log)
    if not registers or not spilled:
        raise RuntimeError(f"the compiler's log names no registers or spills:\n{log}")
    return int(registers[1]), int(spilled[1])


def _read(path: Path, entry: str) -> Binary | None:
    try:
        code, record = path.read_bytes(), json.loads(path.with_suffix(".json").read_text())
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    if record.get("sha256") != hashlib.sha256(code).hexdigest():
        return None
    return Binary(code, entry, record["registers"], record["spilled"], path)


def _write(binary: Binary, identity: dict) -> None:
    resources = {k: v for k, v in asdict(binary).items() if k in ("registers", "spilled")}
    record = {"sha256": hashlib.sha256(binary.code).hexdigest(), **resources, **identity}
    binary.path.parent.mkdir(parents=True, exist_ok=True)
    _replace(binary.path, binary.code)
    _replace(binary.path.with_suffix(".json"), json.dumps(record, indent=2).encode())


def _replace(path: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(temporary, path)
