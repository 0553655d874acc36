"""A process that answers requests, one line of JSON each way: for what needs a process of its own, and keeps there what
it made for one request until the next."""

import json
import os
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from tempfile import TemporaryFile
from threading import Timer

_LONGEST = 2000  # characters of an error that are kept


def error_text(error: BaseException | str) -> str:
    """Return what went wrong, in as many characters as a result can hold: of a long text the beginning and the end."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 4]}\n...\n{text[-_LONGEST * 3 // 4 :]}"


def serve(handlers: Mapping[str, Callable[..., dict]]) -> None:
    """Answer, in the worker, `{"do": name, **arguments}` by handlers[name](**arguments), until there is no request."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # compilers and libraries print as they like: into the log
    for line in requests:
        request = json.loads(line)
        try:
            answer = handlers[request.pop("do")](**request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": error_text(error)}
        print(json.dumps(answer), file=answers, flush=True)


class Worker:
    """The other end: starts the process and asks it."""

    def __init__(self, command: Sequence[str], **options) -> None:
        self._log = TemporaryFile("w+")  # noqa: SIM115, closed in __exit__
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log, "text": True}
        # In a group with all that it starts, compilers for instance, so that nothing outlives it.
        self._process = subprocess.Popen(command, process_group=0, **pipes, **options)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_) -> None:
        self._kill()
        self._process.wait()
        with suppress(BrokenPipeError):  # a request that nobody read
            self._process.stdin.close()
        self._process.stdout.close()
        self._log.close()

    def ask(self, seconds: float, **request) -> dict:
        """Return the answer; {"error": why} if there is none within that time."""
        start = time.monotonic()
        timer = Timer(seconds, self._kill)
        timer.start()
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        if answer:
            return json.loads(answer)
        late = time.monotonic() - start >= seconds
        why = f"no answer within {seconds} s" if late else f"the process ended with code {self._process.wait()}"
        self._log.seek(0)
        return {"error": error_text(f"{why}; its output:\n{self._log.read()}")}

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
