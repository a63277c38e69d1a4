"""The judge's end of a process that calls foreign code. The clock is here."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from time import clock_gettime_ns, monotonic, perf_counter_ns
from typing import Any, Literal

from labkit.harness.judge import worker
from labkit.harness.judge.arrays import SharedArrays
from labkit.system.child import LOOK_S
from labkit.system.lifetime import started

LOAD_S, ROUND_S = 60.0, 30.0  # at most
END_S = 2.0  # in which a process that closed its pipe has to end
MEMORY_BYTES = 1 << 30  # that the code may take beyond its arguments
MOST_LINE = 1 << 16  # bytes of a message
MOST_ERRORS = 4000  # bytes of stderr that are read
SYSTEM = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/dev/urandom", "/dev/null"),
    *(sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")),
)
LINE = re.compile(r'File "([^"]+)", line (\d+)')  # of a traceback
OF_OTHERS = ("<", worker.__file__, sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"))
CRASHES = {
    signal.SIGSEGV: "it read or wrote outside of its arguments",
    signal.SIGBUS: "it read or wrote outside of its arguments",
    signal.SIGILL: "it has an instruction that this CPU lacks",
    signal.SIGFPE: "it divided an integer by zero",
    signal.SIGABRT: "it gave up; was memory freed twice?",
}
CAUSES = CRASHES | {
    signal.SIGSYS: "it started a process, opened a connection or reached for another process, which is forbidden here",
    signal.SIGXCPU: "it used more processor time than an exercise needs",
    signal.SIGKILL: "it was killed; did it take all memory?",
}


class SubmissionError(Exception):
    """Foreign code failed. The message says how, as the end of a sentence about the code."""


@dataclass(frozen=True)
class Submission:
    """Code that is judged.

    code: a shared library, or a file of Python.
    language: "triton" for a kernel, which the judge starts on this grid; "conversation" for a function in Python that
    gets an object whose methods the judge answers.
    function: that is called.
    kinds: a letter for each argument of a C function: "p" pointer, "i" int64, "f" float, "d" double.
    readable: files and folders that a module may read, besides the system's libraries.
    """

    code: Path
    function: str
    language: Literal["c++", "python", "conversation", "triton"] = "c++"
    kinds: str = ""
    threads: int = 1
    grid: tuple[int, ...] = ()
    readable: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    memory_bytes: int = MEMORY_BYTES


def with_numpy(code: Path, function: str) -> Submission:
    """A function in Python whose arrays are numpy's."""
    return Submission(code, function, "python", imports=("numpy",), readable=site_packages())


@dataclass(frozen=True)
class Round:
    """One round of all calls."""

    seconds: float
    processor_s: float  # of all threads


