"""Kernels of GPUs on the processor: the source is compiled as host C++ with gpu_on_host.h.

Each kernel is a library. A process that loads it and runs a launch fails if ThreadSanitizer finds a race.
"""

import atexit
import hashlib
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

from flashrnn.cache import cache_folder
from flashrnn.cuda.arguments import Argument, check
from flashrnn.cuda.build import SOURCES
from flashrnn.cuda.dtype_kernel import DtypeKernel
from flashrnn.cuda.parameters import Parameters
from flashrnn.cuda.resident import single_step
from flashrnn.cuda.short_gradients import THREADS, parameters, prelude, shared_bytes
from flashrnn.cuda.spec import KernelSpec
from tests.cells.test_cuda import HOST

FOLDER = Path(__file__).parent
OPTIONS = ("-std=c++20", "-O1", "-g1", "-w", "-fPIC", "-fno-strict-aliasing", "-fsanitize=thread", f"-I{FOLDER}")
LINKER = ("-fuse-ld=gold",) if shutil.which("ld.gold") else ()  # takes a third of the time
AS_MEMBER = "#undef DEVICE\n#define DEVICE inline"  # they are static in HOST
# Shared memory, and two inline PTX instructions of products.cuh.
REPLACED = {
    r"extern __shared__ [^;]*?(\w+) (\w+)\[\];": r"\1* \2 = reinterpret_cast<\1*>(self->block->shared);",
    r'asm volatile\("st\.shared\.v4\.b32.*?"r"\((shared \+ [^";]*)\), "r".*?;$': r"store_fragment(\1, value);",
    r'asm volatile\("ld\.shared\.v4\.b32.*?"r"\((shared \+ [^";]*)\)\);$': r"load_fragment(a, \1);",
}
# Headers that gpu_on_host.h and HOST replace.
REPLACED_HEADERS = (
    *(f"kernels/{name}.cuh" for name in ("common", "memory", "cluster", "math")),
    *(f"resident/kernels/{name}.cuh" for name in ("grid", "warpgroup")),
)


def compile_for_host(entry: str, prelude: str, header: str, more: str = "") -> Callable[[], Path]:
    """Return a function that compiles a library with the kernel `entry` of `header` or `more`, and returns its path."""
    scalar, constants = prelude.split("\n", 1)
    called = f'extern "C" void kernel(const i64* arguments) {{ call_with<{entry}>(arguments); }}'
    kernel = _included(header, set(REPLACED_HEADERS))
    for pattern, replacement in REPLACED.items():
        kernel = re.sub(pattern, replacement, kernel, flags=re.MULTILINE | re.DOTALL)
    constants = re.sub(r'^#include "kernels/.*$', "", constants, flags=re.MULTILINE)  # replaced, too
    parts = [scalar, '#include "gpu_on_host.h"', AS_MEMBER, HOST, AS_MEMBER, constants, kernel, more, called]
    return partial(_compiled, "\n".join(parts))


def _compiled(text: str) -> Path:
    """Return the library of a source, compiled once for all tests."""
    library = _folder() / hashlib.sha256(text.encode()).hexdigest()
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=_folder()) as folder:
            made = Path(folder, "kernel")
            made.with_suffix(".cpp").write_text(text)
            source = made.with_suffix(".cpp").replace(library.with_suffix(".cpp"))
            _compile("-shared", *LINKER, "-include", _common(_folder())[0], source, "-o", made)
            made.replace(library)
    return library


def _folder() -> Path:
    folder = cache_folder() / "on_host"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@cache
def _common(folder: Path) -> tuple[Path, Path]:
    """Return the header of the standard library, next to its precompiled form, and the compiled gpu_on_host.cpp."""
    header, gpu = folder / "standard_library.h", folder / "gpu_on_host"
    if not gpu.exists():
        with tempfile.TemporaryDirectory(dir=folder) as made:
            Path(shutil.copy(FOLDER / header.name, made)).replace(header)
            compiled = f"{header.name}.gch"
            _compile("-x", "c++-header", header, "-o", Path(made, compiled))
            Path(made, compiled).replace(folder / compiled)
            _compile("-rdynamic", "-include", header, FOLDER / "gpu_on_host.cpp", "-ldl", "-o", Path(made, gpu.name))
            Path(made, gpu.name).replace(gpu)
    return header, gpu


