"""Runs a command to its end, reads its output, and ends it cleanly when the user gives up."""

from __future__ import annotations

import re
import signal
import subprocess
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from statistics import median

import psutil

from labkit.system.appended_lines import AppendedLines
from labkit.system.lifetime import kill_session
from labkit.system.marked_run import MARK, end_marked, ended_with_owner
from labkit.system.others_clock import OthersClock

POLL_S = 0.1
LOOK_S = 0.2  # between two lists of all processes, which take a millisecond or two
GRACE_S = 60.0  # for nsys to write its report after Ctrl-C
TAIL_LINES = 100  # the report of torch's launcher about a rank that failed has about 40
LAUNCHER_LINE = re.compile(r"[EW]\d{4} \S+ \d+ \S*torch/distributed/elastic/.*")  # begins that report
NSYS_LINES = re.compile(
    r"\[\d+/\d+\] \[.*|Generating '.*'|Generated:|\s+/.*\.(nsys-rep|sqlite|qdstrm)|Capture range .*"
)


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    exit_code: int
    seconds: float
    said: tuple[str, ...]  # its last lines, without nsys's own
    interrupted: bool  # by Ctrl-C
    late: bool  # ended by the timeout
    taken_cores: float | None = None  # processors that other programs took from it; None: too short to tell

    @property
    def well(self) -> bool:
        """Whether the command ended by itself and succeeded."""
        return not (self.exit_code or self.interrupted or self.late)

    @property
    def said_by_ranks(self) -> tuple[str, ...]:
        """The lines before the report of torch's launcher about a rank that failed; without such a report all lines."""
        return tuple(takewhile(lambda line: not LAUNCHER_LINE.match(line), self.said))


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    timeout_s: float | None = None,
    echo: Callable[[str], None] | None = None,
    mark: str | None = None,
) -> Ended:
    """Runs `command` in a session of its own, so that Ctrl-C reaches this process alone.

    echo: called with each line that the command prints, without the line's end.
    mark: of a run whose processes the caller ends (`labkit.system.marked_run`); by default they end with this process.

    On Ctrl-C, and after `timeout_s`, the command gets the interrupt and GRACE_S to end, then is killed. Processes that
    it leaves running are ended too, even after a success: nsys's agent, for one, is a daemon that may run for hours.

    Raises FileNotFoundError for a program that does not exist.
    """
    if mark is None:
        mark = uuid.uuid4().hex
        with ended_with_owner(mark):
            return run(command, environment, timeout_s=timeout_s, echo=echo, mark=mark)
    started, load = time.monotonic(), RunLoad(mark)
    interrupted = late = False
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment) | {MARK: mark},
            start_new_session=True,
        )
        said: deque[str] = deque(maxlen=TAIL_LINES)
        reader = AppendedLines(output.fileno(), _without_nsys(said.append, echo))
        try:
            while process.poll() is None:
                if late := timeout_s is not None and time.monotonic() - started > timeout_s:
                    break
                reader.read()
                load.look()
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            interrupted = True
        if process.poll() is None:
            _end(process)
        end_marked(mark)
        reader.read(last=True)
    return Ended(process.returncode, time.monotonic() - started, tuple(said), interrupted, late, load.taken_cores)


class RunLoad:
    """The load on a run whose processes carry `mark`. Created before the run begins."""

    def __init__(self, mark: str) -> None:
        self._mark, self._seen = mark, set(psutil.pids())
        self._clock, self._taken, self._looked = OthersClock(), list[float](), time.monotonic()

    @property
    def taken_cores(self) -> float | None:
        """Processors that others took from the run, in the median second. None: the run was too short to tell."""
        return round(median(self._taken), 2) if self._taken else None

    def look(self) -> None:
        """Notes the load once a second. To be called often."""
        if (now := time.monotonic()) - self._looked < LOOK_S:
            return
        self._looked = now
        pids = set(psutil.pids())
        for pid in pids - self._seen:
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.environ().get(MARK) == self._mark:
                    self._clock.add(process)
        self._seen = pids
        if (lap := self._clock.whole_lap()) is not None:
            self._taken.append(lap.taken)


def _without_nsys(keep: Callable[[str], None], echo: Callable[[str], None] | None) -> Callable[[str], None]:
    """A listener that passes the command's own lines on to `echo`, and to `keep` if they are not blank."""

    def hear(line: str) -> None:
        if NSYS_LINES.fullmatch(line):
            return
        if line.strip():
            keep(line)
        if echo is not None:
            echo(line)

    return hear


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        kill_session(process)
