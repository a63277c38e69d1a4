"""The parent's end of a worker process: start it, ask it, end it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Any, Self

USER_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (ValueError, TypeError, NotImplementedError, FileNotFoundError, PermissionError)
}
FIXED = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}  # the parent has already resolved the model
SECONDS_TO_END = 10


class WorkerError(RuntimeError):
    """A side's process failed or died."""


class SideProcess:
    """A fresh process for one side, with its thread count fixed before any library starts its pool.

    Use as a context: it ends the worker, at once when something went wrong. The worker has a session of its own, so
    that Ctrl-C reaches the parent alone, and ends by itself when the parent disappears.
    """

    def __init__(self, name: str, threads: int) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile("a+")  # noqa: SIM115 - open as long as the process, which appends to it
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "labkit.harness.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | FIXED | {"OMP_NUM_THREADS": str(threads)},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        """Answer to one request. What is wrong with the user's input comes back as its own error, else WorkerError."""
        try:
            self._requests.write(json.dumps({"op": op, **request}) + "\n")
            self._requests.flush()
        except BrokenPipeError:
            raise self._died() from None
        line = self._replies.readline()
        if not line:
            raise self._died()
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            self._process.wait()
            message = f"{self.name}: {reply['message']}"
            if reply["error"] in USER_ERRORS:
                raise USER_ERRORS[reply["error"]](message)
            raise WorkerError(f"{message} ({reply['error']})\n{self._last_errors()}")
        return reply

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self._kill()
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        try:
            self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._kill()
        self._replies.close()
        self._errors.close()

    def _kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _died(self) -> WorkerError:
        code = self._process.wait()
        if code < 0:
            cause = f"was killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                cause += ", as the system does when memory runs out; use a smaller model, dtype or batch"
        else:
            cause = f"ended with exit code {code}"
        return WorkerError(f"the process of {self.name} {cause}\n{self._last_errors()}".rstrip())

    def _last_errors(self, lines: int = 12) -> str:
        self._errors.seek(0)
        return "\n".join(self._errors.read().splitlines()[-lines:])
