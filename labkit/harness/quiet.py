"""Processor use of other programs during a measurement, and waiting until it is low."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from time import monotonic, sleep

import psutil

from labkit.statistics.trust import MOST_TAKEN, taken_cores
from labkit.system.asked_from import setting
from labkit.system.bounds import check_numbers
from labkit.system.errors import RunError
from labkit.system.others_clock import SHORTEST_S, OthersClock
from labkit.system.processors import physical_cores
from labkit.system.progress import Progress

SAMPLE_S, QUIET_SAMPLES = 1.0, 3  # length of a sample, and how many in a row must be quiet
NAMED = 3  # programs named in a message
LEAST_NAMED = 0.05  # processors


@dataclass(frozen=True)
class Program:
    """A running process of other programs, and the processors that it kept busy."""

    name: str
    cores: float

    def __str__(self) -> str:
        return f"{self.name} ({self.cores:.1f})"


class OthersByRound:
    """Processors that other programs kept busy, round by round. Rounds shorter than a second share one figure."""

    def __init__(self, ours: Iterable[int] = ()) -> None:
        self.cores: list[float | None] = []  # None: not known yet
        self._clock = OthersClock(ours)

    def end_round(self) -> None:
        """Notes the end of a round."""
        self.cores.append(None)
        self._fill(self._clock.lap())

    def end(self) -> None:
        """Notes the end of the last round. Rounds without a figure get the last known one."""
        known = [cores for cores in self.cores if cores is not None]
        self._fill(known[-1] if known else self._clock.lap(SHORTEST_S / 2))

    def _fill(self, others_cores: float | None) -> None:
        self.cores = [others_cores if cores is None else cores for cores in self.cores]


class NotQuietError(RunError):
    """The machine did not become quiet. The message names the busiest programs."""


def wait_until_quiet(limit_s: float, *, needed: int | None = None, progress: Progress | None = None) -> None:
    """Waits until other programs leave `needed` processors (None: all) alone for three seconds in a row.

    `progress` is called once a second, with seconds. NotQuietError after `limit_s` seconds, because a caller who asks
    for a quiet machine would not trust figures from a busy one.
    """
    check_numbers(wait_quiet_s=limit_s)
    cores = physical_cores()
    needed = needed or cores
    start, quiet = monotonic(), 0
    while True:
        programs, others_cores = _sample(SAMPLE_S)
        quiet = quiet + 1 if taken_cores(others_cores, needed=needed, cores=cores) <= MOST_TAKEN else 0
        if quiet >= QUIET_SAMPLES:
            return
        waited, names = monotonic() - start, ", ".join(map(str, programs)) or "hidden processes"
        if waited >= limit_s:
            raise NotQuietError(
                f"the machine was not quiet within {limit_s:.0f} s: other programs kept {others_cores:.1f} processors "
                f"busy ({names}); close them, wait longer ({setting('wait_quiet')}), or measure without waiting and "
                "have the figures graded"
            )
        if progress:
            now = "quiet so far" if quiet else f"waiting for a quiet machine: {names}"
            progress(int(waited), int(limit_s), now)


def disturbance(others_cores: float | None, needed: int) -> str:
    """What other programs take of `needed` processors, in words for a line that shows progress; empty if it is little
    or unknown. `others_cores`: processors that they keep busy.
    """
    taken = 0.0 if others_cores is None else taken_cores(others_cores, needed=needed, cores=physical_cores())
    return f"other programs take {taken:.1f} of {needed} processors" if taken > MOST_TAKEN else ""


def _sample(seconds: float) -> tuple[list[Program], float]:
    """The busiest other programs of the next `seconds`, and the processors that all other programs kept busy."""
    clock, before = OthersClock(), _by_process()
    begin = monotonic()
    sleep(seconds)
    others_cores, took = clock.lap(shortest_s=0.0) or 0.0, monotonic() - begin
    spent = [
        Program(process.name, (process.seconds - before[pid].seconds) / took)
        for pid, process in _by_process().items()
        if pid in before and pid != os.getpid()
    ]
    busiest = sorted(spent, key=lambda program: program.cores, reverse=True)[:NAMED]
    return [program for program in busiest if program.cores >= LEAST_NAMED], others_cores


@dataclass(frozen=True)
class _Spent:
    name: str
    seconds: float


def _by_process() -> dict[int, _Spent]:
    processes = {}
    for process in psutil.process_iter():
        try:
            times = process.cpu_times()
            processes[process.pid] = _Spent(process.name(), times.user + times.system)
        except psutil.Error:  # it has ended, or its owner hides it
            continue
    return processes
