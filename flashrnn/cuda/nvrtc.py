"""NVRTC, in this process or in a process of its own, because NVRTC compiles only one program at a time per process.

A process of its own runs this file as a script. It imports neither PyTorch nor this package, and starts in 0.2 s.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from threading import local

_THREAD = local()


def compile_in_subprocess() -> None:
    """Make this thread compile its programs in processes of their own from now on."""
    _THREAD.in_subprocess = True


def compiled(source: str, name: str, options: list[str]) -> tuple[bytes, str]:
    """Return a program's binary and the compiler's log. Raises RuntimeError with that log if the program is invalid."""
    if getattr(_THREAD, "in_subprocess", False) and (done := _in_subprocess(source, name, options)) is not None:
        return done
    return _compile(source, name, options)


def _compile(source: str, name: str, options: list[str]) -> tuple[bytes, str]:
    from cuda.bindings import nvrtc

    def result(returned: tuple) -> object:
        status, *values = returned
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(nvrtc.nvrtcGetErrorString(status)[1].decode())
        return values[0] if values else None

    program = result(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = bytearray(result(nvrtc.nvrtcGetProgramLogSize(program)))
        result(nvrtc.nvrtcGetProgramLog(program, log))
        log = log.rstrip(b"\0").decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(log)
        code = bytearray(result(nvrtc.nvrtcGetCUBINSize(program)))
        result(nvrtc.nvrtcGetCUBIN(program, code))
        return bytes(code), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _in_subprocess(source: str, name: str, options: list[str]) -> tuple[bytes, str] | None:
    """Return the result of `_compile` in another process; None if it fails there for any reason."""
    if not Path(sys.executable or "").name.startswith("python"):  # then it is a program that embeds Python
        return None
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    given = {"input": json.dumps([source, name, options]).encode(), "capture_output": True, "env": environment}
    try:
        done = subprocess.run([sys.executable, __file__], check=True, **given)
    except (OSError, subprocess.CalledProcessError):
        return None
    log, _, code = done.stdout.partition(b"\n")
    return code, json.loads(log)


if __name__ == "__main__":
    sys.path = [folder for folder in sys.path if folder != str(Path(__file__).parent)]  # it has other modules' names
    code, log = _compile(*json.load(sys.stdin))
    sys.stdout.buffer.write(json.dumps(log).encode() + b"\n" + code)
