"""What other programs take of the processors while something is measured, and waiting until they take little."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from time import monotonic, sleep

import psutil

from labkit.statistics.trust import MOST_TAKEN, taken_cores
from labkit.system.asked_from import setting
from labkit.system.bounds import check_numbers
from labkit.system.errors import RunError
from labkit.system.others_clock import SHORTEST_S, OthersClock
from labkit.system.progress import Progress

SAMPLE_S, QUIET_SAMPLES = 1.0, 3  # so many samples in a row must be quiet
NAMED = 3  # programs named in a message
LEAST_NAMED = 0.05  # processors


@dataclass(frozen=True)
class Program:
    """A running process that is not one of ours, and the processors that it kept busy."""

    name: str
    cores: float

    def __str__(self) -> str:
        return f"{self.name} ({self.cores:.1f})"


class OthersByRound:
    """How many processors other programs kept busy, round by round; rounds shorter than a second share one figure."""

    def __init__(self, ours: Iterable[int] = ()) -> None:
        self.cores: list[float | None] = []  # None: not known yet, or never, where all rounds were too short
        self._clock = OthersClock(ours)

    def end_round(self) -> None:
        """A round is over."""
        self.cores.append(None)
        self._fill(self._clock.lap())

    def end(self) -> None:
        """The last round is over: what is left of the time goes by the last figure."""
        known = [cores for cores in self.cores if cores is not None]
        self._fill(known[-1] if known else self._clock.lap(SHORTEST_S / 2))

    def _fill(self, others: float | None) -> None:
        self.cores = [others if cores is None else cores for cores in self.cores]


class NotQuietError(RunError):
    """The machine did not become quiet. The message names what runs on it."""


def wait_until_quiet(limit_s: float, *, needed: int | None = None, progress: Progress | None = None) -> None:
    """Wait until other programs leave `needed` processors (None: all) alone for three seconds in a row.

    NotQuietError after `limit_s` seconds: who asks for a quiet machine would not trust what another one gives.
    `progress` is told once a second, in seconds.
    """
    check_numbers(wait_quiet_s=limit_s)
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    needed = needed or cores
    start, quiet = monotonic(), 0
    while True:
        programs, others = _sample(SAMPLE_S)
        quiet = quiet + 1 if taken_cores(others, needed=needed, cores=cores) <= MOST_TAKEN else 0
        if quiet >= QUIET_SAMPLES:
            return
        waited, names = monotonic() - start, ", ".join(map(str, programs)) or "processes that it does not show"
        if waited >= limit_s:
            raise NotQuietError(
                f"the machine was not quiet within {limit_s:.0f} s: other programs kept {others:.1f} processors busy "
                f"({names}); close them, wait longer ({setting('wait_quiet')}), or measure without waiting and have "
                "the figures graded"
            )
        if progress:
            now = "quiet so far" if quiet else f"waiting for a quiet machine: {names}"
            progress(int(waited), int(limit_s), now)


def _sample(seconds: float) -> tuple[list[Program], float]:
    """The busiest other programs of the next seconds, and how many processors all of them kept busy."""
    clock, before = OthersClock(), _by_process()
    begin = monotonic()
    sleep(seconds)
    others, took = clock.lap(shortest_s=0.0) or 0.0, monotonic() - begin
    spent = [
        Program(process.name, (process.seconds - before[pid].seconds) / took)
        for pid, process in _by_process().items()
        if pid in before and pid != psutil.Process().pid
    ]
    busiest = sorted(spent, key=lambda program: program.cores, reverse=True)[:NAMED]
    return [program for program in busiest if program.cores >= LEAST_NAMED], others


@dataclass(frozen=True)
class _Spent:
    name: str
    seconds: float


def _by_process() -> dict[int, _Spent]:
    found = {}
    for process in psutil.process_iter():
        try:
            times = process.cpu_times()
            found[process.pid] = _Spent(process.name(), times.user + times.system)
        except psutil.Error:  # it has ended, or belongs to somebody who does not show it
            continue
    return found
