"""One rank of `labkit.launch` as its caller sees it: its output, and the files that it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from labkit.launcher.failure import RankFailure, how_it_ended
from labkit.system.appended_lines import AppendedLines
from labkit.system.errors import RunError
from labkit.system.lifetime import kill_session
from labkit.system.process_state import STOPPED, process_state

TAIL_LINES = 20
CALL = "call.pickle"
WAITING, MET, RESULT, ERROR = "rank-{}.waiting", "rank-{}.met", "rank-{}.result", "rank-{}.error"


class RankError(RunError):
    """A rank raised, or its process ended. If several ranks failed, this is the first cause.

    - rank: the rank that failed.
    - error_type: name of the exception's class; None if the process ended without an exception.
    - reason: the exception's message, or how the process ended.
    - rank_traceback: the rank's traceback, or the last lines that it printed.
    """

    def __init__(self, rank: int, error_type: str | None, reason: str, rank_traceback: str) -> None:
        cause = f"{error_type}: {reason}" if error_type else reason
        super().__init__(f"rank {rank}: {cause}" + (f"\n\n{rank_traceback}" if rank_traceback else ""))
        self.rank, self.error_type, self.reason, self.rank_traceback = rank, error_type, reason, rank_traceback


class RankProcess:
    """A process of `labkit.launcher.rank`, in a session of its own, so that Ctrl-C reaches only the caller."""

    def __init__(
        self, rank: int, ranks: int, folder: Path, environment: Mapping[str, str], echo: Callable[[str], None]
    ) -> None:
        self.rank = rank
        self.result, self._error, self._waiting, self._met = (
            folder / name.format(rank) for name in (RESULT, ERROR, WAITING, MET)
        )
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  by close()
        self._last: deque[str] = deque(maxlen=TAIL_LINES)

        def hear(line: str) -> None:
            self._last.append(line)
            echo(f"[rank {rank}] {line}")

        self._lines = AppendedLines(self._output.fileno(), hear)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-u", "-m", "labkit.launcher.rank", str(folder), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=dict(environment) | {name: str(value) for name, value in place.items()},
            start_new_session=True,
        )

    @property
    def last_lines(self) -> str:
        return "\n".join(self._last)

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def is_stopped(self) -> bool:
        """Whether SIGSTOP or a debugger has stopped it."""
        return process_state(self.process.pid) in (STOPPED, STOPPED.lower())

    @property
    def is_waiting(self) -> bool:
        """Whether it has reached the point at which the ranks wait for each other."""
        return self._waiting.exists()

    @property
    def has_met(self) -> bool:
        """Whether it has met the other ranks."""
        return self._met.exists()

    def read(self) -> None:
        """Passes on the lines that it has printed since the last call."""
        self._lines.read()

    def failure(self) -> RankFailure | None:
        """How the rank failed; None: it is running, or has left its result."""
        exit_code = self.process.poll()  # before the files are checked: they exist once the process has ended
        if self._error.exists():
            error = json.loads(self._error.read_text())
            return RankFailure(self.rank, None, f"{error['type']}: {error['message']}", error["at"])
        if exit_code is None or self.result.exists():
            return None
        return RankFailure(self.rank, exit_code, "", time.monotonic())

    def raise_error(self, failure: RankFailure) -> None:
        """Raises RankError for this failure of the rank."""
        if failure.exit_code is None:
            error = json.loads(self._error.read_text())
            raise RankError(self.rank, error["type"], error["message"], error["traceback"])
        self._lines.read(last=True)
        reason = f"its process ended before the function returned, {how_it_ended(failure.exit_code)}"
        raise RankError(self.rank, None, reason, self.last_lines)

    def say_where_it_stands(self) -> None:
        """Has the rank write its stack to its output (`labkit.launcher.rank` registers the signal)."""
        if self.is_running and not self.is_stopped:
            self.process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        kill_session(self.process)

    def close(self) -> None:
        self._lines.read(last=True)
        self._output.close()
