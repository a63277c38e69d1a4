"""Runs of nsys with its agent, a separate process that nsys starts and may lose before the program begins.

All nsys processes of one version share a segment of memory, NSys-VERSION. A process that is killed while it writes
leaves the segment half written; every capture on the machine then fails with "Agent launcher failed.", or hangs. Seen
with 2022.4.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from labkit.nsys.process import Ended

LOST_AGENT = (  # ends of nsys's last line
    *("End of file", "Agent launcher failed."),
    *("Local Endpoint is not available.", "Connection reset by peer", "sem_open"),
)
# Parts of the lines before the last one, which name a place in nsys's own code.
THROWN = ("QuadD", "Dynamic exception type: ", "std::exception::what: ", "[boost::errinfo")
ATTEMPTS = 3  # another capture that begins at the same time can cost a second agent, too
OTHERS_S = 30.0  # for captures of other processes to end
SHARED = Path("/dev/shm")
POLL_S = 0.1
SEGMENTS = ("NSys-*", "quadd-*", "sem.nsys_sem_*")


def run_with_agent(run: Callable[[], Ended], *, under_launcher: bool = False) -> Ended:
    """The result of a `run` of nsys. A run that lost its agent is repeated, up to ATTEMPTS runs in all.

    under_launcher: the run is torch's launcher, which starts an nsys for each rank. All ranks are started again.
    """
    sweep_shared_memory()
    ended = run()
    for _ in range(1, ATTEMPTS):
        if not lost_agent(ended, under_launcher=under_launcher):
            break
        sweep_shared_memory(patience_s=OTHERS_S)  # a broken segment can be removed only when no other capture uses it
        ended = run()
    return ended


def lost_agent(ended: Ended, *, under_launcher: bool = False) -> bool:
    """Whether nsys failed by itself before the program began. All lines of the output are then nsys's own.

    under_launcher: whether the nsys of a rank did so; the programs of other ranks may have printed lines of their own.
    """
    if ended.exit_code == 0 or ended.interrupted or ended.late or not ended.said:
        return False
    if under_launcher:
        return any(line.endswith(LOST_AGENT) and (line in LOST_AGENT or _thrown(line)) for line in ended.said_by_ranks)
    *before, last = ended.said
    return last.endswith(LOST_AGENT) and all(map(_thrown, before))


def _thrown(line: str) -> bool:
    return any(mark in line for mark in THROWN)


def sweep_shared_memory(folder: Path = SHARED, *, patience_s: float = 0.0) -> None:
    """Removes this user's segments of nsys, unless an nsys that may use them still runs after `patience_s`."""
    until = time.monotonic() + patience_s
    while any(_is_nsys(process) for process in psutil.process_iter(["name", "status"])):
        if time.monotonic() >= until:
            return
        time.sleep(POLL_S)
    for segment in (segment for pattern in SEGMENTS for segment in folder.glob(pattern)):
        with suppress(OSError):  # another capture that begins just now removes them too
            if segment.stat().st_uid == os.getuid():
                segment.unlink()


def _is_nsys(process: psutil.Process) -> bool:
    name, status = process.info["name"], process.info["status"]
    return (name or "").startswith("nsys") and status != psutil.STATUS_ZOMBIE