@cache
def _running(gpu: Path) -> subprocess.Popen:
    """Return a process of the compiled gpu_on_host.cpp, which ends with this process."""
    process = subprocess.Popen([gpu], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.communicate)
    return process


def _compile(*arguments: str | Path) -> None:
    done = subprocess.run(["g++", *OPTIONS, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _included(header: str, known: set[str]) -> str:
    """Return the text of a header with all its includes, each one once."""
    if header in known:
        return ""
    known.add(header)
    text = (SOURCES / header).read_text().replace("#pragma once", "")
    return re.sub(r'#include "(.*\.cuh)"', lambda found: _included(found[1], known), text)


@dataclass(frozen=True)
class HostKernel:
    """A `LoadedKernel` on the processor. The blocks of a group run concurrently; without groups, all blocks do."""

    library: Callable[[], Path]
    parameters: Parameters
    blocks: int | None  # blocks per group
    threads: int
    shared_bytes: int
    at_once: int = 1000

    def waves(self, groups: int) -> Iterator[tuple[int, int]]:
        return iter([(0, groups)])

    def bind(self, **known: int) -> Callable[[int, Mapping[str, Argument]], None]:
        return lambda groups, arguments: self.launch(groups, {**arguments, **known})

    def launch(self, groups: int, by_name: Mapping[str, Argument]) -> None:
        assert set(by_name) == {one.name for one in self.parameters}
        check(self.parameters, by_name)
        arguments = [by_name[one.name] for one in self.parameters]
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        buffers = {t.untyped_storage().data_ptr(): _bytes_of(t) for t in tensors}
        places = list(buffers)
        together = self.blocks or groups
        sizes = (groups * (self.blocks or 1), together, self.threads, self.shared_bytes)
        parts = [struct.pack("=5q", *sizes, len(buffers))]
        for buffer in buffers.values():
            parts += [struct.pack("=q", len(buffer)), buffer.numpy().tobytes()]
        parts.append(struct.pack("=q", len(arguments)))
        for a in arguments:
            start = a.untyped_storage().data_ptr() if isinstance(a, torch.Tensor) else None
            placed = (-1, a or 0) if start is None else (places.index(start), a.data_ptr() - start)
            parts.append(struct.pack("=2q", *placed))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "launch")
            file.write_bytes(b"".join(parts))
            process = _running(_common(_folder())[1])
            print(together * self.threads, self.library(), file, sep="\n", file=process.stdin, flush=True)
            assert process.stdout.readline() == "0\n", Path(f"{file}.log").read_text()[:4000]
            with file.open("rb") as content:
                for buffer in buffers.values():
                    buffer.numpy()[:] = np.frombuffer(content.read(len(buffer)), dtype=np.uint8)


@cache
def loaded_on_host(kernel: DtypeKernel, dtype: torch.dtype, device: int) -> HostKernel:
    """Return a kernel on the processor, in place of `dtype_kernel.loaded`."""
    library = compile_for_host(f"flashrnn_{kernel.name}", kernel.prelude(dtype), f"kernels/{kernel.name}.cuh")
    return HostKernel(library, kernel.parameters(dtype), 1, kernel.threads, 0)


@cache
def short_gradients_on_host(spec: KernelSpec, device: int) -> HostKernel:
    """Return a kernel on the processor, in place of `short_gradients._kernel`."""
    library = compile_for_host("flashrnn_short_gradients", prelude(spec), "kernels/short_gradients.cuh")
    return HostKernel(library, parameters(spec), 1, THREADS, shared_bytes(spec))


@cache
def single_step_on_host(spec: KernelSpec, device: int) -> HostKernel:
    """Return a kernel on the processor, in place of `single_step._kernel`."""
    library = compile_for_host("flashrnn_single_step", single_step.prelude(spec), "resident/kernels/single_step.cuh")
    return HostKernel(library, single_step.parameters(spec), 1, single_step.THREADS, 0)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a tensor as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
