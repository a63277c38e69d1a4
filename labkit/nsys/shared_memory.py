"""Removal of the shared memory that a killed nsys leaves.

All nsys processes of one version share a segment, NSys-VERSION. A process that is killed while it writes leaves the
segment half written; every capture on the machine then fails with "Agent launcher failed.", or hangs. Seen with 2022.4.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

SHARED = Path("/dev/shm")
POLL_S = 0.1
SEGMENTS = ("NSys-*", "quadd-*", "sem.nsys_sem_*")


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