class JudgedProcess:
    """A process that has loaded a submission and stands still."""

    def __init__(self, process: Popen[bytes], answers: int, errors: int) -> None:
        self._process, self._answers, self._errors = process, answers, errors
        self._unread = bytearray()
        self.in_force: tuple[str, ...] = ()  # the measures that confine it

    def confine(self, job: dict[str, Any]) -> None:
        """Has the process confine itself, before it loads the code of the job."""
        self._send(job)
        self.in_force = tuple(json.loads(self._line(monotonic() + LOAD_S, "load")))

    def load(self) -> None:
        """Waits until the code is loaded. SubmissionError where that fails."""
        self._expect(worker.READY, monotonic() + LOAD_S, "load")
        self._stop()

    def converse(self, answer: Callable[..., Any]) -> Any:
        """Answers what the code asks, with `answer(name, *arguments)`, until it returns a result. SubmissionError: it
        failed, asked without end, or asked what `answer` refuses with a ValueError or TypeError.
        """
        last = monotonic() + ROUND_S
        while True:
            said = self._message(last)
            if "result" in said:
                return said["result"]
            try:
                self._send(answer(said["ask"], *said["arguments"]))
            except (KeyError, TypeError, ValueError) as error:
                line = said.get("line")
                where = f"line {line}" if type(line) is int else "it"
                raise SubmissionError(f"{where} asked for something that there is not: {error}") from None

    def _message(self, last: float) -> dict[str, Any]:
        line = self._line(last, "end")
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        if not isinstance(said, dict):
            raise SubmissionError(f"it wrote {line[:40]!r} where only the judge's own code writes")
        return said

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        try:
            text = json.dumps(message).encode()
            self._process.stdin.write(b"%d\n%b" % (len(text), text))
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None

    def _line(self, last: float, what: str) -> bytes:
        while (end := self._unread.find(b"\n")) < 0:
            if len(self._unread) > MOST_LINE:
                raise SubmissionError(f"it wrote more than {MOST_LINE} bytes without an end of the line")
            self._read(last, what)
        line = bytes(self._unread[: end + 1])
        del self._unread[: end + 1]
        return line

    def one_round(self) -> Round:
        """Lets the process make all calls once. It stands still again at the end, so no thread of it goes on."""
        assert self._process.stdin is not None
        if self._unread or self._readable(0.0):
            raise SubmissionError("it announced the end of a round before the round began")
        before_ns = self._processor_ns()
        begin = perf_counter_ns()
        os.write(self._process.stdin.fileno(), b"g")
        os.kill(self._process.pid, signal.SIGCONT)
        try:
            self._expect(worker.DONE, monotonic() + ROUND_S, "end")
        finally:
            end = perf_counter_ns()
        self._stop()
        return Round((end - begin) / 1e9, (self._processor_ns() - before_ns) / 1e9)

    def _stop(self) -> None:
        """Stops all threads, and waits until they stand still."""
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            state = os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            state = None
        if state is None or state.si_code != os.CLD_STOPPED:
            raise self._failure()
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def _processor_ns(self) -> int:
        """Processor time of all its threads so far (clock_getcpuclockid(3))."""
        return clock_gettime_ns(~self._process.pid << 3 | 2)

    def _expect(self, answer: bytes, last: float, what: str) -> None:
        while not self._unread:
            self._read(last, what)
        got = bytes(self._unread)
        self._unread.clear()
        if got != answer:
            raise SubmissionError(f"it wrote {got[:40]!r} where only the judge's own code writes")

    def _read(self, last: float, what: str) -> None:
        """Reads what the process has written, before the moment `last`."""
        while not self._readable(min(LOOK_S, last - monotonic())):
            if monotonic() >= last:
                raise SubmissionError(
                    f"it did not {what} in time: is there an endless loop, or a barrier that not every thread reaches? "
                    "Or do other programs keep the processors busy?"
                )
        if not (read := os.read(self._answers, MOST_LINE)):
            raise self._failure()
        self._unread += read

    def _readable(self, seconds: float) -> bool:
        waiting = select.poll()
        waiting.register(self._answers, select.POLLIN)
        return bool(waiting.poll(max(0.0, seconds) * 1e3))

    def _failure(self) -> SubmissionError:
        try:
            code = self._process.wait(END_S)
        except TimeoutExpired:
            return SubmissionError("it closed a file that only the judge's own code uses")
        said = os.pread(self._errors, MOST_ERRORS, max(0, os.fstat(self._errors).st_size - MOST_ERRORS))
        text = said.decode(errors="replace")
        last_line = (text.split("\n")[-2:] or [""])[0].strip()
        if code < 0:
            cause = CAUSES.get(signal.Signals(-code), "it crashed")
            return SubmissionError(f"{cause} ({signal.Signals(-code).name})")
        if code == worker.FAILED:
            lines = [place for place in LINE.findall(text) if not place[0].startswith(OF_OTHERS)]
            where = f"{os.path.basename(lines[-1][0])}, line {lines[-1][1]}: " if lines else ""
            return SubmissionError(f"it raised an error: {where}{last_line}")
        return SubmissionError(f"it ended the process with exit code {code}" + (f": {last_line}" if last_line else ""))


@contextmanager
def judged(submission: Submission, arrays: SharedArrays) -> Iterator[JudgedProcess]:
    """A process that has loaded `submission` and maps `arrays`, which are empty. It ends with this context. The code of
    a conversation is loaded when the conversation begins.

    SubmissionError where the code cannot be loaded.
    """
    job = {
        "code": str(submission.code.resolve()),
        "function": submission.function,
        "language": submission.language,
        "kinds": submission.kinds,
        "threads": submission.threads,
        "grid": submission.grid,
        "imports": list(submission.imports),
        "memory_bytes": submission.memory_bytes,
        "processor_s": int(4 * LOAD_S),
        "readable": [*SYSTEM, str(submission.code.resolve().parent), *submission.readable],
        **arrays.described,
    }
    arrays.clear()
    receiving, sending = os.pipe()
    errors = os.memfd_create("stderr")
    isolated = ["-I"] if submission.imports else ["-I", "-S"]
    command = [sys.executable, *isolated, worker.__file__, str(sending)]
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    environment = {"PATH": "", "TRITON_INTERPRET": "1", **dict.fromkeys(names, str(submission.threads))}
    pipes = {"stdin": PIPE, "stdout": DEVNULL, "stderr": errors, "pass_fds": (sending, *arrays.files)}
    try:
        with started(command, env=environment, cwd="/", **pipes) as process:
            os.close(sending)
            sending = -1
            one = JudgedProcess(process, receiving, errors)
            one.confine(job)
            if submission.language != "conversation":
                one.load()
            yield one
    finally:
        os.close(receiving)
        os.close(errors)
        if sending >= 0:
            os.close(sending)


def site_packages(without: Sequence[str] = ("labkit",)) -> tuple[str, ...]:
    """Folders of installed packages that a module may import, without labkit and its kernels."""
    import numpy as np

    folder = Path(np.__file__).parent.parent
    return tuple(str(path) for path in folder.iterdir() if not path.name.startswith(tuple(without)))
