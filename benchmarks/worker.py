"""A process that answers requests, with one line of JSON per request and answer, and keeps its state in between."""

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

_LONGEST = 2000  # largest number of characters of an error message


def error_text(error: BaseException | str) -> str:
    """Return the text of an error, of which only the beginning and the end are kept if it is long."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 4]}\n...\n{text[-_LONGEST * 3 // 4 :]}"


def serve(handlers: Mapping[str, Callable[..., dict]]) -> None:
    """In the worker, answer each request `{"do": name, **arguments}` by handlers[name](**arguments)."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # output of compilers and libraries goes to the log
    for line in requests:
        request = json.loads(line)
        try:
            answer = handlers[request.pop("do")](**request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": error_text(error)}
        print(json.dumps(answer), file=answers, flush=True)


class Worker:
    """The parent's end: starts the process and sends it requests."""

    def __init__(self, command: Sequence[str], **options) -> None:
        self._log = TemporaryFile("w+")  # noqa: SIM115, closed in __exit__
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log, "text": True}
        # In a process group with everything that it starts, such as compilers, so that nothing outlives it.
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
        """Return the answer, or {"error": reason} if there is none within this time."""
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
